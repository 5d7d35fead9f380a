"""State that each rank has of its own: random number generators, and objects that users give."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from autoshard import _torch
from autoshard.runtime.training.checkpoint.objects import to_bytes, to_plain
from autoshard.runtime.training.checkpoint.on_ranks import num_ranks
from autoshard.runtime.training.checkpoint.reader import new_tensor

RANKS = "ranks"  # key of these states
STATES = "`states`"  # in errors


class Stateful(Protocol):
    """Object with a state of its own: a data loader, a learning-rate schedule, a GradScaler."""

    def state_dict(self) -> Any: ...

    def load_state_dict(self, state: Any, /) -> object: ...


def own_state(states: Mapping[str, Stateful], buffers: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the states of `states`, `buffers`, and this rank's random number generators.

    Generators are those of torch, of the current CUDA device, of Python, and of NumPy if imported;
    their states are copies. `state_dict()` of each object is called, and not copied.
    """
    own: dict[str, Any] = {
        "states": {name: to_plain(each.state_dict()) for name, each in states.items()},
        "buffers": dict(buffers),
        "torch": torch.get_rng_state(),
        "random": random.getstate(),
    }
    if torch.cuda.is_available():
        own["cuda"] = torch.cuda.get_rng_state()
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        own["numpy"] = (kind, keys.tolist(), *rest)
    return own


def own_bytes(own: Mapping[str, Any]) -> Tensor:
    """Return what `own_state` has found, as bytes. Raises ValueError as `to_bytes`."""
    return to_bytes(own, STATES)


def room_for_own(known: Mapping[str, Any], source: str) -> Tensor:
    """Make room for the bytes of rank `source`'s own state. Raises ValueError if none are saved.

    known: metadata of what is saved, by key.
    """
    own = known.get(f"{RANKS}.{source}")
    if not isinstance(own, TensorStorageMetadata):
        raise ValueError(f"there is nothing of rank {source}'s own: it was not saved by autoshard")
    return new_tensor(own)


def check_states(saved: Mapping[str, Any], states: Mapping[str, Stateful], world: int) -> None:
    """Raise ValueError if one of `states` is missing in `saved`, or can't be loaded here.

    It can't if it has DTensors, and the number of ranks is another.

    world: the number of ranks that saved it.
    """
    missing = sorted(states.keys() - saved.keys())
    if missing:
        raise ValueError(
            f"there is no state of {missing}, but of {sorted(saved)}: give `states` as it "
            "was saved with"
        )
    for name in states if world != num_ranks() else ():
        if any(isinstance(leaf, DTensor) for leaf in _torch.tensors.tree_leaves(saved[name])):
            raise ValueError(
                f"the state of {name!r} has shards of tensors, as {world} ranks had them: load it "
                "on as many, or have it save whole tensors"
            )


def load_states(saved: Mapping[str, Any], states: Mapping[str, Stateful]) -> None:
    """Load each of `states` from `saved`, by name. Raises RuntimeError, naming it, if one fails."""
    for name, each in states.items():
        try:
            each.load_state_dict(saved[name])
        except Exception as error:
            raise RuntimeError(f"the state of {name!r}: {type(error).__name__}: {error}") from error


def set_generators(own: Mapping[str, Any]) -> None:
    """Set this rank's random number generators to the states in `own`, as far as it has them."""
    torch.set_rng_state(own["torch"])
    random.setstate(own["random"])
    if "cuda" in own and torch.cuda.is_available():
        torch.cuda.set_rng_state(own["cuda"])
    if "numpy" in own and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(own["numpy"])
