"""Torch's own data parallelism: what it, and pipelines, look for on a module.

Tried on torch 2.11.0, 2.13.0 and 2.15.0.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed.fsdp
from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

DATA_PARALLEL = ("fully_shard", "replicate")
"""Composable functions of torch that take a module's parameters for themselves."""


def enter_contract(module: torch.nn.Module) -> None:
    """Have torch's `fully_shard` and `replicate` leave `module` alone.

    Given a module around it they skip it; given `module` itself they raise AssertionError.

    Patched: `module`'s entry in the registry of torch's composable functions, in its `__dict__`.
    Why:     the registry is torch's own; DDP around a unit takes its shards for parameters.
    Tests:   `test_ddp_takes_shards_for_parameters`, needed; in
             tests/parity/sharding/test_composition.py `test_ddp_around_a_unit`, works.
    """
    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    for name in DATA_PARALLEL:
        registry.setdefault(name, RegistryItem())


def contracts(module: torch.nn.Module) -> list[str]:
    """List which of torch's `fully_shard` and `replicate` were applied to `module`, by name.

    `enter_contract` has entered both for the modules of our units.
    """
    registry = module.__dict__.get(REGISTRY_KEY, {})
    return [name for name in DATA_PARALLEL if name in registry]


def stand_in_for_fsdp2(module: torch.nn.Module, finish: Callable[[], object]) -> None:
    """Give `module` a state that pipelining takes for FSDP2's, and reduces gradients with.

    Up to torch 2.13, torch.distributed.pipelining asks for the state of a stage, and reduces the
    stage's gradients through it after the last microbatch.
    finish: called then, without arguments, to reduce them.

    Patched: `module`'s entry among the states of torch's composable functions, in its `__dict__`.
    Why:     pipelining takes every `FSDPModule` for one of torch's own. Since 2.14 it calls
             methods, as `FSDPModule` has them.
    Tests:   `test_pipelines_look_for_the_state_of_fsdp2`, needed; in
             tests/parity/sharding/test_fsdp2_surface.py `test_stages_of_a_pipeline`, works.
    """
    from torch.distributed._composable.contract import STATE_KEY
    from torch.distributed.fsdp import fully_shard

    group = SimpleNamespace(post_backward=lambda: None)
    state = SimpleNamespace(_root_post_backward_final_callback=finish)
    state._fsdp_param_groups, state._fsdp_param_group = [group], group  # since 2.13; in 2.11
    state._state_ctx = SimpleNamespace(all_states=[state])
    states = module.__dict__.setdefault(STATE_KEY, {})
    # A decorator of torch's has put it there, which its types don't say.
    states[fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def share_register_forward_method(
    is_ours: Callable[[torch.nn.Module], bool], ours: Callable[[torch.nn.Module, str], None]
) -> None:
    """Have torch's `register_fsdp_forward_method` call `ours` for modules that are ours.

    What has imported it by name before keeps torch's, whose methods fail with our modules.

    Patched: `torch.distributed.fsdp.register_fsdp_forward_method`, for good.
    Why:     it takes every `FSDPModule` for one of torch's own, and transformers' Trainer gives it
             the model's `generate`.
    Tests:   `test_forward_methods_ask_for_the_state_of_fsdp2`, needed; in
             tests/parity/sharding/test_methods.py `test_methods_other_than_forward`, works.
    """
    original = torch.distributed.fsdp.register_fsdp_forward_method

    @functools.wraps(original)
    def register(module: torch.nn.Module, method_name: str) -> None:
        """Register a method as FSDP2 does, or as autoshard does."""
        (ours if is_ours(module) else original)(module, method_name)

    torch.distributed.fsdp.register_fsdp_forward_method = register


def overlap_gathers(module: torch.nn.Module) -> None:
    """Have the gathers of an FSDP2 `module` run beside compute on a CPU, as they do on a GPU."""
    # A method of FSDP2's; to type checkers, what a module lacks is a tensor or a module.
    module._set_unshard_async_op(True)  # type: ignore[operator]
