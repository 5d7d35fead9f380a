"""DTensors and their meshes: made without moving data, taken apart without autograd.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, _api
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

_D = TypeVar("_D", bound=DTensor)


def make_spec(
    mesh: DeviceMesh, placements: Sequence[Placement], size: Sequence[int], dtype: torch.dtype
) -> Any:
    """Make the spec of a contiguous DTensor of global `size`."""
    whole = torch.empty(size, dtype=dtype, device="meta")
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def from_spec(local: torch.Tensor, spec: Any) -> DTensor:
    """Return the DTensor of `spec` whose part on this rank is `local`, which is not moved.

    `DTensor.from_local` would move `local` to the mesh's device.
    """
    return make(DTensor, local, spec)


def make(cls: type[_D], local: torch.Tensor, spec: Any, *, requires_grad: bool = False) -> _D:
    """Return a DTensor of class `cls`; else as `from_spec`."""
    # Not by calling the class: its `__init__` does nothing, and keeping Dynamo from that takes
    # longer than the rest.
    # The ignore: `__new__` of a subclass is typed as that of DTensor.
    made: _D = cls.__new__(cls, local, spec, requires_grad=requires_grad)  # type: ignore[assignment]
    return made


def local_box(
    size: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and offset of the part on this rank of a DTensor of global `size`."""
    return compute_local_shape_and_global_offset(size, mesh, placements)


def write_assigned_data(write: Callable[[DTensor, object], bool]) -> None:
    """Have `param.data = value` of a DTensor call `write(param, value)`, from now on.

    If that returns False the assignment is torch's.

    Patched: the attribute `data` of the class `DTensor`.
    Why:     torch takes over the other's sizes and dtype, and leaves its values: the part on this
             rank stays as it was, in silence. PEFT merges DoRA adapters so.
    Tests:   `test_data_assigned_to_a_dtensor_is_lost`, needed; in
             tests/parity/sharding/test_fsdp2_surface.py `test_data_that_is_assigned`, works.
    """
    original: Any = torch.Tensor.data  # a descriptor, which its type doesn't say

    def assign(tensor: DTensor, value: object) -> None:
        """Assign as `write` does, or else as torch."""
        if not write(tensor, value):
            original.__set__(tensor, value)

    # The ignores: to type checkers `data` is a tensor, and not to be replaced on the class.
    DTensor.data = property(original.__get__, assign)  # type: ignore[assignment, method-assign]


def distribute_also(kind: type[Placement], cut: Callable[..., DTensor]) -> None:
    """Have torch cut placements of `kind` by `cut`, where it distributes tensors, from now on.

    Patched: `torch.distributed.tensor.distribute_tensor`, also where state dicts have it, and
    `torch.distributed._state_dict_utils._distribute_tensors`, which cuts what the first rank has
    broadcast. The one raises for placements that torch doesn't know, the other takes them to cut
    nothing, and neither asks anybody else. Who imported the first by name before gets the error.
    Tested by `test_torch_distributes_no_other_placements`.

    cut: like `distribute_tensor`, with a mesh and placements one of which is of `kind`.
    """
    known, known_of_many = _api.distribute_tensor, _state_dict_utils._distribute_tensors

    def is_asked(placements: Sequence[Placement] | None) -> bool:
        return any(isinstance(each, kind) for each in placements or ())

    @functools.wraps(known)
    def distribute(
        tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **keywords: Any,
    ) -> DTensor:
        """Do as torch's does, but for placements of `kind`."""
        if not is_asked(placements):
            return known(tensor, device_mesh, placements, **keywords)
        return cut(tensor, device_mesh, placements, **{"src_data_rank": 0, **keywords})

    @functools.wraps(known_of_many)
    def distribute_many(states: dict[str, Any], keys: list[str], *rest: Any, **named: Any) -> None:
        """Do as torch's does, but for states placed by `kind`, which are written to, or made."""
        for key in keys:
            pair = states.get(key)
            if not isinstance(pair, tuple) or not is_asked(pair[0].placements):
                continue
            state, whole = pair
            part = cut(whole.detach(), state.device_mesh, state.placements)
            if state.is_meta:
                part = make(type(part), local_tensor(part).clone(), spec_of(part))
            else:
                local_tensor(state).copy_(local_tensor(part))
                part = state
            states[key] = part
        known_of_many(states, keys, *rest, **named)

    # The ignores: patches.
    for module in (torch.distributed.tensor, _api, _state_dict_utils):
        module.distribute_tensor = distribute  # type: ignore[attr-defined]
    _state_dict_utils._distribute_tensors = distribute_many  # type: ignore[assignment]


SUBCLASSES_DISPATCH = torch.__version__ >= (2, 12)  # type: ignore[operator]  # a TorchVersion
"""Whether operators on a subclass of DTensor run its `__torch_dispatch__`."""


def spec_of(tensor: DTensor) -> Any:
    """Spec of `tensor`, as `from_spec` takes it."""
    return tensor._spec


def local_tensor(param: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, without autograd."""
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]  # a DTensor has it
    return local


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local tensor of a DTensor, without autograd; any other tensor as it is."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Placement that cuts along `dim` after `split_factor` ranks of later mesh axes have cut it.

    With a `split_factor` of 1 it is `Shard(dim)`.
    """
    return Shard(dim) if split_factor == 1 else _StridedShard(dim, split_factor=split_factor)


def join_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Join `meshes`, slices of one mesh, into one mesh of all their axes.

    Raises RuntimeError if they are no slices of one mesh.
    """
    joined: DeviceMesh = DeviceMesh._concatenate(meshes)
    return joined


def flatten_mesh(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    """Return a mesh of one axis over all ranks of the axes `names` of `mesh`.

    Several axes are flattened into one, whose name is theirs joined by "_". That may make a process
    group, so that all ranks of `mesh` call this together.
    """
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat
