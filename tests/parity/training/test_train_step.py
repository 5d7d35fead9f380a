"""`train_step`: what a loop written by hand does, with the same bits, whatever is in the loop."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.fsdp
from support import artefacts
from support.models import SmallNet, tokens
from support.ranks import on_ranks
from support.selection import IS_FULL, each_value, part_of
from support.training import FORMS, assert_same, average_gradients, in_both_forms, in_form
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

import autoshard
from autoshard.runtime.training.whole_step import TrainStep

STEPS = 20 if IS_FULL else 5
BAD = 2  # the step in which a loss is infinite on one rank, where there is a scaler

Batch = tuple[Tensor, float]


def batches_of(rank: int, step: int, accumulate: int, *, has_inf: bool) -> list[Batch]:
    """Token ids of each microbatch, and a factor of its loss."""
    factors = [float("inf") if has_inf and rank == step - 1 == BAD - 1 else 1.0] * accumulate
    return [(tokens(rank, 10 * step + n), factor) for n, factor in enumerate(factors)]


def loss_of(model: Any, batch: Batch) -> Tensor:
    ids, factor = batch
    return functional.cross_entropy(model(ids).float(), ids.roll(-1)) * factor


@dataclass(frozen=True)
class Setting:
    """What is in a loop: microbatches, clipping, a scaler, an optimizer."""

    accumulate: int
    clip: float | None
    is_scaled: bool
    make: Callable[[nn.Module], torch.optim.Optimizer]

    def scaler(self) -> torch.amp.GradScaler | None:
        if not self.is_scaled:
            return None
        return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)


def by_hand(
    model: Any, optimizer: torch.optim.Optimizer, setting: Setting, rank: int, *, replicated: bool
) -> list[float]:
    """The losses of a loop as users write it."""
    scaler, losses = setting.scaler(), []
    for step in range(STEPS):
        total = torch.zeros(())
        microbatches = batches_of(rank, step, setting.accumulate, has_inf=setting.is_scaled)
        for number, batch in enumerate(microbatches):
            waits = number + 1 < len(microbatches) and not replicated
            with model.no_sync() if waits else contextlib.nullcontext():
                loss = loss_of(model, batch)
                if setting.accumulate > 1:
                    loss = loss / setting.accumulate
                (scaler.scale(loss) if scaler else loss).backward()
            total += loss.detach()
        if replicated:
            average_gradients(model)
        if scaler and setting.clip:
            scaler.unscale_(optimizer)
        if setting.clip and replicated:
            torch.nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        elif setting.clip:
            model.clip_grad_norm_(setting.clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def in_one_call(
    model: Any, optimizer: torch.optim.Optimizer, setting: Setting, rank: int
) -> list[float]:
    step = autoshard.train_step(
        model,
        optimizer,
        loss_of,
        accumulate=setting.accumulate,
        clip=setting.clip,
        scaler=setting.scaler(),
    )
    losses = []
    for number in range(STEPS):
        given = batches_of(rank, number, setting.accumulate, has_inf=setting.is_scaled)
        losses.append(step(given if setting.accumulate > 1 else given[0]).item())
    return losses


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2),
}

STRATEGIES: dict[str, dict[str, Any]] = {
    "full_shard": {"strategy": "full_shard"},
    "hybrid": {"strategy": "hybrid_shard"},
    "replicate": {"strategy": "no_shard"},
}


@each_value(
    form=FORMS,
    optimizer=OPTIMIZERS,
    accumulate=[1, 3, 3, 1, 3],
    clip=[None, 0.05, 0.05],
    is_scaled=[False, True, True, False, False, True],
    strategy=STRATEGIES,
    is_low=[False, True],
)
@on_ranks(2)
def test_a_loop_by_hand(
    rank: int,
    form: str,
    optimizer: str,
    accumulate: int,
    clip: float | None,
    is_scaled: bool,
    strategy: str,
    is_low: bool,
) -> None:
    """Parameters, states and losses; and the replicated model's where none rounds otherwise."""
    setting = Setting(accumulate, clip, is_scaled, OPTIMIZERS[optimizer])
    found = []
    for is_one_call in (False, True):
        torch._dynamo.reset()
        model = sharded(form, strategy, is_low=is_low)
        trainer = setting.make(model)
        if is_one_call:
            losses = in_one_call(model, trainer, setting, rank)
        else:
            losses = by_hand(model, trainer, setting, rank, replicated=False)
        found.append((model, trainer, losses))
    (want, wants, want_losses), (got, gots, got_losses) = found
    assert str(got_losses) == str(want_losses)  # inf and NaN equal themselves as text
    assert_same(got, want)
    for mine, theirs in zip(got.parameters(), want.parameters(), strict=True):
        state, expected = gots.state[mine], wants.state[theirs]
        assert list(state) == list(expected)
        for key, value in state.items():
            assert torch.equal(local(value), local(expected[key])), key
    if not is_low:
        torch.manual_seed(0)
        plain = SmallNet()
        losses = by_hand(plain, setting.make(plain), setting, rank, replicated=True)
        # Gradients of microbatches add up before they are reduced, or after; and norms by shards.
        # torch's fused kernel for CPUs rounds the last elements of a tensor otherwise than those
        # that fill a vector, and a shard ends elsewhere than the parameter.
        rounds = accumulate > 1 or clip or optimizer == "fused"
        # AdamW divides by roots of small means: what rounds otherwise grows over twenty steps.
        rtol = (1e-4 if IS_FULL else 1e-5) if rounds else 0.0
        assert losses == pytest.approx(got_losses, rel=1e-5, nan_ok=True)
        assert_same(got, plain, rtol=rtol)


@pytest.mark.parametrize("name", part_of(artefacts.FAMILIES, 5))
@in_both_forms
@on_ranks(2)
def test_families(rank: int, form: str, name: str) -> None:
    """Models that people train: losses, parameters and states of a loop by hand."""
    found = []
    for is_one_call in (False, True):
        torch._dynamo.reset()
        model: Any = in_form(autoshard.shard(getattr(artefacts, name)()), form)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        run = _family_in_one_call if is_one_call else _family_by_hand
        losses = run(model, optimizer, getattr(artefacts, f"{name}_batch"), rank)
        states = [local(state["exp_avg_sq"]) for state in optimizer.state.values()]
        found.append((model, losses, states))
    (want, want_losses, wants), (got, got_losses, gots) = found
    assert got_losses == want_losses
    assert_same(got, want)
    assert all(map(torch.equal, gots, wants))


def _family_loss(model: Any, batch: Any) -> Tensor:
    return artefacts.loss_of(model(**batch))


def _family_in_one_call(model: Any, optimizer: Any, batch: Any, rank: int) -> list[float]:
    step = autoshard.train_step(model, optimizer, _family_loss, accumulate=3, clip=0.1)
    return [step([batch(rank, 10 * n + i) for i in range(3)]).item() for n in range(STEPS)]


def _family_by_hand(model: Any, optimizer: Any, batch: Any, rank: int) -> list[float]:
    losses = []
    for number in range(STEPS):
        total = torch.zeros(())
        for each in range(3):
            with model.no_sync() if each < 2 else contextlib.nullcontext():
                loss = _family_loss(model, batch(rank, 10 * number + each)) / 3
                loss.backward()
            total += loss.detach()
        model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    return losses


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-2)]


def adafactor(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adafactor(model.parameters(), lr=1e-2)]


@pytest.mark.parametrize(
    ("make", "strategy", "is_scaled"),
    [
        (muon_and_adamw, "full_shard", False),
        (muon_and_adamw, "hybrid", True),
        (adafactor, "replicate", False),
    ],
)
@in_both_forms
@on_ranks(2)
def test_optimizers_of_whole_matrices(
    rank: int, form: str, make: Any, strategy: str, is_scaled: bool
) -> None:
    """Two of them, of which each has its parameters; schedules of both."""
    models = []
    for is_one_call in (False, True):
        torch._dynamo.reset()
        model = sharded(form, strategy)
        optimizers = make(model)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if is_scaled else None
        step = autoshard.train_step(
            model, optimizers, loss_of, clip=0.5, scaler=scaler, schedule=schedules
        )
        for number in range(3):
            (batch,) = batches_of(rank, number, 1, has_inf=False)
            if is_one_call:
                step(batch)
                continue
            loss = loss_of(model, batch)
            (scaler.scale(loss) if scaler else loss).backward()
            for each in optimizers:
                if scaler:
                    scaler.unscale_(each)
            model.clip_grad_norm_(0.5)
            for each in optimizers:
                scaler.step(each) if scaler else each.step()
            if scaler:
                scaler.update()
            for schedule in schedules:
                schedule.step()
            model.zero_grad()
        models.append(model)
        assert all(each.param_groups[0]["lr"] < 0.0146 for each in optimizers)
    assert_same(*models)


def sharded(form: str, strategy: str = "full_shard", *, is_low: bool = False) -> Any:
    torch.manual_seed(0)
    policy = autoshard.MixedPrecisionPolicy(torch.bfloat16, torch.float32) if is_low else None
    model: Any = autoshard.shard(SmallNet(), mp_policy=policy, **STRATEGIES[strategy])
    return in_form(model, form)


def local(value: Any) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else torch.as_tensor(value)


@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(2)
def test_a_plain_model_is_compiled(rank: int, accumulate: int) -> None:
    """With the loss, and sharded by its first call, which may wait, with an optimizer from before.

    Inductor rounds otherwise.
    """
    seen: dict[str, bool] = {}

    def loss(model: Any, batch: Batch) -> Tensor:
        seen["compiled"] = torch.compiler.is_compiling()
        return loss_of(model, batch)

    setting = Setting(accumulate, None, False, OPTIMIZERS["sgd"])
    torch.manual_seed(0)
    model, plain = SmallNet(), SmallNet()
    plain.load_state_dict(model.state_dict())
    step = autoshard.train_step(model, setting.make(model), loss, accumulate=accumulate)
    for number in range(STEPS):
        given = batches_of(rank, number, accumulate, has_inf=False)
        step(given if accumulate > 1 else given[0])
        assert seen == {"compiled": True}
    assert isinstance(model, autoshard.ShardedModule)
    assert {plan.graph for plan in autoshard.plans(model)} == {"forward", "backward"}
    by_hand(plain, setting.make(plain), setting, rank, replicated=True)
    assert_same(model, plain, rtol=1e-4)


@contextlib.contextmanager
def counted_frames() -> Iterator[list[int]]:
    """Frames that Dynamo compiles in the context, as the one number of a list after it."""
    before, found = _frames(), [0]
    yield found
    found[0] = _frames() - before


def _frames() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@on_ranks(2)
def test_what_changes_compiles_nothing(rank: int) -> None:
    """Learning rates, weight decay, the scale, the norm, by hand and by a schedule."""
    model = sharded("compiled")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    step = autoshard.train_step(
        model, optimizer, loss_of, accumulate=2, clip=1.0, scaler=scaler, schedule=schedule
    )
    step(batches_of(rank, 0, 2, has_inf=False))
    with counted_frames() as frames:
        for number in range(1, 100):
            optimizer.param_groups[0]["weight_decay"] = 0.01 * number
            step.clip = 1.0 / number
            step(batches_of(rank, number, 2, has_inf=False))
    assert frames == [0]
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**100)
    assert scaler.get_scale() == 1024.0 * 2**100


@on_ranks(2)
def test_a_schedule_waits_for_the_optimizer(rank: int) -> None:
    """It does not count a step that the scaler left out."""
    model = sharded("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = autoshard.train_step(model, optimizer, loss_of, scaler=scaler, schedule=schedule)
    for number in range(BAD + 2):
        step(batches_of(rank, number, 1, has_inf=True)[0])
    assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5 ** (BAD + 1)
    assert scaler.get_scale() == 512.0


@in_both_forms
@on_ranks(2)
def test_callbacks(rank: int, form: str) -> None:
    """In order; the first two see gradients unscaled, and may leave the update out."""
    model = sharded(form)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    step = autoshard.train_step(model, optimizer, loss_of, clip=0.05, scaler=scaler)
    seen: list[tuple[str, float]] = []
    refuses: set[str] = set()

    def look(point: str) -> Callable[[TrainStep], bool]:
        def callback(given: TrainStep) -> bool:
            assert given is step
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
            seen.append((point, norm.full_tensor().item()))
            return point not in refuses

        return callback

    handles = [step.on(point, look(point)) for point in ("updated", "clipped", "reduced")]

    def run(number: int) -> tuple[list[str], bool]:
        seen.clear()
        before = [local(each).clone() for each in model.parameters()]
        step(batches_of(rank, number, 1, has_inf=False)[0])
        assert all(each.grad is None for each in model.parameters())
        same = all(map(torch.equal, before, map(local, model.parameters())))
        return [point for point, _ in seen], same

    assert run(0) == (["reduced", "clipped", "updated"], False)
    assert step.norm is not None
    assert seen[0][1] == pytest.approx(step.norm.item())
    assert seen[1][1] == pytest.approx(0.05, rel=1e-3)
    refuses.add("clipped")
    assert run(1) == (["reduced", "clipped", "updated"], True)
    refuses.add("reduced")
    assert run(2) == (["reduced", "updated"], True)
    for handle in handles:
        handle.remove()
    assert run(3) == ([], False)


@in_both_forms
@on_ranks(2)
def test_in_two(rank: int, form: str) -> None:
    """Gradients, and the update, with what a user does in between."""
    models = []
    for is_split in (False, True):
        torch._dynamo.reset()
        model = sharded(form)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = autoshard.train_step(model, optimizer, loss_of, accumulate=2)
        for number in range(3):
            batches = batches_of(rank, number, 2, has_inf=False)
            if is_split:
                loss = step.gradients(batches)
                assert not loss.requires_grad
                assert all(each.grad is not None for each in model.parameters())
                step.update()
            else:
                step(batches)
        with pytest.raises(RuntimeError, match=r"no gradients to step with: call gradients\(batch"):
            step.update()
        models.append(model)
    assert_same(*models)


class Interrupted(Exception):
    pass


PLACES = ("loss", "backward", "reduced", "update")


@each_value(form=FORMS, place=PLACES, kind=[Interrupted, KeyboardInterrupt])
@on_ranks(2)
def test_an_exception_in_the_middle(
    rank: int, form: str, place: str, kind: type[BaseException]
) -> None:
    """What has come until then stays, as in a loop; the next step goes on as it does.

    In the second microbatch's loss or its backward; or after the last backward; or in the update.
    """
    models, states = [], []
    for is_one_call in (False, True):
        torch._dynamo.reset()
        model = sharded(form)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        at: list[str] = []  # where it is to be raised

        def reach(here: str, *, at: list[str] = at) -> None:
            if here in at:
                raise kind

        def loss(model: Any, batch: Batch, *, at: list[str] = at, reach: Any = reach) -> Tensor:
            is_second = batch[1] == 2.0
            if is_second:
                reach("loss")
            found = loss_of(model, batch)
            if is_second and "backward" in at:
                found.register_hook(lambda grad: reach("backward"))
            return found

        step = autoshard.train_step(model, optimizer, loss, accumulate=3)
        step.on("reduced", lambda step, *, reach=reach: reach("reduced"))
        optimizer.register_step_pre_hook(lambda *given, reach=reach: reach("update"))
        for number in range(3):
            batches = batches_of(rank, number, 3, has_inf=False)
            batches[1] = (batches[1][0], 2.0)
            at[:] = [place] if number == 1 else []
            with pytest.raises(kind) if number == 1 else contextlib.nullcontext():
                if is_one_call:
                    step(batches)
                    continue
                for each, batch in enumerate(batches):
                    with model.no_sync() if each < 2 else contextlib.nullcontext():
                        (loss(model, batch) / 3).backward()
                reach("reduced")
                optimizer.step()
                optimizer.zero_grad()
        models.append(model)
        states.append([local(each["exp_avg"]) for each in optimizer.state.values()])
    assert_same(*models)
    assert all(map(torch.equal, *states))


def _of_two(model: Any, batch: Any) -> Tensor:
    return torch.ones(2)


def _number(model: Any, batch: Any) -> Any:
    return 1.0


@on_ranks(2)
def test_bad_input(rank: int) -> None:
    model = sharded("eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for given, message in (
        ({"accumulate": 0}, "accumulate=0: a number from 1 on"),
        ({"accumulate": 1.5}, "accumulate=1.5: a number from 1 on"),
        ({"clip": 0.0}, "clip=0.0: a norm over 0"),
        ({"clip": float("nan")}, "clip=nan: a norm over 0"),
    ):
        with pytest.raises(ValueError, match=message):
            autoshard.train_step(model, optimizer, loss_of, **given)
    with pytest.raises(ValueError, match="there is no optimizer: give"):
        autoshard.train_step(model, [], loss_of)
    with pytest.raises(ValueError, match="LBFGS runs forward and backward several times"):
        autoshard.train_step(model, torch.optim.LBFGS(model.parameters()), loss_of)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match=r"ReduceLROnPlateau steps by a metric.*step\(metric\)"):
        autoshard.train_step(model, optimizer, loss_of, schedule=[plateau])
    of_another = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"SGD trains no parameter of SmallNet: build it from mod"):
        autoshard.train_step(model, of_another, loss_of)
    step = autoshard.train_step(model, optimizer, loss_of, accumulate=2)
    batch = batches_of(rank, 0, 1, has_inf=False)[0]
    wrong = (([batch], "a sequence of 1"), (torch.ones(2), "one Tensor"), ("ab", "one str"))
    for batches, what in wrong:
        with pytest.raises(ValueError, match=rf"2 microbatches was given {what}: give it a list"):
            step(batches)
    with pytest.raises(ValueError, match=r"no point 'after'; expected one of \['reduced', 'clipp"):
        step.on("after", print)
    with pytest.raises(TypeError, match=rf"microbatch 0 is a Tensor of size \[2\] on rank {rank}"):
        autoshard.train_step(model, optimizer, _of_two)(batch)
    with pytest.raises(TypeError, match=r"is a float on rank .*return a mean, or output\.loss"):
        autoshard.train_step(model, optimizer, _number)(batch)
    step = autoshard.train_step(model, optimizer, loss_of)
    for wrong_answer in (0.5, torch.ones(2)):
        handle = step.on("clipped", lambda _, given=wrong_answer: given)
        with pytest.raises(
            TypeError, match=r"callback for 'clipped' returned .*: return True, Fal"
        ):
            step(batch)
        handle.remove()
    part = SmallNet()
    autoshard.fully_shard(part.layers[0])
    with pytest.raises(ValueError, match=r"layers\.0 is sharded, and SmallNet around it is not"):
        autoshard.train_step(part, torch.optim.SGD(part.parameters(), lr=0.1), loss_of)


@in_both_forms
@on_ranks(2)
def test_parameters_in_no_optimizer(rank: int, form: str) -> None:
    """A warning names one; their gradients are let go of, too."""
    model = sharded(form)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    with pytest.warns(RuntimeWarning, match=r"layers\.0\.norm\.weight requires a gradient, "):
        step = autoshard.train_step(model, optimizer, loss_of, clip=float("inf"))
    norms = []
    for _ in range(3):
        step(batches_of(rank, 0, 1, has_inf=False)[0])
        assert all(each.grad is None for each in model.parameters())
        norms.append(step.norm)
    assert norms[0] is not norms[1]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for _ in range(2):
        step(batches_of(rank, 0, 1, has_inf=False)[0])
        norms.append(step.norm)
    assert norms[-1] == norms[-2]


def _by_tensor(step: TrainStep) -> Any:
    return step.norm < 0


def _by_numpy(step: TrainStep) -> Any:
    return np.float64(1.0) < 0.0


@pytest.mark.parametrize("callback", [_by_tensor, _by_numpy])
@on_ranks(2)
def test_what_a_callback_returns(rank: int, callback: Any) -> None:
    """A comparison of a tensor, or of a number of NumPy's, is a bool."""
    model = sharded("eager")
    step = autoshard.train_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_of, clip=1.0
    )
    step.on("clipped", callback)
    before = [local(each).clone() for each in model.parameters()]
    step(batches_of(rank, 0, 1, has_inf=False)[0])
    assert all(map(torch.equal, before, map(local, model.parameters())))


def by_ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def by_fsdp2(model: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        torch.distributed.fsdp.fully_shard(layer, mesh=mesh)
    return torch.distributed.fsdp.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("wrap", [by_ddp, by_fsdp2])
@pytest.mark.parametrize("accumulate", [1, 2])
@on_ranks(2)
def test_a_model_in_another_wrapper(rank: int, wrap: Any, accumulate: int) -> None:
    """It is taken over, as where it is compiled by hand."""
    setting = Setting(accumulate, None, False, OPTIMIZERS["sgd"])
    torch.manual_seed(0)
    plain = SmallNet()
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DDP lets go, and says so
        model = wrap(SmallNet())
        in_one_call(model, setting.make(model), setting, rank)
    by_hand(plain, setting.make(plain), setting, rank, replicated=True)
    inside: Any = getattr(model, "module", model)
    assert isinstance(inside, autoshard.ShardedModule)
    assert_same(inside, plain, rtol=1e-4)
