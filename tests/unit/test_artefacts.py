"""Artefacts without ranks: what they hold, what is refused, and that nothing stale is used."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from support import artefacts, warm
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode

import autoshard
from autoshard import _torch
from autoshard.artefacts import facts, guards, sources
from autoshard.artefacts.entry import built, described
from autoshard.artefacts.graphs import CannotBeKept, lower_again
from autoshard.artefacts.make import make
from autoshard.options import CompileOptions

ROOT = Path(__file__).resolve().parent.parent.parent
EAGERLY = {"lowering": "eager"}


def test_changes_are_noticed() -> None:
    program = ROOT / "benchmarks" / "artefacts.py"
    done = subprocess.run(
        [warm.python(), str(program), "--mutations", "60"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "60 changes: 60 noticed and named" in done.stdout


def test_the_same_bytes_wherever_it_is_made(tmp_path: Path) -> None:
    artefacts.made("small", tmp_path / "one", ranks=3, options=json.dumps(EAGERLY))
    elsewhere = tmp_path / "another" / "folder"
    elsewhere.mkdir(parents=True)
    place = "support.artefacts:small"
    command = [
        "-m",
        "autoshard.tools.cli",
        "compile",
        "--model",
        place,
        "--batch",
        f"{place}_batch",
    ]
    more = ["--gpus", "3", "--out", "made", "--options", json.dumps(EAGERLY)]
    done = subprocess.run(
        [sys.executable, *command, *more],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONHASHSEED": "7",
            "RANK": "2",
            "LOCAL_RANK": "2",
            "WORLD_SIZE": "3",
            "OMP_NUM_THREADS": "1",
        },
        cwd=elsewhere,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made, other = tmp_path / "one", elsewhere / "made"
    names = sorted(path.name for path in made.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in names:
        assert (made / name).read_bytes() == (other / name).read_bytes(), name
        for path in (tmp_path, ROOT, Path(torch.__file__).parent):
            assert str(path) not in (made / name).read_text()


@pytest.mark.parametrize("fake_world", [8, 64], indirect=True)
def test_many_ranks_load_it(fake_world: None, tmp_path: Path) -> None:
    """The first and the last of them, which may have fewer rows."""
    world = torch.distributed.get_world_size()
    make(tmp_path, artefacts.small(), (), artefacts.small_batch(0, 0), options=EAGERLY)
    for rank in (0, world - 1):
        torch.distributed.destroy_process_group()
        _join(rank, world)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = autoshard.load_compiled(artefacts.small(), tmp_path)
        model(**artefacts.small_batch(rank, 0))["loss"].backward()
        assert not {key for key, value in torch._dynamo.utils.counters.items() if value}


def _join(rank: int, world: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.linear(x)
        return found


class Returning(nn.Module):
    def __init__(self, what: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mask", torch.ones(4))
        self.what = what

    def forward(self, x: Tensor) -> Any:
        return self.what(self, x)


TABLE = torch.ones(4)


@dataclasses.dataclass
class Doubled:
    value: Tensor

    def __post_init__(self) -> None:
        self.value = self.value * 2


class Halved(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__({name: value / 2 for name, value in items.items()})


@dataclasses.dataclass
class WithMore:
    value: Tensor
    more: Any = dataclasses.field(init=False, default=None)


def _with_a_field(module: Any, x: Tensor) -> WithMore:
    found = WithMore(module.linear(x))
    found.more = found.value * 3
    return found


def _doubled(module: Any, x: Tensor) -> Doubled:
    return Doubled(module.linear(x))


@dataclasses.dataclass
class Kept:
    last: Tensor
    first: Tensor


class Several(nn.Module):
    """Outputs in an order that is not the alphabet's; a NaN, a default, a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.missing = float("nan")

    def forward(self, x: Tensor, factor: float = 1.0, *, times: int = 1) -> Any:
        y = self.linear(x) * factor
        for _ in range(times):
            y = y + 1
        if self.missing == 0:
            y = -y
        return {"z": y.sum(), "a": y.mean(), "kept": Kept(y * 2, y * 3), "size": y.shape}


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "an attribute that counts": (Counting, "sets model.calls"),
    "a view of an output": (
        lambda: Returning(lambda m, x: ((h := m.linear(x)), h.view(-1))),
        "output 1 is alias of intermediate|output 0 is alias of intermediate",
    ),
    "an argument's view": (
        lambda: Returning(lambda m, x: (m.linear(x), x.view(-1))),
        "output 1 is alias of input",
    ),
    "a buffer": (lambda: Returning(lambda m, x: (m.linear(x), m.mask)), "a parameter or a buffer"),
    "a tensor of a module": (
        lambda: Returning(lambda m, x: m.linear(x) * TABLE),
        "no parameter, buffer or argument",
    ),
    "a break": (
        lambda: Returning(lambda m, x: m.linear(x) if x.sum() > 0 else x),
        "can't be traced as one graph",
    ),
    "the rank": (
        lambda: Returning(lambda m, x: m.linear(x) * torch.distributed.get_rank()),
        "asks for get_rank",
    ),
    "an output that makes itself": (lambda: Returning(_doubled), "test_artefacts.Doubled"),
    "an output that makes itself, a dict": (
        lambda: Returning(lambda m, x: Halved(value=m.linear(x))),
        "a Halved that it returns, or one in it, is made otherwise than by its parts",
    ),
    "an output with a field of its own": (
        lambda: Returning(_with_a_field),
        "a WithMore has more, which is no field of it",
    ),
    "a large constant": (
        lambda: Returning(lambda m, x: m.linear(x) + torch.tensor([0.5] * 40_000).sum()),
        "a constant of size",
    ),
}


@pytest.mark.parametrize("fake_world", [4], indirect=True)
@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_an_artefact_cant_hold(
    fake_world: None, build: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    with pytest.raises(autoshard.ArtefactError, match=message):
        make(tmp_path, build(), (torch.ones(2, 4),), {}, options=EAGERLY)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_a_small_constant_is_kept(fake_world: None, tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Returning(_with_constant)

    make(tmp_path, build(), (torch.ones(2, 4),), {}, options=EAGERLY)
    model = autoshard.load_compiled(build(), tmp_path)
    other = autoshard.shard(build())
    got, want = model(torch.ones(2, 4)), other(torch.ones(2, 4))
    assert got.shape == want.shape
    assert "constants" in (tmp_path / "train.forward.txt").read_text()


def _with_constant(module: Any, x: Tensor) -> Any:
    return module.linear(x) + torch.tensor([0.5, float("inf"), -0.0, 1e-40])


@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_calls_that_mean_the_same(fake_world: None, tmp_path: Path) -> None:
    """By position or by name, with defaults or without; and outputs in the model's order."""
    x = torch.ones(2, 4)
    make(tmp_path, Several(), (x,), {}, options=EAGERLY)
    model: Any = autoshard.load_compiled(Several(), tmp_path)
    for found in (model(x), model(x=x), model(x, 1.0), model(factor=1.0, x=x, times=1)):
        assert list(found) == ["z", "a", "kept", "size"]
        assert isinstance(found["kept"], Kept)
        assert found["size"] == torch.Size([2, 4])
    for given, message in (
        ({"times": 2}, r"called with \(x=a tensor, factor=1.0, times=2\), and was made"),
        ({"times": True}, "times=True"),  # which is 1, and no int
        ({"factor": 1}, "factor=1,"),
        ({"x": x.new_ones(4, 2).t()}, r"tensor 0 is float32 \[2, 4\], strides \[1, 2\]"),
    ):
        with pytest.raises(autoshard.ArtefactError, match=message):
            model(**{"x": x, **given})
    with pytest.raises(TypeError, match="unexpected"):
        model(x, another=1)
    other = {name: torch.zeros(param.shape) for name, param in model.named_parameters()}
    with pytest.raises(autoshard.ArtefactError, match="in the place of linear"):
        torch.func.functional_call(model, other, (x,))
    assert list(model(x)) == ["z", "a", "kept", "size"]


@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_no_artefact(fake_world: None, tmp_path: Path) -> None:
    with pytest.raises(autoshard.ArtefactError, match=r"no manifest\.json.*autoshard compile"):
        autoshard.load_compiled(artefacts.small(), tmp_path / "nothing")
    with pytest.raises(ValueError, match="stale='use'"):
        autoshard.load_compiled(artefacts.small(), tmp_path, stale="use")


class Counted(nn.Module):
    """What forward does not read may change."""

    instances = 0
    step = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).instances += 1
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(x) + self.mean
        return found


@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_an_ordinary_loop_is_not_refused(fake_world: None, tmp_path: Path) -> None:
    x = torch.ones(2, 4)
    make(tmp_path, Counted(), (x,), {}, options=EAGERLY)
    model: Any = autoshard.load_compiled(Counted(), tmp_path)
    optimizer = torch.optim.AdamW(model.parameters())
    Counted()
    for number in range(3):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.step += 1  # hides the class's
        model.note = number
        model.mean = model.mean + 1
        model.eval()
        model.train()
        model.load_state_dict(model.state_dict())
        model.linear.weight.register_hook(lambda grad: None)
    assert not model(x).isnan().all()


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU()) for _ in range(4))
        self.backs = nn.ModuleList(nn.Linear(64, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, back in zip(self.layers, self.backs, strict=True):
            x = x + back(layer(x))
        return x.square().mean()


@pytest.mark.parametrize("fake_world", [4], indirect=True)
def test_a_memory_budget(fake_world: None, tmp_path: Path) -> None:
    """What forward hands to backward is decided as ranks decide it."""
    x = torch.ones(4096, 16)
    options = {**EAGERLY, "topology": "h100", "bucketing": "auto"}
    plain: Any = Tower()
    plain.compile(backend="autoshard", options=options)
    plain(x).backward()
    peak = max(plan.peak_bytes for plan in autoshard.plans(plain))
    beside = 3 * sum(param.to_local().nbytes for param in plain.parameters())
    given = {**options, "memory_budget": int(0.85 * peak) + beside}
    torch._dynamo.reset()
    model: Any = Tower()
    model.compile(backend="autoshard", options=given)
    model(x).backward()
    wanted = autoshard.plans(model)
    assert sum(block.given_up_bytes for block in wanted[0].saved) > 0
    make(tmp_path, Tower(), (x,), {}, options=given)
    entry = json.loads((tmp_path / "manifest.json").read_text())["entries"][0]
    made = [autoshard.Plan.from_json(text) for text in entry["plans"]]
    assert [plan.digest for plan in made] == [plan.digest for plan in wanted]
    assert made[0].saved == wanted[0].saved
    loaded: Any = autoshard.load_compiled(Tower(), tmp_path)
    loaded(x).backward()
    assert [plan.digest for plan in autoshard.plans(loaded)] == [plan.digest for plan in wanted]


@pytest.mark.parametrize("budget", [None, 2**30])
def test_memory_of_what_is_lowered_again(budget: int | None) -> None:
    """As that of what was compiled: with a budget Inductor keeps no buffers for later ones."""
    gm = fx.symbolic_trace(lambda x: [torch.relu(x)])
    for node in gm.graph.nodes:
        node.meta["val"] = FakeTensorMode().from_tensor(torch.ones(4))
    options = CompileOptions(lowering="inductor", topology="h100", memory_budget=budget)
    settings = options.resolve(torch.device("cpu"))
    found: dict[str, object] = {}

    def compiled(*args: Any, **kwargs: Any) -> None:
        found.update(args[2])
        raise ZeroDivisionError

    patched = mock.patch.object(_torch.inductor, "compile_graph", compiled)
    with patched, pytest.raises(ZeroDivisionError):
        lower_again({"inference": gm}, {}, 1, settings)
    assert found["allow_buffer_reuse"] is (budget is None)


def test_trees() -> None:
    one, two = torch.ones(1), torch.ones(2)
    tensors: list[Tensor] = []
    value = {"a": [one, (two, one)], "b": None, "c": 1.5, "d": torch.bfloat16}
    tree = json.loads(json.dumps(described(value, tensors)))
    assert tensors == [one, two]
    again = built(tree, tensors)
    assert again == value
    assert again["a"][1][1] is one
    with pytest.raises(CannotBeKept, match="object"):
        described(object(), [])
    with pytest.raises(LookupError, match="no class of outputs"):
        built({"mapping": {}, "class": "os:system"}, [])


def _times(factor: int) -> Callable[[int], int]:
    return lambda number: number * factor


HOSTILE = (
    "__import__('os').system('true')",
    "model.forward()",
    "[each for each in ()]",
    "(lambda: 1)()",
    "module('os').system('true')",
    "type(model)(1)",
    "dict(model=1)",
)


@pytest.mark.parametrize("path", HOSTILE)
def test_a_path_runs_no_code(path: str) -> None:
    with pytest.raises(guards.UnknownPath):
        guards.find(path, nn.Linear(2, 2))


def test_facts_are_alike_in_all_processes() -> None:
    assert guards.fact(torch.ones(2, 3)) == "torch.float32 [2, 3] cpu False"
    assert guards.fact({"a": 1, "b": {2, 1}}) == "builtins.dict ['a': 1, 'b': builtins.set [1, 2]]"
    assert guards.fact(nn.Linear(2, 2)) == "a torch.nn.modules.linear.Linear"
    assert guards.fact(test_trees).startswith(f"function {__name__}.test_trees ")
    one, two = (guards.fact(_times(factor)) for factor in (2, 3))
    assert one == guards.fact(_times(2)) != two
    assert guards.fact(functools.wraps(_times)(lambda x: x)) != guards.fact(_times)
    assert "0x" not in guards.fact(object()) + guards.fact([object()]) + guards.fact(len)


def test_a_source_is_found_by_name() -> None:
    names = sources.names_of([Counting.forward.__code__], [Counting, nn.Linear, dict])
    assert names == [(__name__, "Counting"), (__name__, "Counting.forward")]
    found = facts.of_sources([*names, (__name__, "gone"), ("no.such", "module")])
    assert found[f"source {__name__}.gone"] == "not there"
    assert found["source no.such.module"] == "not imported"
    assert len(set(found.values())) == 4
