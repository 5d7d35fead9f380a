"""Parameters and saved buffers of a model, each with all of its names and places."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from autoshard import _torch
from autoshard.runtime.eager import access
from autoshard.runtime.ranks.order import compare_event
from autoshard.runtime.unit.param import ShardedParam, find
from autoshard.runtime.unit.unit import Unit


@dataclass
class Target:
    """Parameter or buffer of a model: its names, more than one if it is tied, and its places.

    copies: others that get the same values, as those that adapters train.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    copies: list[Target] = field(default_factory=list)

    @property
    def sharded(self) -> ShardedParam | None:
        """Its sharded parameter; None for a buffer or an ignored parameter."""
        return find(self.tensor)

    @property
    def is_on_meta(self) -> bool:
        """Whether it has no values yet."""
        return self.tensor.is_meta if self.sharded is None else self.sharded.shard.is_meta


def targets_of(model: nn.Module) -> dict[str, Target]:
    """Find the parameters, and the buffers that are saved, of `model`, by all of their names."""
    by_tensor: dict[Tensor, Target] = {}
    found: dict[str, Target] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unsaved = _torch.nn.unsaved_buffers(module)
        saved = {name: its for name, its in module._buffers.items() if name not in unsaved}
        for attribute, tensor in (*module._parameters.items(), *saved.items()):
            if tensor is None:
                continue
            name = f"{path}.{attribute}".removeprefix(".")
            target = by_tensor.setdefault(tensor, Target(tensor))
            target.names.append(name)
            target.places.append((module, attribute))
            found[name] = target
    return found


def unit_in(model: nn.Module) -> Unit | None:
    """Return the first unit in `model`; None if nothing of it is sharded."""
    units = (access.unit_of(module) for module in model.modules())
    return next((unit for unit in units if unit is not None), None)


def check_together(model: nn.Module, what: str) -> None:
    """Raise RuntimeError unless all ranks of `model` are at `what`; they wait for each other.

    A rank that came here alone would meet another collective of its peers. Does nothing if no
    module of `model` is sharded.

    what: the call, with arguments that must be the same, as text.
    """
    unit = unit_in(model)
    if unit is not None:
        hint = "it gathers or reads for all of them, so all ranks call it together"
        compare_event(what, unit.axes.mesh, hint=hint)
