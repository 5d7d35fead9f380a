"""What the eager runtime launches and waits for, in order: golden/eager/<case>.txt.

A name stands where its module's compute begins, forward or backward; below it is what
that compute had to wait for, and what was launched before it. What is launched below
one name and waited for below another is on its way while the first computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.models import Block, Net, net_loss
from support.ranks import on_ranks
from support.training import by_hand, sgd
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autoshard
from autoshard import fully_shard
from autoshard.runtime.comm.flights import Issued, observe
from autoshard.runtime.unit.unit import Unit, unit_of

Prepare = Callable[[Any], object]


class Case(NamedTuple):
    """steps: their titles, and what to call before each; the first `skip` are not shown."""

    title: str
    shard: Callable[[Net], Any]
    steps: list[tuple[str, Prepare]]
    skip: int = 0
    ranks: int = 2


def nothing(model: Any) -> None:
    pass


def hybrid(model: Net) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return autoshard.shard(model, strategy="hybrid_shard", mesh=mesh)


def strategy(name: str) -> Callable[[Net], Any]:
    return lambda model: autoshard.shard(model, strategy=name)


AGAIN = [("first step", nothing), ("second step", nothing)]
CASES = {
    "first_step": Case("nothing is known of the order yet", strategy("full_shard"), AGAIN[:1]),
    "full_shard": Case(
        "blocks are freed after forward, the root is kept", strategy("full_shard"), AGAIN, 1
    ),
    "reshard_everywhere": Case(
        "the root is freed, too", by_hand(fully_shard, reshard_after_forward=True), AGAIN, 1
    ),
    "shard_grad_op": Case("nothing is freed before backward", strategy("shard_grad_op"), AGAIN, 1),
    "no_sync": Case(
        "with shard_grad_op, gradients wait for the third micro-batch, and parameters stay",
        strategy("shard_grad_op"),
        [
            ("no_sync", lambda model: model.set_requires_gradient_sync(False)),
            ("no_sync again", nothing),
            ("reduced", lambda model: model.set_requires_gradient_sync(True)),
        ],
    ),
    "hybrid_shard": Case(
        "two replicas of two shards: sums over replicas wait for the second micro-batch",
        hybrid,
        [
            ("first step", nothing),
            ("set_requires_all_reduce(False)", lambda model: model.set_requires_all_reduce(False)),
            ("all-reduced", lambda model: model.set_requires_all_reduce(True)),
        ],
        1,
        ranks=4,
    ),
    "replicate": Case("whole parameters on every rank", by_hand(autoshard.replicate), AGAIN, 1),
}
CHECKPOINTING = {"": None, "_checkpoint": "non-reentrant"}


def build(checkpointing: str | None) -> Net:
    """Blocks of different sizes, by which units are told apart."""
    model = Net(tied=False, checkpointing=checkpointing)
    model.layers = nn.ModuleList(Block(hidden=7 + number) for number in range(3))
    return model


class Log:
    """Events of one step of `model` at a time, as text."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.lines: list[str] = []
        self.counts: Counter[str] = Counter()
        self.in_backward = False
        for name, module in model.named_modules():
            if name in ("embed", "head") or name.rpartition(".")[0] == "layers":
                module.register_forward_pre_hook(lambda *_, name=name: self.enters(name))
                module.register_forward_hook(lambda *args, name=name: self.leaves(name, args[2]))

    def enters(self, name: str) -> None:
        self.lines.append(f"  {name}, run again" if self.in_backward else f"  {name}")

    def leaves(self, name: str, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda grad: self.lines.append(f"  {name}"))

    def event(self, what: str, issued: Issued) -> None:
        self.lines.append(f"    {what} {issued.kind} {self.unit_name(issued)}")
        if what == "launch":
            self.counts[issued.kind] += 1

    def unit_name(self, issued: Issued) -> str:
        sizes = [member.size for member in issued.members]
        if issued.kind != "gather":
            sizes.pop()  # not a parameter's: whether a rank has gradients at all
        units: list[Unit | None] = [unit_of(module) for module in self.model.modules()]
        (name,) = (u.name for u in units if u and [p.member.size for p in u.params] == sizes)
        return name

    def phase(self, name: str, run: Callable[[], Any]) -> Any:
        """The lines of what `run` does, below one that counts what it launches."""
        self.in_backward = name == "backward"
        self.counts.clear()
        first = len(self.lines)
        value = run()
        counts = [f"{number} {kind}s" for kind, number in self.counts.items()]
        self.lines.insert(first, f"{name}: {', '.join(counts) or 'nothing'}")
        return value

    def step(self, rank: int, step: int) -> str:
        self.lines = []
        with observe(
            lambda issued: self.event("launch", issued), lambda issued: self.event("wait", issued)
        ):
            loss = self.phase("forward", lambda: net_loss(self.model, rank, step))
            self.phase("backward", loss.backward)
        return "\n".join([*self.lines, "end"])


def write(rank: int, case: str, checkpointing: str | None, path: str) -> None:
    title, shard, steps, skip, _ = CASES[case]
    model = shard(build(checkpointing))
    log, optimizer = Log(model), sgd(model)
    text = f"# {case}: {title}\n"
    for number, (name, prepare) in enumerate(steps):
        prepare(model)
        events = log.step(rank, number)
        if number >= skip:
            text += f"\n# {name}\n{events}\n"
        if steps is AGAIN:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        Path(path).write_text(text)


write_on = {ranks: on_ranks(ranks)(write) for ranks in (2, 4)}


@pytest.mark.parametrize("suffix", CHECKPOINTING)
@pytest.mark.parametrize("case", CASES)
def test_launches_and_waits(
    case: str, suffix: str, golden: Callable[[str, str], None], tmp_path: Path
) -> None:
    """A.3.2."""
    path = tmp_path / "events.txt"
    write_on[CASES[case].ranks](case=case, checkpointing=CHECKPOINTING[suffix], path=str(path))
    golden(f"eager/{case}{suffix}.txt", path.read_text())


def test_every_file_is_read() -> None:
    folder = Path(__file__).resolve().parents[2] / "golden" / "eager"
    assert {path.stem for path in folder.iterdir()} == {c + s for c in CASES for s in CHECKPOINTING}
