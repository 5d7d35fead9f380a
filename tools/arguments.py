"""Arguments that commands share: how they are described, and how they are read."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from typing import Any

BATCH = (
    "package.module:function of (rank, step) that returns a batch: a dict of keyword arguments, a "
    "tuple of arguments, or one argument"
)


def add_command(commands: Any, name: str, example: str, **texts: str) -> Any:
    """Add a command whose help ends with `example`, line by line as it is; return its parser.

    commands: subparsers to add it to.
    texts: `help` and `description`.
    """
    formatter = argparse.RawDescriptionHelpFormatter
    return commands.add_parser(name, epilog=example, formatter_class=formatter, **texts)


def read_options(text: str) -> dict[str, Any]:
    """Read the backend's options from the text of `--options`.

    Raises ValueError for what is no JSON object; the options themselves are not checked.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"--options {text!r} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"--options {text!r}: expected an object, such as '{{\"strict\": true}}'")
    return found


def as_call(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Read a batch as arguments: a dict of keyword arguments, a tuple, or one argument."""
    if isinstance(batch, dict):
        return (), batch
    return (batch if isinstance(batch, tuple) else (batch,)), {}


def load(place: str) -> Any:
    """Import and return the function at `place`, "package.module:name".

    Raises ValueError if the module can't be imported, or has no such name, or it can't be called;
    what else the module raises, as it is imported, is passed on.
    """
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"can't load {place!r} ({error}); {_expected(place)}") from error
    if not callable(found):
        raise ValueError(f"{place!r} is a {type(found).__name__}; expected a function")
    return found


def _expected(place: str) -> str:
    """Say what stands in the place of `place`; of a name on the Hub, how to get its config."""
    if ":" in place or not re.fullmatch(r"[\w.-]+/[\w.-]+", place):
        return "expected package.module:function"
    return (
        "if that is a model on the Hub, nothing is downloaded here: get its config with "
        f"`hf download {place} config.json --local-dir .`, and give --model config.json; else "
        "expected package.module:function"
    )
