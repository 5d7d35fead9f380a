"""Weights of Hugging Face's models: loaded into shards, trained, and saved again, bit for bit.

The truth is what transformers' `from_pretrained` gives, on every rank.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from support.models import Net, net_loss
from support.ranks import on_ranks
from support.training import adamw, by_hand, in_both_forms, in_form
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import autoshard
from autoshard import _torch
from autoshard.runtime.training.checkpoint.on_ranks import CheckpointError
from autoshard.runtime.weights import writing

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,  # uneven
}


def config_of(kind: str) -> Any:
    """A model in which something is uncommon: ties, other names, stacked experts, transposes."""
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**SMALL),
        "tied": lambda: transformers.LlamaConfig(**SMALL, tie_word_embeddings=True),
        "gpt2": lambda: transformers.GPT2Config(n_embd=16, n_layer=2, n_head=4, vocab_size=61),
        "experts": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=3),
    }
    return configs[kind]()


@contextmanager
def folder_of_all() -> Iterator[Path]:
    """A folder that all ranks have."""
    said = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(said, src=0)
    assert said[0] is not None
    try:
        yield Path(said[0])
    finally:
        dist.barrier()
        shutil.rmtree(said[0], ignore_errors=True)


def stored(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Have transformers write a model to `folder`, in several files; what it loads again."""
    transformers.utils.logging.disable_progress_bar()
    if dist.get_rank() == 0:
        torch.manual_seed(1)
        plain = transformers.AutoModelForCausalLM.from_config(config_of(kind)).to(dtype)
        plain.save_pretrained(folder, max_shard_size="10KB")
    dist.barrier()
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def on_meta(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def assert_equal(model: Any, want: Any) -> None:
    """Parameters of their true sizes, and buffers, those in no file, too."""
    for (name, param), other in zip(model.named_parameters(), want.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        assert whole.dtype == other.dtype, name
        assert torch.equal(whole, other), name
    for (name, buffer), other in zip(model.named_buffers(), want.buffers(), strict=True):
        assert torch.equal(buffer, other), name


def ids() -> Tensor:
    return torch.arange(12).view(2, 6)


@in_both_forms
@pytest.mark.parametrize("kind", ["llama", "tied", "gpt2", "experts"])
@on_ranks(2)
def test_loads_as_from_pretrained(rank: int, kind: str, form: str) -> None:
    """D-52, D-55: parameters, ties and buffers; and what the model then computes."""
    with folder_of_all() as folder:
        want = stored(kind, folder)
        model = on_meta(folder)
        if form == "compiled":
            model.compile(backend="autoshard", options={"lowering": "eager"})
        loaded = autoshard.load_pretrained(model, folder)
        assert not loaded.missing
        assert not loaded.unexpected
        assert_equal(model, want)
        if kind == "tied":
            assert model.lm_head.weight is model.model.embed_tokens.weight
        if (kind, form) == ("experts", "compiled"):
            return  # transformers' loop over experts is many graphs
        logits = model.eval()(ids()).logits
        assert torch.equal(logits, want(ids()).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2)
def test_dtypes_are_the_models(rank: int, dtype: torch.dtype) -> None:
    with folder_of_all() as folder:
        stored("llama", folder, torch.float32)
        want = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        config = transformers.AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        autoshard.load_pretrained(model, folder)
        assert_equal(model, want)


@on_ranks(2)
def test_what_is_kept_in_float32(rank: int) -> None:
    """T5's output projections, beside half precision."""
    config = transformers.T5Config(
        d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4, vocab_size=61
    )
    with folder_of_all() as folder:
        transformers.utils.logging.disable_progress_bar()
        if rank == 0:
            transformers.T5ForConditionalGeneration(config).save_pretrained(folder)
        dist.barrier()
        dtype = torch.float16
        want = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=dtype)
        with torch.device("meta"):
            model = transformers.T5ForConditionalGeneration(config).to(dtype)
        autoshard.load_pretrained(model, folder)
        assert {param.dtype for param in want.parameters()} == {torch.float16, torch.float32}
        assert_equal(model, want)


LAYOUTS = ["full_shard", "hybrid_shard", "no_shard", "columns"]
if _torch.dtensor.SUBCLASSES_DISPATCH:  # flat placements need torch 2.12
    LAYOUTS.append("flat")


@pytest.mark.parametrize("kind", ["experts", "tied"])
@pytest.mark.parametrize("strategy", LAYOUTS)
@on_ranks(4)
def test_layouts(rank: int, kind: str, strategy: str) -> None:
    """However parameters are cut."""
    arguments: dict[str, Any] = {"strategy": strategy}
    if strategy == "hybrid_shard":
        arguments["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if strategy in ("columns", "flat"):

        def place(param: nn.Parameter) -> Any:
            if strategy == "flat":
                return autoshard.FlatShard()
            return Shard(1) if param.dim() > 1 and param.shape[1] % 4 == 0 else None

        arguments = {"shard_placement_fn": place}
    with folder_of_all() as folder:
        want = stored(kind, folder)
        model = on_meta(folder)
        autoshard.load_pretrained(model, folder, **arguments)
        assert_equal(model, want)
        autoshard.save_pretrained(model, folder / "again")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "again")
        assert_equal(again, want)


@on_ranks(2)
def test_sharded_by_hand_before(rank: int) -> None:
    """FSDP2's way: `fully_shard` on meta, weights in place of `to_empty`; an optimizer before."""
    with folder_of_all() as folder:
        want = stored("llama", folder)
        model = on_meta(folder)
        for layer in model.model.layers:
            autoshard.fully_shard(layer)
        autoshard.fully_shard(model)
        optimizer = adamw(model)
        with pytest.raises(ValueError, match="got \\['strategy'\\] for LlamaForCausalLM, which is"):
            autoshard.load_pretrained(model, folder, strategy="no_shard")
        autoshard.load_pretrained(model, folder)
        assert_equal(model, want)
        model(ids(), labels=ids()).loss.backward()
        optimizer.step()
        autoshard.load_pretrained(model, folder)  # over real values
        assert_equal(model, want)


@on_ranks(2)
def test_each_rank_reads_its_share(rank: int) -> None:
    config = {**SMALL, "hidden_size": 128, "intermediate_size": 512, "vocab_size": 4096}
    with folder_of_all() as folder:
        if rank == 0:
            plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
            plain.save_pretrained(folder)
        dist.barrier()
        model = on_meta(folder)
        before = bytes_read()
        loaded = autoshard.load_pretrained(model, folder)
        read = bytes_read() - before
    total = sum(each.nbytes for each in model.state_dict().values())
    assert loaded.num_bytes <= total * (1 / 2 + 0.05)
    assert read <= total * (1 / 2 + 0.05)  # as the system counts, other reads included


def bytes_read() -> int:
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


@pytest.mark.parametrize("strategy", ["no_shard", "full_shard"])
@on_ranks(2)
def test_missing_and_unexpected(rank: int, strategy: str) -> None:
    """Errors that name them; or initialised as transformers does, alike on all ranks."""
    with folder_of_all() as folder:
        want = stored("llama", folder)
        config = transformers.AutoConfig.from_pretrained(folder, num_labels=3)

        def other() -> Any:
            with torch.device("meta"):
                return transformers.LlamaForSequenceClassification(config)

        with pytest.raises(CheckpointError, match=r"score.weight.*lm_head.weight.*strict=False"):
            autoshard.load_pretrained(other(), folder)
        model = other()
        torch.manual_seed(rank)
        with warnings.catch_warnings():
            warnings.simplefilter("always" if rank == 0 else "error")
            loaded = autoshard.load_pretrained(model, folder, strict=False, strategy=strategy)
        assert loaded.missing == ("score.weight",)
        assert loaded.unexpected == ("lm_head.weight",)
        score = model.score.weight.full_tensor()
        both = [torch.empty_like(score) for _ in range(2)]
        dist.all_gather(both, score.detach().contiguous())
        assert torch.equal(*both)
        assert 0.005 < score.std() < 0.05  # transformers' own deviation is 0.02
        assert_equal(model.model, want.model)


def cut_short(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-5])


def damaged(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:8] + b"?" + path.read_bytes()[9:])


def pointer(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n")


def file_missing(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[0].unlink()


def key_missing(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    known = json.loads(index.read_text())
    known["weight_map"]["model.other.weight"] = next(iter(known["weight_map"].values()))
    index.write_text(json.dumps(known))


def quantized(folder: Path) -> None:
    known = json.loads((folder / "config.json").read_text())
    known["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(known))


def all_missing(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut short": (cut_short, r"bytes, and .* in it ends at byte .*cut short; copy"),
    "damaged": (damaged, "header of .*can't be read.*damaged; copy"),
    "a pointer": (pointer, "begins with no header .*pointer of Git LFS; download it again"),
    "a file missing": (file_missing, r"names model-00001-of-\d+.safetensors, which is not in"),
    "a key missing": (key_missing, "'model.other.weight' is in .* which has no such tensor"),
    "quantized": (quantized, r"are quantized \(fp8\): load a checkpoint that is not"),
    "all missing": (all_missing, "has neither model.safetensors.index.json nor model.safetensors"),
}


@pytest.mark.parametrize("what", WRONG)
@on_ranks(2)
def test_wrong_files_on_one_rank(rank: int, what: str) -> None:
    """Both ranks raise, naming the file and the rank, before the model is changed."""
    spoil, message = WRONG[what]
    with folder_of_all() as folder:
        stored("llama", folder)
        own = folder / f"of_rank_{rank}"
        own.mkdir()
        for path in [path for path in folder.iterdir() if path.is_file()]:
            shutil.copy(path, own)
        if rank == 1:
            spoil(own)
        model = on_meta(folder)
        with pytest.raises(
            CheckpointError, match=rf"rank {rank}: weights in .*rank 1, .*{message}"
        ):
            autoshard.load_pretrained(model, own)
        assert all(param.is_meta for param in model.parameters())


@on_ranks(2)
def test_other_files_on_one_rank(rank: int) -> None:
    with folder_of_all() as folder:
        want = stored("llama", folder / "0")
        want.save_pretrained(folder / "1")  # transformers does so on rank 0 alone
        dist.barrier()
        model = on_meta(folder / "0")
        with pytest.raises(RuntimeError, match=r"weights in .* differs on rank"):
            autoshard.load_pretrained(model, folder / str(rank))


@on_ranks(2)
def test_sizes_dtypes_and_ties_that_differ(rank: int) -> None:
    with folder_of_all() as folder:
        stored("llama", folder)
        wrong = transformers.LlamaConfig(**{**SMALL, "vocab_size": 62})
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(wrong)
        with pytest.raises(
            CheckpointError, match=r"has size \[61, 16\] in the files, and \[62, 16\]"
        ):
            autoshard.load_pretrained(model, folder)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config_of("tied"))
        with pytest.raises(CheckpointError, match=r"one parameter .* differ in the files"):
            autoshard.load_pretrained(model, folder)
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
        model.lm_head.weight = nn.Parameter(
            torch.empty(61, 16, dtype=torch.int64, device="meta"), requires_grad=False
        )
        with pytest.raises(
            CheckpointError,
            match=r"'lm_head.weight' is torch.float32 in the files, and torch.int64",
        ):
            autoshard.load_pretrained(model, folder)


class WithBuffer(nn.Module):
    """A buffer that is in no state dict; computed by `reset_parameters`, or by nobody."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("steps", torch.arange(3.0), persistent=False)
        self.computes = computes

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.scale.fill_(2.0)
            if self.computes:
                self.steps.copy_(torch.arange(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale + self.steps


@pytest.mark.parametrize("way", ["shard", "load"])
@on_ranks(2)
def test_buffers_that_nobody_computes_are_an_error(rank: int, way: str) -> None:
    """D-52, D-55: they would hold what was in memory before."""

    def fill(model: nn.Module, folder: Path) -> None:
        if way == "shard":
            autoshard.shard(model)
        else:
            autoshard.load_pretrained(model, folder)

    with folder_of_all() as folder:
        plain = WithBuffer(computes=True)
        with torch.no_grad():
            plain.scale.fill_(5.0)
        autoshard.save_pretrained(plain, folder)
        with torch.device("meta"):
            model = WithBuffer(computes=True)
        fill(model, folder)
        assert torch.equal(model.steps, torch.arange(3.0))
        assert model.scale.full_tensor().tolist() == [2.0 if way == "shard" else 5.0] * 3
        with torch.device("meta"):
            model = WithBuffer(computes=False)
        with pytest.raises(
            RuntimeError, match=r"\['steps'\] were on the meta device.*nothing comp"
        ):
            fill(model, folder)


@on_ranks(2)
def test_meta_is_initialised_as_transformers_does(rank: int) -> None:
    """D-52, D-55: frequencies of the rotary embedding, and parameters of their deviation."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config_of("llama"))
    autoshard.shard(model)
    plain = transformers.LlamaForCausalLM(config_of("llama"))
    for got, want in zip(model.buffers(), plain.buffers(), strict=True):
        assert torch.equal(got, want)
    assert 0.01 < model.lm_head.weight.full_tensor().std() < 0.03
    assert torch.equal(model.model.norm.weight.full_tensor(), torch.ones(16))


@on_ranks(2)
def test_meta_that_is_not_loaded(rank: int) -> None:
    """A warning where a folder's config says that there are weights."""
    with folder_of_all() as folder:
        stored("llama", folder)
        model = on_meta(folder)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            autoshard.shard(model)
        said = [str(each.message) for each in caught if "begins with random" in str(each.message)]
        assert len(said) == (rank == 0)
        assert all(
            str(folder) in each and "load_pretrained(model, folder)" in each for each in said
        )


@in_both_forms
@on_ranks(2)
def test_any_module(rank: int, form: str) -> None:
    """Trained, saved, and loaded on meta: by its own names; tied parameters once."""
    with folder_of_all() as folder:
        model = in_form(by_hand(autoshard.fully_shard)(Net()), form)
        optimizer = adamw(model)
        net_loss(model, rank, 0).backward()
        optimizer.step()
        autoshard.save_pretrained(model, folder)
        want = autoshard.full_state_dict(model)
        with torch.device("meta"):
            again = Net()
        autoshard.load_pretrained(again, folder)
        for name, value in autoshard.full_state_dict(again).items():
            assert torch.equal(value, want[name]), name
        plain = Net()
        plain.load_state_dict(want)
        assert torch.equal(net_loss(again, rank, 1), net_loss(plain, rank, 1))
        assert (folder / "model.safetensors").is_file()
        assert want.keys() - {key for key, _, _ in contents(folder)} == {"head.weight"}


@in_both_forms
@on_ranks(2)
def test_full_state_dict(rank: int, form: str) -> None:
    """The unsharded model's: names, order, ties, values; copies that training leaves alone."""
    torch.manual_seed(0)
    model = Net()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    options = {"lowering": "eager"}
    call = (
        torch.compile(model, backend="autoshard", options=options) if form == "compiled" else model
    )
    if form == "eager":
        autoshard.shard(model)
    optimizer = adamw(model)
    state = autoshard.full_state_dict(call)
    net_loss(call, rank, 0).backward()
    optimizer.step()
    assert list(state) == list(want)
    assert all(torch.equal(state[name], value) for name, value in want.items())
    assert state["head.weight"] is state["embed.weight"]
    assert not any(isinstance(value, DTensor) for value in state.values())
    after = autoshard.full_state_dict(call, cpu_offload=True, rank0_only=True)
    assert list(after) == (list(want) if rank == 0 else [])
    if rank == 0:
        assert not torch.equal(after["head.weight"], want["head.weight"])


@on_ranks(2)
def test_calls_that_do_not_match(rank: int) -> None:
    """Ranks that do not all call it raise; and what is on meta is named."""
    model = autoshard.shard(Net())
    with pytest.raises(RuntimeError, match=r"full_state_dict.*all ranks call it together"):
        autoshard.full_state_dict(model, rank0_only=bool(rank))
    with torch.device("meta"):
        model = Net()
    autoshard.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'embed.weight'.*still on the meta device"):
        autoshard.full_state_dict(model)
    with folder_of_all() as folder, pytest.raises(CheckpointError, match="still on the meta dev"):
        autoshard.save_pretrained(model, folder)


@pytest.mark.parametrize("kind", ["experts", "tied"])
@on_ranks(2)
def test_saves_as_transformers_does(rank: int, kind: str) -> None:
    """The same keys, sizes and dtypes, in files of several ranks; and a save over another."""
    with folder_of_all() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "LEAST_BYTES", 4000)
        stored(kind, folder / "theirs")
        model = on_meta(folder / "theirs")
        autoshard.load_pretrained(model, folder / "theirs")
        autoshard.save_pretrained(model, folder / "ours", max_shard_size=3000)
        few = len(list((folder / "ours").glob("*.safetensors")))
        autoshard.save_pretrained(model, folder / "ours")
        files = sorted((folder / "ours").glob("*.safetensors"))
        assert 1 < len(files) < few
        assert contents(folder / "ours") == contents(folder / "theirs")
        names = {path.name for path in (folder / "ours").iterdir()} - {path.name for path in files}
        assert names == {"config.json", "generation_config.json", "model.safetensors.index.json"}


def contents(folder: Path) -> list[tuple[str, list[int], str]]:
    from safetensors import safe_open

    found = []
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118  # it is no dict
                part = file.get_slice(key)
                found.append((key, part.get_shape(), part.get_dtype()))
    return sorted(found)


@on_ranks(2)
def test_a_save_that_fails_on_one_rank(rank: int) -> None:
    """Both ranks raise, and what was there before can still be loaded."""
    with folder_of_all() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "LEAST_BYTES", 4000)
        want = stored("llama", folder)
        model = on_meta(folder)
        autoshard.load_pretrained(model, folder)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        if rank == 1:
            patch.setattr(writing.Writer, "write", broken)
        with pytest.raises(CheckpointError, match=rf"rank {rank}: .*on rank 1, OSError: disk full"):
            autoshard.save_pretrained(model, folder)
        dist.barrier()
        assert_equal(transformers.AutoModelForCausalLM.from_pretrained(folder), want)
        assert not list(folder.glob(".writing*"))


@pytest.mark.parametrize("how", ["ours", "theirs", "its state", "plain state"])
@on_ranks(2)
def test_a_models_own_save_pretrained(rank: int, how: str) -> None:
    """It saves all of the model, whatever it is given; ranks that do not call it are told."""
    with folder_of_all() as folder:
        want = stored("tied", folder / "theirs")
        model = on_meta(folder / "theirs")
        autoshard.load_pretrained(model, folder / "theirs")
        arguments: dict[str, Any] = {
            "ours": {"max_shard_size": "10KB"},
            "theirs": {"variant": "a"},
            "its state": {"state_dict": model.state_dict()},
            "plain state": {"state_dict": autoshard.full_state_dict(model)},
        }[how]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of transformers
            model.save_pretrained(folder / "own", **arguments)
        dist.barrier()
        variant = arguments.get("variant")
        again = transformers.AutoModelForCausalLM.from_pretrained(folder / "own", variant=variant)
        assert_equal(again, want)
        assert (len(list((folder / "own").glob("*.safetensors"))) > 1) == (how == "ours")


@on_ranks(2)
def test_what_safetensors_says_of_shards(rank: int) -> None:
    """A note with what to do, where nobody catches the error."""
    from safetensors.torch import save_file, save_model

    from autoshard.runtime.eager import outside

    with folder_of_all() as folder:
        model = autoshard.shard(nn.Linear(4, 4))
        for save in (
            lambda: save_file(model.state_dict(), folder / "a"),
            lambda: save_model(model, str(folder / "a")),
        ):
            with pytest.raises(RuntimeError) as caught:
                save()
            outside.explain(caught.value)
            assert (
                "autoshard.save_pretrained(model, folder) on all ranks" in caught.value.__notes__[0]
            )
        state = autoshard.full_state_dict(model, cpu_offload=True, rank0_only=True)
        if rank == 0:
            save_file(state, folder / "a")


@in_both_forms
@on_ranks(2)
def test_adafactor(rank: int, form: str) -> None:
    """Refused where matrices are cut; torch's works on replicas."""
    from transformers.optimization import Adafactor

    def trained(strategy: str, make: Any) -> None:
        model = in_form(autoshard.shard(Net(), strategy=strategy), form)
        optimizer = make(model.parameters())
        net_loss(model, rank, 0).backward()
        optimizer.step()

    theirs = partial(Adafactor, lr=1e-3, relative_step=False)
    for make in (torch.optim.Adafactor, theirs):
        with pytest.raises(
            RuntimeError, match=r"Adafactor keeps means .* rows of embed.weight only"
        ):
            trained("full_shard", make)
    trained("no_shard", torch.optim.Adafactor)


@on_ranks(2)
def test_an_optimizer_of_bitsandbytes(rank: int) -> None:
    """Its kernels fail on DTensors; said before they do, for classes that users derive, too."""
    theirs = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})
    model = autoshard.shard(Net())
    optimizer = type("Mine", (theirs,), {})(model.parameters(), lr=0.1)
    net_loss(model, rank, 0).backward()
    with pytest.raises(RuntimeError, match=r"Mine of bitsandbytes .*embed.weight.*AdamW8bit"):
        optimizer.step()


def broken(self: Any, tensor: Tensor) -> None:
    raise OSError("disk full")


@pytest.mark.parametrize("size", ["5 G", "", 0, True, "-1MB"])
def test_wrong_sizes(size: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_shard_size is .*; expected bytes, or text"):
        autoshard.save_pretrained(Net(), tmp_path, max_shard_size=size)
