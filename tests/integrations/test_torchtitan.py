"""torchtitan's Trainer, with the real package: losses of its own FSDP2, resumed as they went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support import titan
from support.hosts import lasting_bytes
from support.ranks import on_ranks

import autoshard

for _name in ("torchtitan", "triton"):
    pytest.importorskip(_name, reason=f"{_name} is not installed: pip install '.[torchtitan]'")

OURS, THEIRS = "autoshard.integrations.torchtitan", "llama3"
IN_FLOAT32 = ("--training.mixed_precision_param", "float32")
EAGER: tuple[str, ...] = ()
LOWERED = ("--compile.enable", "--compile.backend", "aot_eager")
SPMD_TYPES = ("--parallelism.spmd_backend", "spmd_types")
COMPILED = ("--compile.enable",)


def train(folder: Path, module: str, *arguments: str, recomputed: str = "none") -> titan.Run:
    """Train as `titan.config` is told; torchtitan's own function, too, has gradients summed."""
    config = titan.config(folder, module, *arguments, recomputed=recomputed)
    if module == THEIRS:
        spec = config.model_spec
        spec.parallelize_fn = titan.by_sums(spec.parallelize_fn)
    return titan.Run(config)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("titan")
    titan.write_data(made)
    return made


CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "eager": (EAGER, (), "none"),
    "eager, selective checkpoints": (EAGER, (), "selective"),
    "eager, checkpoints": (EAGER, (), "full"),
    "eager, kept": (EAGER, ("--parallelism.fsdp_reshard_after_forward", "never"), "none"),
    "eager, microbatches": (EAGER, ("--training.global_batch_size", "8"), "none"),
    "eager, replicas": (EAGER, ("--parallelism.data_parallel_replicate_degree", "2"), "none"),
    "lowered": (LOWERED, (), "none"),
    "lowered, selective checkpoints": (LOWERED, (), "selective"),
    "lowered, microbatches": (LOWERED, ("--training.global_batch_size", "8"), "none"),
}


@pytest.mark.parametrize("case", CASES)
@on_ranks(2)
def test_losses(rank: int, case: str, folder: Path, tmp_path: Path) -> None:
    """Losses and clipped norms are those of torchtitan's FSDP2, bit for bit, in its memory.

    Its loss is in chunks, for which it calls the head outside of the model.
    """
    form, settings, recomputed = CASES[case]
    arguments = (*settings, *IN_FLOAT32, "--dump_folder", str(tmp_path))
    with titan.on_cpu():
        want = train(folder, THEIRS, *arguments, recomputed=recomputed)
        ours = train(folder, OURS, *form, *arguments, recomputed=recomputed)
    assert ours.found == want.found
    assert [norm > 1 for *_, norm in ours.found] == [True] * 4  # so that they are clipped
    assert isinstance(ours.model, autoshard.ShardedModule)
    assert bool(autoshard.plans(ours.model)) == (form != EAGER)
    assert lasting_bytes(ours.model, ours.optimizer) == lasting_bytes(want.model, want.optimizer)
    if "replicas" not in case:
        whole = sum(param.nbytes for param in ours.model.parameters())
        assert sum(param.to_local().nbytes for param in ours.model.parameters()) == whole / 2


@pytest.mark.skipif(torch.__version__ < (2, 14), reason="FSDP2 knows no spmd_types before 2.14")
@pytest.mark.parametrize("form", [EAGER, LOWERED], ids=["eager", "lowered"])
@on_ranks(2)
def test_spmd_types(rank: int, form: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    """torchtitan's default for annotations of parameters trains as its other kind does."""
    arguments = (*IN_FLOAT32, "--dump_folder", str(tmp_path))
    with titan.on_cpu():
        want = train(folder, THEIRS, *arguments, recomputed="selective")
        ours = train(folder, OURS, *form, *arguments, *SPMD_TYPES, recomputed="selective")
    assert ours.found == want.found


@on_ranks(2)
def test_compiled(rank: int, folder: Path, tmp_path: Path) -> None:
    """Inductor fuses, and rounds less often to bf16: losses and norms are a little other ones."""
    arguments = ("--dump_folder", str(tmp_path))
    with titan.on_cpu():
        want = train(folder, THEIRS, *arguments)
        ours = train(folder, OURS, *COMPILED, *arguments)
    for found, wanted in zip(ours.found, want.found, strict=True):
        assert found == pytest.approx(wanted, rel=1e-3)
    assert autoshard.plans(ours.model)


@pytest.mark.parametrize("first", [OURS, THEIRS])
@pytest.mark.parametrize("form", [EAGER, LOWERED], ids=["eager", "lowered"])
@on_ranks(2)
def test_resumed(
    rank: int, form: tuple[str, ...], first: str, folder: Path, tmp_path: Path
) -> None:
    """torchtitan's checkpoints, of its own FSDP2 as well, are resumed as if nothing had been."""
    saving = (
        *("--checkpoint.enable", "--checkpoint.interval", "2", "--dump_folder", str(tmp_path)),
        *("--checkpoint.no-last_save_model_only", *IN_FLOAT32),
    )
    with titan.on_cpu():
        whole = train(folder, first, *form, *saving) if first == OURS else None
        whole = whole or train(folder, first, *saving)
        rest = train(folder, OURS, *form, *saving, "--checkpoint.load_step", "2")
    assert [step for step, *_ in rest.found] == [3, 4]
    assert rest.found == whole.found[2:]
    for param, want in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(param.to_local(), want.to_local())


@on_ranks(2)
def test_settings(rank: int, folder: Path, tmp_path: Path) -> None:
    """What torchtitan tells FSDP2 is what units are told; options go to the backend."""
    from dataclasses import replace

    from autoshard.integrations.torchtitan import with_autoshard
    from autoshard.runtime.unit.unit import unit_of

    with titan.on_cpu():
        from torchtitan.distributed import ParallelDims

        config = with_autoshard(titan.config(folder, THEIRS, *COMPILED), bucketing="per_unit")
        with torch.device("meta"):
            model = config.model_spec.model.build()
        sharded = config.model_spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(config.parallelism, 2),
            training=replace(config.training, enable_cpu_offload=True),
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder=str(tmp_path),
        )
    assert sharded is model
    assert unit_of(model) is not None
    units = [unit_of(each) for each in (model.layers["0"], model.norm, model.lm_head)]
    assert units[1] is units[2]
    for unit in units:
        assert unit is not None
        assert isinstance(unit.settings.offload, autoshard.CPUOffloadPolicy)
        assert unit.settings.mp.param_dtype == torch.bfloat16
        assert unit.settings.mp.reduce_dtype == torch.float32
    assert units[0] is not None
    assert units[0].settings.reshard_after_forward
    assert {param.device.type for param in model.parameters()} == {"meta"}


def given(folder: Path, *arguments: str) -> Any:
    """Call the function of a command line's model spec as the Trainer does, for two ranks."""
    config = titan.config(folder, OURS, *arguments)
    settings = {
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "parallel_dims": None,
        "ac_config": None,
        "dump_folder": "",
    }
    return config.model_spec.parallelize_fn(None, **settings)


REFUSED = {
    "tensor_parallel_degree out, which is 2": ("--parallelism.tensor_parallel_degree", "2"),
    "context_parallel_degree": ("--parallelism.context_parallel_degree", "2"),
    "pipeline_parallel_degree": ("--parallelism.pipeline_parallel_degree", "2"),
    "expert_parallel_degree": ("--parallelism.expert_parallel_degree", "2"),
    "inputs are DTensors": ("--parallelism.spmd_backend", "full_dtensor"),
    "set training.disable_cuda_graphs": ("--training.no-disable_cuda_graphs",),
    "compile.backend is 'cudagraphs'": ("--compile.enable", "--compile.backend", "cudagraphs"),
}


@on_ranks(2)
def test_what_is_refused(rank: int, folder: Path) -> None:
    from autoshard.integrations.torchtitan import with_autoshard

    with titan.on_cpu():
        from torchtitan.config import ConfigManager

        for message, arguments in REFUSED.items():
            with pytest.raises(ValueError, match=message):
                given(folder, *arguments)
        with pytest.raises(ValueError, match="bucketting"):
            with_autoshard(titan.config(folder, THEIRS), bucketting="auto")
        with pytest.raises((ValueError, ImportError), match="'llama4_8b'"):
            ConfigManager().parse_args(["--module", OURS, "--config", "llama4_8b"])


@on_ranks(2)
def test_options_of_shard_are_refused(rank: int, folder: Path, tmp_path: Path) -> None:
    from autoshard.integrations.torchtitan import with_autoshard

    with titan.on_cpu():
        config = titan.config(folder, THEIRS, *LOWERED, "--dump_folder", str(tmp_path))
        with_autoshard(config, strategy="shard_grad_op")
        with pytest.raises(ValueError, match=r"settings are kept, and options \['strategy'\]"):
            titan.Run(config)
