"""Hugging Face Accelerate, with its real package: DDP's loop trains the same with autoshard."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import launched, llama, loader, training_bytes
from support.ranks import on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.runtime.unit.unit import unit_of

pytest.importorskip("accelerate", reason="Accelerate is not installed: pip install '.[hosts]'")

FORMS: dict[str, dict[str, Any]] = {"eager": {"lowering": "eager"}, "compiled": {}}


def losses_of(accelerator: Any, model: Any, optimizer: Any, batches: Any) -> list[float]:
    """Train on all batches, one step each: the losses."""
    found = []
    for ids in batches:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


class Run:
    """A loop as Accelerate's guide has it, of a small Llama; under DDP without `options`."""

    def __init__(self, options: dict[str, Any] | None, **settings: Any) -> None:
        from accelerate import Accelerator

        from autoshard.integrations.accelerate import with_autoshard

        accelerator = Accelerator(gradient_accumulation_steps=2, **settings)
        if options is not None:
            accelerator = with_autoshard(accelerator, **options)
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 4)
        self.accelerator = accelerator
        self.model, self.optimizer, self.loader, self.scheduler = accelerator.prepare(
            model, optimizer, loader(32), scheduler
        )

    def train(self, first: int, last: int) -> list[tuple[float, ...]]:
        """Train on some of the batches: mean losses, and norms where there are steps."""
        found: list[tuple[float, ...]] = []
        for number, ids in enumerate(self.loader):
            if not first <= number < last:
                continue
            with self.accelerator.accumulate(self.model):
                loss = self.model(input_ids=ids, labels=ids).loss
                self.accelerator.backward(loss)
                norm = ()
                if self.accelerator.sync_gradients:
                    clipped = self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    norm = (float(clipped),)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            mean = self.accelerator.gather(loss.detach()).mean().item()
            found.append((mean, *norm))
        return found


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_a_loop(rank: int, form: str) -> None:
    """Accumulated, clipped, scheduled: losses, norms and weights are DDP's, for half the memory."""
    with launched(rank) as gradients:
        ddp = Run(None)
        want = ddp.train(0, 8)
        whole = ddp.accelerator.get_state_dict(ddp.model)
        memory = training_bytes(ddp.model, ddp.optimizer, gradients)
    with launched(rank) as gradients:
        ours = Run(FORMS[form])
        found = ours.train(0, 8)
        state = ours.accelerator.get_state_dict(ours.model)
    rounding = 1e-6 if form == "eager" else 1e-4  # norms are summed in another order
    for each, wanted in zip(found, want, strict=True):
        assert each == pytest.approx(wanted, rel=rounding)
    assert training_bytes(ours.model, ours.optimizer, gradients) <= (1 / 2 + 0.1) * memory
    if rank == 0:
        assert state.keys() == whole.keys()
        for name, value in state.items():
            torch.testing.assert_close(value, whole[name], rtol=0, atol=30 * rounding)


@on_ranks(2)
def test_states(rank: int, tmp_path: Path) -> None:
    """What `save_state` has written is loaded into another run, which goes on as the first did."""
    options = FORMS["eager"]
    with launched(rank):
        first = Run(options)
        first.train(0, 4)
        first.accelerator.save_state(str(tmp_path))
        want = first.train(4, 8)
    with launched(rank):
        second = Run(options)
        second.accelerator.load_state(str(tmp_path))
        assert second.train(4, 8) == want


@on_ranks(2)
def test_models_that_are_saved(rank: int, tmp_path: Path) -> None:
    """`save_model` and `save_pretrained` write what transformers loads, on Accelerate's lines."""
    from transformers import LlamaForCausalLM

    with launched(rank):
        run = Run(FORMS["eager"])
        run.train(0, 2)
        accelerator = run.accelerator
        state = accelerator.get_state_dict(run.model)
        accelerator.save_model(run.model, str(tmp_path / "model"))
        accelerator.unwrap_model(run.model).save_pretrained(
            tmp_path / "pretrained",
            is_main_process=accelerator.is_main_process,
            save_function=accelerator.save,
            state_dict=dict(state),  # transformers empties it
        )
        accelerator.wait_for_everyone()
        assert (tmp_path / "model" / "model.safetensors").is_file()
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "pretrained")
        if rank == 0:
            for name, value in loaded.state_dict().items():
                assert torch.equal(value, state[name])


@on_ranks(2)
def test_mixed_precision(rank: int) -> None:
    """Gathered and computed in bf16, kept and reduced in float32; losses are float32."""
    with launched(rank):
        run = Run(FORMS["eager"], mixed_precision="bf16")
        found = run.train(0, 2)
        assert {param.dtype for param in run.model.parameters()} == {torch.float32}
    with launched(rank):
        plain = Run(None, mixed_precision="bf16").train(0, 2)
    assert [each[0] for each in found] == pytest.approx([each[0] for each in plain], rel=2e-3)


@on_ranks(2)
def test_settings_of_a_plugin(rank: int) -> None:
    """They count, and options before them."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from autoshard.integrations.accelerate import with_autoshard

    def gathers(reshard: bool, **options: Any) -> tuple[int, torch.dtype]:
        """Gathers of a step after the first, and the dtype of the output."""
        with launched(rank):
            accelerator = Accelerator()
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=reshard,
                mixed_precision_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            )
            with_autoshard(accelerator, lowering="eager", bucketing="per_unit", **options)
            model = llama()
            model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            ids = next(iter(loader(2)))
            out = model(input_ids=ids, labels=ids)
            out.loss.backward()
            plans = autoshard.plans(model)
            return sum(each.kind == "gather" for plan in plans for each in plan.buckets), (
                out.logits.dtype
            )

    again, dtype = gathers(True)
    once, _ = gathers(False)
    assert dtype == torch.bfloat16
    assert once < again
    assert gathers(False, strategy="full_shard")[0] == again


@on_ranks(2)
def test_a_plugin_that_offloads(rank: int) -> None:
    """Shards are on the host, as the plugin says, and train as they do without."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from autoshard.integrations.accelerate import with_autoshard

    def losses(**settings: Any) -> list[float]:
        with launched(rank):
            accelerator = Accelerator()
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
            accelerator.state.fsdp_plugin = plugin
            with_autoshard(accelerator, lowering="eager")
            model = llama()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
            model, optimizer, batches = accelerator.prepare(model, optimizer, loader(8))
            unit = unit_of(model)
            assert unit is not None
            assert isinstance(unit.settings.offload, autoshard.CPUOffloadPolicy) == bool(settings)
            return losses_of(accelerator, model, optimizer, batches)

    assert losses(cpu_offload=True) == losses()


@on_ranks(2)
def test_units_of_a_plugin(rank: int) -> None:
    """Classes or a size to wrap, and modules to leave alone, are those that the plugin names."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    from autoshard.integrations.accelerate import with_autoshard

    def units(**settings: Any) -> tuple[set[str], set[str]]:
        """Names of modules that head units, and of parameters that are not sharded."""
        with launched(rank):
            accelerator = Accelerator()
            accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, **settings
            )
            model = with_autoshard(accelerator, lowering="eager").prepare(llama())
            heads = {name for name, each in model.named_modules() if unit_of(each) is not None}
            params = model.named_parameters()
            return heads, {name for name, each in params if not isinstance(each, DTensor)}

    layers = {"", "model.layers.0", "model.layers.1"}
    assert units() == (layers, set())
    wrapped = {"auto_wrap_policy": "transformer_based_wrap"}
    assert units(**wrapped) == (layers, set())
    heads, _ = units(**wrapped, transformer_cls_names_to_wrap=["LlamaMLP"])
    assert heads == {"", "model.layers.0.mlp", "model.layers.1.mlp"}
    heads, _ = units(auto_wrap_policy="size_based_wrap", min_num_params=1500)
    assert {"model.layers.0.mlp", "model.layers.1.mlp"} <= heads
    _, plain = units(ignored_modules=r"model\.layers\.\d\.mlp")
    assert len(plain) == 6
    assert all(".mlp." in name for name in plain)


@on_ranks(2)
def test_parameters_of_one_row(rank: int) -> None:
    """Rank 1 has no rows of them, and no addresses to tell them apart: the optimizer has all."""
    from accelerate import Accelerator

    from autoshard.integrations.accelerate import with_autoshard

    def train(accelerator: Any) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 1), nn.Linear(1, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
        for step in range(3):
            accelerator.backward(model(torch.full((2, 4), rank + step + 1.0)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
        whole: nn.Module = accelerator.unwrap_model(model)
        return whole

    with launched(rank):
        theirs = train(Accelerator())
    with launched(rank):
        ours = train(with_autoshard(Accelerator(), lowering="eager"))
    for mine, want in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), want)


@on_ranks(2)
def test_models_without_optimizers(rank: int) -> None:
    """A model is prepared for evaluation as well; prepared again, it is the one that it was."""
    with launched(rank):
        run = Run(FORMS["eager"])
        alone = run.accelerator.prepare(llama())
        ids = next(iter(loader(2)))
        with torch.no_grad():
            want = llama()(input_ids=ids, labels=ids).loss
            assert torch.equal(alone(input_ids=ids, labels=ids).loss, want)
        assert run.accelerator.prepare_model(run.model) is run.model


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("by", ["shard", "load_pretrained"])
@on_ranks(2)
def test_sharded_before(rank: int, by: str, precision: str, tmp_path: Path) -> None:
    """A model that is sharded already is compiled, and with mixed precision kept in float32."""
    from accelerate import Accelerator

    from autoshard.integrations.accelerate import with_autoshard

    low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = {} if precision == "no" else {"mp_policy": low}

    def train(is_sharded: bool) -> tuple[list[float], nn.Module]:
        with launched(rank):
            model = llama().to(torch.bfloat16)  # as many a folder has it
            if is_sharded and by == "shard":
                autoshard.shard(model, **policy)
            elif is_sharded:
                if rank == 0:
                    model.save_pretrained(tmp_path)
                torch.distributed.barrier()
                with torch.device("meta"):
                    model = llama().to(torch.bfloat16)
                autoshard.load_pretrained(model, tmp_path, **policy)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            accelerator = with_autoshard(Accelerator(mixed_precision=precision), **FORMS["eager"])
            model, optimizer, batches = accelerator.prepare(model, optimizer, loader(8))
            return losses_of(accelerator, model, optimizer, batches), model

    losses, model = train(is_sharded=True)
    assert len(autoshard.plans(model)) == 2
    kept = torch.bfloat16 if precision == "no" else torch.float32
    assert {param.dtype for param in model.parameters()} == {kept}
    assert losses == train(is_sharded=False)[0]


@on_ranks(2)
def test_sharded_otherwise(rank: int) -> None:
    """A model that was sharded otherwise than Accelerate is told to is refused when prepared."""
    from accelerate import Accelerator

    from autoshard.integrations.accelerate import with_autoshard

    with launched(rank):
        accelerator = with_autoshard(Accelerator(mixed_precision="bf16"))
        with pytest.raises(ValueError, match=r"options \['mp_policy'\] .* otherwise than it is"):
            accelerator.prepare(autoshard.shard(llama()))


LAUNCHED = """
import torch
from accelerate import Accelerator

from autoshard.integrations.accelerate import with_autoshard

accelerator = with_autoshard(Accelerator(), lowering="eager")
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
accelerator.print(type(model.weight).__name__, accelerator.num_processes)
"""


def test_accelerate_launch(tmp_path: Path) -> None:
    """Accelerate's launcher, which starts one process where there are no GPUs, starts a script."""
    program = tmp_path / "launched.py"
    program.write_text(LAUNCHED)
    settings = ("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", *settings]
    one = [*launch, "--num_processes", "1", str(program)]
    done = subprocess.run(one, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "DTensor 1", done.stderr


@on_ranks(4)
def test_replicas_of_a_parallelism_config(rank: int) -> None:
    """Shards are over as many ranks as it says, and the losses are DDP's."""
    from accelerate import Accelerator, ParallelismConfig

    from autoshard.integrations.accelerate import with_autoshard

    def losses(shards: int | None) -> list[float]:
        with launched(rank):
            accelerator = Accelerator()
            if shards is not None:  # Accelerate takes it on GPUs only
                config = ParallelismConfig(dp_replicate_size=4 // shards, dp_shard_size=shards)
                accelerator.state.parallelism_config = config
                accelerator.state.device_mesh = config.get_device_mesh("cpu")
                with_autoshard(accelerator, lowering="eager")
            model = llama()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, batches = accelerator.prepare(model, optimizer, loader(16))
            found = losses_of(accelerator, model, optimizer, batches)
            weight = next(iter(model.parameters()))
            if isinstance(weight, DTensor):
                rows = weight.to_local().shape[0]
                assert rows * (shards or 1) == weight.shape[0]
            return found

    plain = losses(None)
    for shards in (1, 2, 4):
        assert losses(shards) == pytest.approx(plain, rel=1e-5)  # sums in another order


@on_ranks(2)
def test_what_is_refused(rank: int) -> None:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    from autoshard.integrations.accelerate import with_autoshard

    def refused(match: str, options: dict[str, Any] | None = None, **settings: Any) -> None:
        """Check the message for an accelerator of `settings`."""
        with launched(rank):
            accelerator = Accelerator(**settings)
            plugin = settings.get("fsdp_plugin")
            if plugin is not None:  # Accelerate leaves it out on a CPU
                accelerator.state.fsdp_plugin = plugin
            with pytest.raises(ValueError, match=match):
                with_autoshard(accelerator, **(options or {}))

    refused("leave dynamo_backend out", dynamo_backend="inductor")
    refused("bucketting", {"bucketting": "auto"})
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    refused("fsdp_version=2", fsdp_plugin=plugin)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    refused("gradient_checkpointing_enable", fsdp_plugin=plugin)
    with launched(rank):
        accelerator = Accelerator()
        accelerator.state.parallelism_config = ParallelismConfig(tp_size=2)
        with pytest.raises(ValueError, match=r"\{'tp_size': 2\}: leave out all but dp_replicate"):
            with_autoshard(accelerator)
    with launched(rank):
        accelerator = Accelerator()
        accelerator.state.distributed_type = DistributedType.DEEPSPEED
        with pytest.raises(ValueError, match=r"set up for DEEPSPEED.*configure it without"):
            with_autoshard(accelerator)
    with launched(rank), pytest.MonkeyPatch.context() as patched:
        patched.delenv("ACCELERATE_USE_CPU")
        accelerator = Accelerator()
        with pytest.raises(ValueError, match=r"2 processes .* takes them for 1: .*cpu=True"):
            with_autoshard(accelerator)
    with launched(rank):
        run = Run(None)
        with pytest.raises(ValueError, match=r"before accelerator\.prepare\(\)"):
            with_autoshard(run.accelerator)
    with launched(rank):
        accelerator = with_autoshard(Accelerator())
        model = llama()
        model.compile(backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match="is compiled with another backend"):
            accelerator.prepare(model, optimizer)
