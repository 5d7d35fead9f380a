"""Run the eager runtime with what a memory budget has decided for compiled code: its reference.

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

from autoshard.passes.ir.plan import Plan, SavedBlock
from autoshard.runtime.compiled.plans import plans_by_root
from autoshard.runtime.eager import access
from autoshard.runtime.eager.decided import follow, values_on_host
from autoshard.runtime.eager.saved import in_checkpoint
from autoshard.runtime.unit.param import ShardedParam
from autoshard.runtime.unit.unit import ROOT_NAME, listed


@contextlib.contextmanager
def as_planned(model: nn.Module) -> Iterator[None]:
    """Context in which `model` runs uncompiled, and saves for backward what its plans say.

    model: sharded, or what torch.compile made of it. It was compiled with a `memory_budget`, and
    has run. All ranks enter, as all compile.

    Forwards in this context run on the eager runtime, and so does all compiled code of the process.
    A block of which the plan gives values up is run again in backward, all of it. Of a block with
    values on the host, as many bytes of what it saves go there. Parameters that compiled code keeps
    from forward to backward stay. So blocks save as much as the plan says, or less, and the numbers
    are those of any eager step, bit for bit. What is done between blocks saves what it always does.
    Backward may run after the context.

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
            for name, block in blocks.items():
                for module in _own_modules(root, name, blocks):
                    stack.enter_context(_forward_of(module, block))
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
    params = (
        param for each in root.modules() for param in each.__dict__.get(access.PARAMS, {}).values()
    )
    return {param for param in params if param.name in names}


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
    try:
        return root.get_submodule(name)
    except AttributeError:
        return root if name in (ROOT_NAME, "start") else None


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
def _forward_of(module: nn.Module, block: SavedBlock) -> Iterator[None]:
    """Have the forward of `module` save what is decided for `block`, in this context."""
    forward = module.forward
    if block.given_up_bytes > block.host_bytes:
        run = _run_again(module, forward)
    elif block.host_bytes:
        run = _on_host(module, forward, block.host_bytes)
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
        if not torch.is_grad_enabled() or in_checkpoint():  # of the user's, around it
            return forward(*args, **kwargs)
        buffers = _Buffers(module)
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            context_fn=lambda: (buffers.looked_at(), buffers.as_before()),
            **kwargs,
        )

    return run


def _on_host(module: nn.Module, forward: Callable[..., Any], num_bytes: int) -> Callable[..., Any]:
    """Return `forward` with `num_bytes` of what it saves on the host."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with values_on_host(num_bytes, [*module.parameters(), *module.buffers()]):
            return forward(*args, **kwargs)

    return run


class _Buffers:
    """Buffers of a module that its forward writes, as they were before it."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._written: dict[tuple[nn.Module, str], Tensor] = {}

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[None]:
        """Find out in this context, the forward, which are written."""
        before = {at: (each, each._version, each.clone()) for at, each in self._all().items()}
        yield
        self._written = {
            at: value
            for at, (buffer, version, value) in before.items()
            if self._all().get(at) is not buffer or buffer._version != version
        }

    @contextlib.contextmanager
    def as_before(self) -> Iterator[None]:
        """Put copies of them in place in this context, the same forward again."""
        now = {(module, name): module._buffers.get(name) for module, name in self._written}
        for (module, name), value in self._written.items():
            module._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (module, name), buffer in now.items():
                module._buffers[name] = buffer

    def _all(self) -> dict[tuple[nn.Module, str], Tensor]:
        return {
            (module, name): buffer
            for module in self._module.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
