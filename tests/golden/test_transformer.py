"""The forward and backward graph of a small transformer, after every pass, and its plans."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autoshard

GOLDEN = Path(__file__).resolve().parents[2] / "golden"


class Block(nn.Module):
    """One attention head and an MLP of one layer, no biases: as few lines as will show it."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        x = x + self.out(torch.softmax(q @ k.t(), dim=-1) @ v)
        return x + torch.relu(self.mlp(x))


class Transformer(nn.Module):
    """7 tokens of vocabulary: rows that two ranks can't share evenly. The head is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def remove_stale(folder: Path, names: list[str]) -> None:
    """Fail for files that are not in `names`, or remove them where files are written anew."""
    there = {path.relative_to(GOLDEN).as_posix() for path in folder.rglob("*.txt")}
    stale = sorted(there - set(names))
    if os.environ.get("EXPECTTEST_ACCEPT"):
        for name in stale:
            (GOLDEN / name).unlink()
    else:
        assert not stale, "no pass writes these now: run with EXPECTTEST_ACCEPT=1"


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op"])
def test_after_every_pass(
    strategy: str, golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    """A pass has a file where it changes the graph, and no file is left of one that does not."""
    model = Transformer()
    call = torch.compile(
        model,
        backend="autoshard",
        options={
            "lowering": "eager",
            "strict": True,
            "strategy": strategy,
            "bucketing": "per_unit",
            "dump": str(tmp_path),
        },
    )
    call(torch.tensor([0, 3, 6])).sum().backward()
    files = sorted(tmp_path.glob("rank0/*/*.txt"))
    names = []
    for path in files:
        graph = path.parent.name.partition("_")[2]
        names.append(f"transformer/{strategy}/{graph}/{path.name}")
        golden(names[-1], path.read_text())
    remove_stale(GOLDEN / "transformer" / strategy, names)
    for plan in autoshard.plans(model):
        written = next(path for path in files if path.match(f"*_{plan.graph}/plan.txt"))
        assert plan.text() == written.read_text()


@pytest.mark.usefixtures("fake_world")
def test_bucketing_none(golden: Callable[[str, str], None]) -> None:
    model = Transformer()
    options = {"lowering": "eager", "strict": True, "bucketing": "none"}
    call = torch.compile(model, backend="autoshard", options=options)
    call(torch.tensor([0, 3, 6])).sum().backward()
    golden(
        "transformer/bucketing_none.txt",
        "\n".join(plan.text() for plan in autoshard.plans(model)),
    )


@pytest.mark.usefixtures("fake_world")
def test_bucketing_auto(golden: Callable[[str, str], None]) -> None:
    """What the planner makes of the small transformer, at an H100's prices."""
    model = Transformer()
    options = {"lowering": "eager", "strict": True, "bucketing": "auto", "topology": "h100"}
    call = torch.compile(model, backend="autoshard", options=options)
    call(torch.tensor([0, 3, 6])).sum().backward()
    golden(
        "transformer/bucketing_auto.txt",
        "\n".join(plan.text() for plan in autoshard.plans(model)),
    )


def test_every_file_is_read() -> None:
    """By the tests above; those of a strategy in its own."""
    names = {path.name for path in (GOLDEN / "transformer").iterdir()}
    assert names == {"full_shard", "shard_grad_op", "bucketing_none.txt", "bucketing_auto.txt"}
