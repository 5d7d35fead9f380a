"""One sharded parameter: a DTensor of the true global shape, this rank's rows inside.

The module keeps the DTensor in `_parameters`, so `parameters()`, optimizers and
`state_dict()` see shards of the right global shape. What forward reads is the
business of `access.py`.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoshard.passes.layout import Member, first_row, local_rows, show_members

if TYPE_CHECKING:
    from autoshard.runtime.unit import Unit


@dataclass(eq=False)
class ShardedParam:
    """One parameter, wherever it is registered.

    name:   from the outermost sharded module, "layers.3.mlp.w1"; the first name if tied.
    places: every (module, attribute) that reads it; more than one if tied.
    param:  the DTensor `nn.Parameter` that all places share.
    """

    name: str
    member: Member
    mesh: DeviceMesh
    param: nn.Parameter
    unit: Unit = field(init=False)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # What the getter hands to the marker under torch.compile: plain constants to guard on.
        self.members = show_members((self.member,))
        self.group = str(self.mesh.get_group().group_name)
        self.world = self.mesh.size()

    @property
    def shard(self) -> Tensor:
        """This rank's rows, (local rows, *rest); the storage that optimizers update."""
        return local_tensor(self.param)

    @property
    def keep(self) -> bool:
        """Whether the whole parameter is kept from forward to backward."""
        return not self.unit.reshards

    def grad_from(self, shard: Tensor) -> DTensor:
        """A gradient for `param` out of this rank's rows of it."""
        return dtensor_from_shard(shard, self.mesh, self.member.size)

    def check_version(self, version: int) -> None:
        """Raise RuntimeError if the parameter was written to since it had `version`.

        A DTensor counts its versions itself: its local tensor's counter stands still.
        """
        if self.param._version != version:
            raise RuntimeError(
                f"parameter {self.name} was modified in place between forward and backward "
                f"(version {self.param._version}, expected {version}): step the optimizer, and "
                "write to parameters, after backward"
            )

    def refresh(self) -> bool:
        """Follow what was done to the modules since: a parameter replaced, or converted.

        As by `load_state_dict(assign=True)`, or `model.to(dtype)`. Returns whether it was.
        """
        before = self.param, self.member.dtype
        for module, attribute in self.places:
            param = module._parameters.get(attribute)
            if param is not None and param is not self.param and isinstance(param, DTensor):
                self._replace(param)
                break
        dtype = self.shard.dtype
        if dtype != self.member.dtype:
            self.member = Member(dtype, self.member.size)
            self.members = show_members((self.member,))
        return self.param is not before[0] or dtype != before[1]

    def _replace(self, param: nn.Parameter) -> None:
        """Take `param`, put in a module by somebody else, as the parameter of all places.

        Raises ValueError if it is not sharded as this one is.
        """
        value: Tensor = param.data
        if (
            not isinstance(value, DTensor)
            or tuple(value.shape) != self.member.size
            or value.placements != (Shard(0),)
            or value.device_mesh != self.mesh
        ):
            raise ValueError(
                f"{self.name} was replaced after sharding by {_describe(param)}; expected a "
                f"DTensor of size {list(self.member.size)} sharded on dim 0 of {self.mesh}. "
                "Replace parameters before sharding, or load values with load_state_dict"
            )
        remember_origin(self.param, self)  # so that an optimizer which holds it is told
        self.param = param
        for module, attribute in self.places:
            module._parameters[attribute] = param
        remember(self)


def shard_parameter(name: str, param: nn.Parameter, mesh: DeviceMesh) -> ShardedParam:
    """Cut `param` to this rank's rows of it, on the device of `mesh` unless it is on meta.

    Raises ValueError for a scalar, NotImplementedError for a non-contiguous parameter.
    """
    if param.dim() == 0:
        raise ValueError(
            f"parameter {name} is a scalar, which can't be sharded: make it a 1D tensor with "
            "one element"
        )
    if not param.is_contiguous():
        raise NotImplementedError(
            f"parameter {name} is not contiguous (size {list(param.shape)}, stride "
            f"{list(param.stride())}): make it so with param.data = param.data.contiguous() "
            "before sharding"
        )
    world, rank = mesh.size(), mesh.get_local_rank()
    rows = param.shape[0]
    start = first_row(rows, world, rank)
    with torch.no_grad():
        piece = param.detach().narrow(0, start, local_rows(rows, world, rank))
        shard = piece.clone(memory_format=torch.contiguous_format)
        sharded = nn.Parameter(
            dtensor_from_shard(shard, mesh, tuple(param.shape)), requires_grad=param.requires_grad
        )
    made = ShardedParam(name, Member(param.dtype, tuple(param.shape)), mesh, sharded)
    remember_origin(param, made)
    remember(made)
    return made


def dtensor_from_shard(shard: Tensor, mesh: DeviceMesh, size: tuple[int, ...]) -> DTensor:
    """The DTensor of global `size`, sharded on dim 0 of `mesh`, whose rows here are `shard`."""
    stride = torch.empty(size, device="meta").stride()
    return DTensor.from_local(
        shard, mesh, [Shard(0)], run_check=False, shape=torch.Size(size), stride=stride
    )


def local_tensor(param: Tensor) -> Tensor:
    """The local tensor of a DTensor, no autograd."""
    local = param._local_tensor  # type: ignore[attr-defined]
    assert isinstance(local, Tensor)
    return local


# Which parameter became which: by id, since a Tensor's == is no identity. A parameter from
# before sharding, or replaced, has a weak reference beside it, to tell it from a reused id. The
# sharded one must have none (torch's `_apply` swaps no tensor that is weakly referenced):
# its ShardedParam knows it.
_known: dict[int, tuple[weakref.ref[Tensor] | None, weakref.ref[ShardedParam]]] = {}


def remember_origin(param: Tensor, sharded: ShardedParam) -> None:
    """Let `find` answer `sharded` for `param`, which stood or stands for it, while both live."""
    key = id(param)
    _known[key] = (weakref.ref(param, lambda _: _known.pop(key, None)), weakref.ref(sharded))


def remember(sharded: ShardedParam) -> None:
    """Let `find` answer `sharded` for its parameter, for as long as it has that one."""
    key = id(sharded.param)
    _known[key] = (None, weakref.ref(sharded, lambda _: _known.pop(key, None)))


def find(param: object) -> ShardedParam | None:
    """What `param`, a parameter from before or after sharding, belongs to."""
    entry = _known.get(id(param))
    if entry is None:
        return None
    origin, sharded = entry[0], entry[1]()
    if origin is not None:
        return sharded if origin() is param else None
    return sharded if sharded is not None and sharded.param is param else None


def resolve(param: Tensor) -> ShardedParam | None:
    """As `find`, for a parameter that may have been put in place of a sharded one since."""
    sharded = find(param)
    if sharded is not None or not isinstance(param, DTensor):
        return sharded
    wanted: object = param
    for _, known in list(_known.values()):
        candidate = known()
        if candidate is not None and any(
            module._parameters.get(attribute) is wanted for module, attribute in candidate.places
        ):
            candidate.refresh()
            return candidate
    return None


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{type(value.data).__name__} of size {list(value.shape)}"
    return type(value).__name__
