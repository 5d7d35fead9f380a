"""Lines of the user's code, for messages."""

from __future__ import annotations

from pathlib import Path
from types import FrameType


def code_of(frame: FrameType | None) -> str:
    """Describe where the user's code is: the innermost Python frame outside autoshard and torch.

    As "train.py:17 in load_batch". If there is none, it is the innermost of all; for None "its
    end".
    """
    innermost = frame
    while frame is not None and not is_users(frame):
        frame = frame.f_back
    frame = frame or innermost
    return "its end" if frame is None else line_of(frame, frame.f_lineno)


def is_users(frame: FrameType) -> bool:
    """Tell whether `frame` is of neither autoshard nor torch, nor of code that they wrote."""
    module = str(frame.f_globals.get("__name__", ""))
    is_written = frame.f_code.co_filename.startswith("<")  # as "<eval_with_key>.3"
    return module.split(".")[0] not in ("autoshard", "torch") and not is_written


def line_of(frame: FrameType, number: int | None) -> str:
    """Describe line `number` of the code of `frame`, as "train.py:17 in load_batch"."""
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{number} in {code.co_name}"
