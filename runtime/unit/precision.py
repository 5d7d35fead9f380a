"""Casts around a unit's forward: of inputs, outputs and buffers. Parameters are cast by gathers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.runtime.unit.unit import Unit, unit_of

_IGNORED = "_autoshard_ignored_module"  # module attribute: its buffers are left alone
_BUFFER_DTYPES = "_autoshard_buffer_dtypes"  # module attribute: {buffer: the dtype it had}


def cast_inputs(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], *, in_full: bool) -> Any:
    """Cast floating-point inputs of a forward to the unit's `param_dtype`; return (args, kwargs).

    They are the same objects where nothing needs a cast, as under a policy without a `param_dtype`
    or with `cast_forward_inputs=False`.
    in_full: whether the unit computes in full precision now: then nothing is cast.
    """
    dtype = unit.settings.mp.param_dtype
    if dtype is None or not unit.settings.mp.cast_forward_inputs or in_full:
        return args, kwargs
    return cast(args, dtype), cast(kwargs, dtype)


def cast_output(unit: Unit, output: Any) -> Any:
    """Cast floating-point tensors in `output` to the unit's `output_dtype`, if it has one."""
    dtype = unit.settings.mp.output_dtype
    return output if dtype is None else cast(output, dtype)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast floating-point tensors in `value` to `dtype`, also in lists, tuples, dicts, dataclasses.

    A container in which nothing changes is passed on itself, not a copy of it: forward may
    want to write to it. Else it is a new one of the same class (dataclasses by
    `dataclasses.replace`). Other values are passed on as they are. Casts are differentiable.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (list, tuple)):
        return _rebuilt(value, list(value), dtype, lambda parts: _like(value, parts))
    if isinstance(value, dict):
        made = _rebuilt(value, list(value.values()), dtype, lambda parts: parts)
        return value if made is value else _dict_like(value, made)
    if value is None:
        return value  # Dynamo of torch 2.11 can't ask None whether it is a dataclass
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [f for f in dataclasses.fields(value) if f.init]
        parts = [getattr(value, field.name) for field in fields]
        return _rebuilt(
            value,
            parts,
            dtype,
            lambda parts: dataclasses.replace(
                value, **{f.name: part for f, part in zip(fields, parts, strict=True)}
            ),
        )
    return value


def _rebuilt(
    value: Any, parts: list[Any], dtype: torch.dtype, make: Callable[[list[Any]], Any]
) -> Any:
    """Cast the `parts` of a container; return `make` of them, or `value` if none has changed."""
    changed = [cast(part, dtype) for part in parts]
    same = all(new is old for new, old in zip(changed, parts, strict=True))
    return value if same else make(changed)


def _like(value: list[Any] | tuple[Any, ...], parts: list[Any]) -> Any:
    cls: Any = type(value)
    return cls(*parts) if hasattr(value, "_fields") else cls(parts)  # a namedtuple, or not


def _dict_like(value: dict[Any, Any], parts: list[Any]) -> Any:
    """Return a copy of `value`, of its own class, with `parts` as its values, in its order."""
    made = value.copy()  # of its own class: Hugging Face's outputs are dicts
    for key, part in zip(value, parts, strict=True):
        made[key] = part
    return made


def ignore_buffers(modules: set[nn.Module]) -> None:
    """Have `cast_buffers` leave alone the buffers of `modules`, and of modules inside of them."""
    for module in modules:
        module.__dict__[_IGNORED] = True


def cast_buffers(unit: Unit) -> bool:
    """Replace floating-point buffers of the unit's modules by ones of its `buffer_dtype`.

    Or, if a forward now is to compute in full precision, by ones of the dtype from before any cast.
    Nothing is done if the policy has no `buffer_dtype`. Returns whether any buffer was cast.
    """
    wrong = _wrong_buffers(unit)
    for module, name, buffer, wanted in wrong:
        module._buffers[name] = buffer.to(wanted)
    return bool(wrong)


def _wrong_buffers(unit: Unit) -> list[tuple[nn.Module, str, Tensor, torch.dtype]]:
    """List buffers in a wrong dtype: (module, name, buffer, the dtype that it should have).

    Notes the own dtype of each buffer that is seen for the first time. Empty if the policy has no
    `buffer_dtype`.
    """
    found: list[tuple[nn.Module, str, Tensor, torch.dtype]] = []
    if unit.settings.mp.buffer_dtype is None:
        return found
    for head in unit.modules:
        for module in _own_modules(head):
            own = module.__dict__.setdefault(_BUFFER_DTYPES, {})
            for name, buffer in module._buffers.items():
                if buffer is None or not buffer.is_floating_point():
                    continue
                own.setdefault(name, buffer.dtype)
                wanted = (
                    own[name] if unit.asks_for_full_precision else unit.settings.mp.buffer_dtype
                )
                if buffer.dtype != wanted:
                    found.append((module, name, buffer, wanted))
    return found


def units_that_cast(module: nn.Module) -> list[Unit]:
    """Units that modules in `module` head, and whose policy has a `buffer_dtype`."""
    units = (unit_of(each) for each in module.modules())
    return [
        unit for unit in units if unit is not None and unit.settings.mp.buffer_dtype is not None
    ]


def _own_modules(head: nn.Module) -> list[nn.Module]:
    """List `head` and the modules in it, less those that are ignored or head another unit.

    Modules inside of these are left out, too.
    """
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        """Add `module` to `found`, and what is below it, unless it is ignored or there already.

        Children that head a unit are left out.
        """
        if module in found or module.__dict__.get(_IGNORED):
            return
        found[module] = None
        for child in module.children():
            if unit_of(child) is None:
                visit(child)

    visit(head)
    return list(found)


def keep_buffer_dtypes(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Cast buffers in `state_dict` back to the dtype that they had before `cast_buffers`.

    `state_dict` is changed in place: buffers of `module` and of all modules below it, whose keys
    begin with `prefix`. `module.state_dict()` calls it last, as a hook on modules that head units.
    """
    for path, each in module.named_modules():
        for name, dtype in each.__dict__.get(_BUFFER_DTYPES, {}).items():
            key = f"{prefix}{path}.{name}" if path else prefix + name
            if key in state_dict:
                state_dict[key] = state_dict[key].to(dtype)
