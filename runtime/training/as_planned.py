"""Run the eager runtime as a memory budget has decided for compiled code, for a reference.

plans(model) -> blocks to run again, values on the host, parameters that stay -> uncompiled forward

A plan decides value by value; here a block that gives up some values is run again as a whole.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autoshard import _torch
from autoshard.passes.ir.plan import Plan, SavedBlock
from autoshard.runtime.compiled.plans import plans_by_root
from autoshard.runtime.eager import access
from autoshard.runtime.eager.decided import Room, follow, values_on_host
from autoshard.runtime.eager.saved import in_checkpoint
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.unit import ROOT_NAME, listed


@contextlib.contextmanager
def as_planned(model: nn.Module) -> Iterator[None]:
    """Context in which `model` runs uncompiled, and saves for backward what its plans say.

    model: sharded, or what torch.compile made of it. It was compiled with a `memory_budget`, and
    has run. All ranks enter, as all compile.

    Forwards in this context run on the eager runtime, and so does all compiled code of the process.
    A block of which the plan gives values up is run again in backward, all of it, by torch's
    checkpoint. Of a block with values on the host, as many bytes of what it saves go there. Of
    other blocks, parameters that compiled code keeps from forward to backward stay. Backward may
    run after the context.

    Blocks are followed where their modules are called: what is done between them, or by another
    method than forward, saves what it always does. Where a block is run again, it finds the buffers
    that it has written as they were, in copies that are kept for that. As with any checkpoint, it
    must not write to its arguments, or depend on attributes that it writes, and modules stay in
    their modes until backward is over. Then the numbers are those of any eager step, bit for bit.

    It is a reference: to find out whether numbers, or memory, come from the compiler. Copies to the
    host and back are not hidden.

    Raises ValueError if `model` has no plans yet, or if a plan is of a block that is not there.
    """
    found = plans_by_root(model)
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no plans to follow: compile it with a memory_budget, and "
            "run a step, before as_planned()"
        )
    kept: set[ShardedParam] = set()
    with contextlib.ExitStack() as stack:
        for root, plans in found.items():
            kept |= _kept(root, plans)
            blocks = _decisions(plans)
            missing = [name for name in blocks if _module(root, name) is None]
            if missing:
                raise ValueError(
                    f"plans of {type(root).__name__} are of {listed(missing)}, which is no module "
                    "of it any more: compile it again"
                )
            stay = [*map(_torch.dtensor.local_of, (*root.parameters(), *root.buffers()))]
            for name, block in blocks.items():
                modules = list(_own_modules(root, name, blocks))
                room = Room(block.host_bytes, stay)
                for module in modules:
                    is_first = module is modules[0]
                    stack.enter_context(_forward_of(module, block, room, is_first=is_first))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(follow(kept))
        yield


def _kept(root: nn.Module, plans: Sequence[Plan]) -> set[ShardedParam]:
    """Find the parameters that forwards gather, and backwards do not gather again."""
    gathered: dict[str, set[str]] = {"forward": set(), "backward": set()}
    for plan in plans:
        for bucket in plan.buckets:
            if bucket.kind == "gather":
                gathered.setdefault(plan.graph, set()).update(bucket.names)
    names = gathered["forward"] - gathered["backward"]
    return {param for param in access.params_below(root) if param.name in names}


def _decisions(plans: Sequence[Plan]) -> dict[str, SavedBlock]:
    """Return what plans have decided, by the name of the block's module.

    Of a block that runs several times that decision counts which gives up most.
    """
    found: dict[str, SavedBlock] = {}
    for block in (block for plan in plans for block in plan.saved):
        name = re.sub(r" \d+$", "", block.name)
        known = found.get(name)
        if known is None or block.given_up_bytes > known.given_up_bytes:
            found[name] = block
    return found


def _module(root: nn.Module, name: str) -> nn.Module | None:
    """Return the module of the block `name`; that of what stands before all blocks is the root."""
    if name in (ROOT_NAME, "start"):
        return root
    try:
        return root.get_submodule(name)
    except AttributeError:
        return None


def _own_modules(root: nn.Module, name: str, blocks: Collection[str]) -> Iterator[nn.Module]:
    """Yield the largest modules of the block `name` that run, and have no other block in them."""
    top = _module(root, name)
    assert top is not None
    others = {_module(root, other) for other in blocks} - {top, None}

    def below(module: nn.Module) -> Iterator[nn.Module]:
        is_whole = module is not root and not _is_container(module)
        if is_whole and others.isdisjoint(module.modules()):
            yield module
            return
        for child in module.children():
            if child not in others:
                yield from below(child)

    yield from below(top)


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


@contextlib.contextmanager
def _forward_of(
    module: nn.Module, block: SavedBlock, room: Room, *, is_first: bool
) -> Iterator[None]:
    """Have the forward of `module` save what is decided for `block`, in this context.

    room: of the block, on the host. is_first: whether the block begins with the module.
    """
    forward = module.forward
    if block.given_up_bytes > block.host_bytes:
        run = _run_again(module, forward)
    elif block.host_bytes:
        run = _on_host(forward, room, is_first=is_first)
    else:
        yield
        return
    had_own = "forward" in module.__dict__
    module.forward = run
    try:
        yield
    finally:
        if had_own:
            module.forward = forward
        else:
            del module.forward


def _run_again(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return `forward` with a checkpoint around, which leaves the module's buffers as they are."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        is_again = in_checkpoint()  # or will be, in a checkpoint of the user's
        if is_again or not torch.is_grad_enabled() or _torch.autograd.in_functorch():
            return forward(*args, **kwargs)
        # Of arguments given by name, a checkpoint would not see that they are written to.
        given, spec = _torch.tensors.tree_flatten((args, kwargs))

        def call(*given: Any) -> Any:
            args, kwargs = _torch.tensors.tree_unflatten(list(given), spec)
            return forward(*args, **kwargs)

        buffers = _Buffers(module)
        contexts = _Looking(buffers), _AsBefore(buffers)
        return checkpoint(call, *given, use_reentrant=False, context_fn=lambda: contexts)

    return run


def _on_host(forward: Callable[..., Any], room: Room, *, is_first: bool) -> Callable[..., Any]:
    """Return `forward` with what it saves on the host, as far as there is room."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_first:
            room.empty()
        with values_on_host(room):
            return forward(*args, **kwargs)

    return run


class _Buffers:
    """Buffers of a module that its forward writes, as they were before it; None is one, too.

    written: by module and name. A buffer in several places has one copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.written: dict[tuple[nn.Module, str], Tensor | None] = {}

    def now(self) -> dict[tuple[nn.Module, str], Tensor | None]:
        """Return all buffers as they are."""
        return {
            (module, name): buffer
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
        }


class _Looking:
    """Context of the forward: finds out which buffers are written."""

    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        self._before = self._buffers.now()
        present = [each for each in self._before.values() if each is not None]
        self._versions = {id(each): each._version for each in present}
        self._values: dict[int, Tensor] = {}
        for each in present:
            if id(each) not in self._values:
                self._values[id(each)] = each.clone()

    def __exit__(self, *error: object) -> None:
        now = self._buffers.now()
        for at, buffer in self._before.items():
            is_same = now.get(at) is buffer
            if buffer is None:
                if not is_same:
                    self._buffers.written[at] = None
            elif not is_same or buffer._version != self._versions[id(buffer)]:
                self._buffers.written[at] = self._values[id(buffer)]
        del self._before, self._versions, self._values


class _AsBefore:
    """Context of the same forward again, each time: copies stand in place of written buffers."""

    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers

    def __enter__(self) -> None:
        written = self._buffers.written
        self._now = {(module, name): module._buffers.get(name) for module, name in written}
        copies: dict[int, Tensor] = {}
        for (module, name), value in written.items():
            if value is not None and id(value) not in copies:
                copies[id(value)] = value.clone()
            module._buffers[name] = None if value is None else copies[id(value)]

    def __exit__(self, *error: object) -> None:
        for (module, name), buffer in self._now.items():
            module._buffers[name] = buffer
        del self._now
