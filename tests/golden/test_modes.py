"""What modes make of graphs: golden/modes/<case>.txt has the final graphs, each with its plan."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import CPUOffloadPolicy, MixedPrecisionPolicy

Build = Callable[[], Any]
Run = Callable[[Any], None]


class Net(nn.Module):
    """5 rows over 2 ranks are uneven. breaks: the graph, between the two layers."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 4, bias=False)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.second(x)


class Tied(nn.Module):
    """Embedding and head share a weight; the layer between them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layer = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(self.embed(ids))))


def in_units(model: Any, *layers: str, **arguments: Any) -> Any:
    for layer in layers:
        autoshard.fully_shard(model.get_submodule(layer), **arguments)
    return autoshard.fully_shard(model, **arguments)


def hybrid() -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return in_units(Net(), "first", "second", mesh=mesh, mp_policy=precision)


def accumulate(model: Any) -> None:
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        one_step(model)


def one_step(model: Any) -> None:
    model(torch.ones(3, 4)).sum().backward()


def two_batches(model: Any) -> None:
    """The second is larger, and compiles nothing."""
    for rows in (3, 8):
        x = torch.ones(rows, 4)
        torch._dynamo.mark_dynamic(x, 0)
        model(x).sum().backward()


def one_step_of_tokens(model: Any) -> None:
    model(torch.tensor([0, 3, 6])).sum().backward()


class Case(NamedTuple):
    title: str
    build: Build
    run: Run
    ranks: int = 2


CASES = {
    "hybrid_accumulation": Case(
        "bf16 on two replicas of two shards, reduced in f32; a micro-batch waits, the next reduces",
        hybrid,
        accumulate,
        ranks=4,
    ),
    "tied_frozen": Case(
        "one gather for embedding and head, one sum of their gradients; none for the frozen layer",
        lambda: in_units(Tied(), "layer"),
        one_step_of_tokens,
    ),
    "offload": Case(
        "shards on the host are sent for a unit before their gather; here the device is a CPU, too",
        lambda: in_units(Net(), "first", "second", offload_policy=CPUOffloadPolicy()),
        one_step,
    ),
    "dynamic_batch": Case(
        "one plan for all batch sizes",
        lambda: in_units(Net(), "first", "second"),
        two_batches,
    ),
    "graph_break": Case(
        "each side of the break has graphs and plans of its own",
        lambda: in_units(Net(breaks=True), "first", "second"),
        one_step,
    ),
}


@pytest.mark.parametrize(
    ("case", "fake_world"),
    [(name, case.ranks) for name, case in CASES.items()],
    indirect=["fake_world"],
)
@pytest.mark.usefixtures("fake_world")
# Dynamo looks at .grad of what comes out of a graph before a break, and hides torch's warning.
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_final_graphs(case: str, golden: Callable[[str, str], None], tmp_path: Path) -> None:
    title, build, run, _ = CASES[case]
    model = build()
    options = {
        "lowering": "eager",
        "bucketing": "per_unit",
        "strict": True,
        "dump": str(tmp_path),
    }
    model.compile(backend="autoshard", options=options)
    run(model)
    folders = sorted(tmp_path.glob("rank0/*"), key=in_order_of_compilation)
    text = f"# {case}: {title}\n"
    for folder in folders:
        shown = graph_and_plan(folder)
        name = folder.name.partition("_")[2]
        text += f"\n# {name}, as before\n" if shown in text else f"\n# {name}\n{shown}"
    golden(f"modes/{case}.txt", text)


def in_order_of_compilation(folder: Path) -> tuple[int, bool]:
    """A folder is <number of the compilation>_<graph>; forward comes before backward."""
    number, _, graph = folder.name.partition("_")
    return int(number), graph == "backward"


def graph_and_plan(folder: Path) -> str:
    final = (folder / "insert_collectives.txt").read_text()
    nodes = final.partition("\n")[2]  # without the line that names the pass
    return f"{nodes}\n{(folder / 'plan.txt').read_text()}"


def test_every_file_is_read() -> None:
    folder = Path(__file__).resolve().parents[2] / "golden" / "modes"
    assert {path.stem for path in folder.iterdir()} == set(CASES)
