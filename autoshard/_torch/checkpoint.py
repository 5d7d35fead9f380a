"""torch.distributed.checkpoint: names of parameters, and state dicts that it looks behind.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict as _checkpoint


def look_behind(method: Callable[..., dict[str, Any]]) -> None:
    """Have torch.distributed.checkpoint skip `method` on modules that have it as `state_dict`.

    It then calls the `state_dict` of the module's class. It does so, too, on modules whose
    `state_dict` is equal to `method`.

    Patched: `torch.distributed.checkpoint.state_dict._patched_state_dict`, a set.
    Why:     it takes the prefix of torch.compile off by itself, and fails if it finds none.
    Tests:   `test_checkpoints_take_the_prefix_off`, needed; in tests/parity/training/test_state.py
             `test_names`, works.
    """
    _checkpoint._patched_state_dict.add(method)


def name_of(model: torch.nn.Module, name: str, known: dict[str, str]) -> str:
    """Name of a parameter of `model` in a checkpoint: no wrapper's prefix is in it.

    name: as `model.named_parameters()` has it.
    known: names that were found before, by `name`; this one is added.
    """
    if name not in known:
        (known[name],) = _checkpoint._get_fqns(model, name)
    return known[name]


def state_of(model: torch.nn.Module, known: dict[str, str]) -> dict[str, Any]:
    """Return what torch's `get_model_state_dict` does, in the order of the model's `state_dict`.

    It looks each name up three times in each call, which is most of its time.

    known: as of `name_of`.
    """
    state = _checkpoint._state_dict_fn(model, "state_dict")()
    return {name_of(model, name, known): value for name, value in state.items()}
