"""Training loops as users write them, sharded and replicated: bit for bit.

Each is a function of a `Session`, which says what differs: replicated, gradients are averaged by
hand, over the ranks, after each backward; sharded, they arrive averaged.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.models import Block, net_loss, tokens
from support.models import SmallNet as Net
from support.ranks import on_ranks
from support.training import adamw, assert_same, in_both_forms, sgd
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import swa_utils

import autoshard

OPTIONS = {"lowering": "eager", "strict": True}
STEPS = 4


class Session:
    """A run of a loop on this rank: "replicated", "eager" or "compiled"."""

    def __init__(self, form: str, rank: int) -> None:
        self.form, self.rank = form, rank
        self.models: list[nn.Module] = []  # that the loop trains
        self.losses: list[float] = []

    def model(self, build: Callable[[], nn.Module], *, sharded_first: bool = False) -> Any:
        """What to call. Compiled, it is sharded when it is called first.

        sharded_first: explicitly, before it is compiled.
        """
        torch.manual_seed(len(self.models))
        model = build()
        self.models.append(model)
        if self.form == "eager" or (self.form == "compiled" and sharded_first):
            autoshard.shard(model)
        if self.form == "compiled":
            return torch.compile(model, backend="autoshard", options=OPTIONS)
        return model

    def backward(self, loss: Tensor, **arguments: Any) -> None:
        """Sum and average this backward's gradients, and add them to those that there are."""
        params = [param for model in self.models for param in model.parameters()]
        if self.form != "replicated":
            loss.backward(**arguments)
            return
        before = [param.grad for param in params]
        for param in params:
            param.grad = None
        loss.backward(**arguments)
        for param, there in zip(params, before, strict=True):
            if param.grad is None:
                param.grad = there
                continue
            param.grad = mean(param.grad)
            if there is not None:
                param.grad = there + param.grad

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss.item())

    def step(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Backward, the update, and gradients of None."""
        self.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.note(loss)


def mean(value: Tensor) -> Tensor:
    """Over the ranks."""
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def drawn(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def perceptron(inputs: int, outputs: int) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, 9), nn.LeakyReLU(0.2), nn.Linear(9, outputs))

    return build


# Optimizers that call back.


def mean_loss_closure(
    session: Session, net: Any, optimizer: torch.optim.Optimizer, step: int
) -> Any:
    """What LBFGS calls: it decides by the loss, which is the same on all ranks."""

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net_loss(net, session.rank, step)
        session.backward(loss)
        session.note(loss)
        return mean(loss)

    return closure


def closure(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(STEPS):
        optimizer.step(mean_loss_closure(session, net, optimizer, step))


def even() -> nn.Module:
    """Rows that two ranks share evenly: LBFGS flattens parameters, and torch no other DTensors."""
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def solved(session: Session, **arguments: Any) -> None:
    net = session.model(even)
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, history_size=4, **arguments)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = net(drawn(session.rank, 0, 6, 4)).square().mean()
        session.backward(loss)
        session.note(loss)
        return mean(loss)

    for _ in range(STEPS):
        optimizer.step(closure)


def lbfgs(session: Session) -> None:
    solved(session, lr=0.1)


def lbfgs_with_line_search(session: Session) -> None:
    solved(session, lr=0.5, line_search_fn="strong_wolfe")


# Several models.


def gan(session: Session) -> None:
    make, judge = session.model(perceptron(3, 5)), session.model(perceptron(5, 1))
    of_make, of_judge = adamw(make), adamw(judge)
    for step in range(STEPS):
        real, noise = drawn(session.rank, step, 4, 5), drawn(session.rank, 100 + step, 4, 3)
        made = make(noise)
        on_real, on_made = judge(real), judge(made.detach())
        loss = functional.binary_cross_entropy_with_logits(on_real, torch.ones_like(on_real))
        loss = loss + functional.binary_cross_entropy_with_logits(
            on_made, torch.zeros_like(on_made)
        )
        session.step(loss, of_judge)
        verdict = judge(made)
        session.step(
            functional.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict)), of_make
        )
        of_judge.zero_grad()


def wgan_with_clipped_weights(session: Session) -> None:
    make, critic = session.model(perceptron(3, 5)), session.model(perceptron(5, 1))
    of_make = torch.optim.RMSprop(make.parameters(), lr=1e-2)
    of_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-2)
    for step in range(STEPS):
        for inner in range(2):
            real = drawn(session.rank, 10 * step + inner, 4, 5)
            with torch.no_grad():
                made = make(drawn(session.rank, 100 + 10 * step + inner, 4, 3))
            session.step(critic(torch.cat([made, real])).chunk(2)[0].mean(), of_critic)
            with torch.no_grad():
                for param in critic.parameters():
                    param.clamp_(-0.2, 0.2)
        made = make(drawn(session.rank, 500 + step, 4, 3))
        session.step(-critic(made).mean(), of_make)
        of_critic.zero_grad()


def wgan_with_penalty(session: Session) -> None:
    """Gradients of gradients, which torch.compile has not."""
    critic = session.model(perceptron(5, 1))
    optimizer = adamw(critic)
    for step in range(STEPS):
        mixed = drawn(session.rank, step, 4, 5).requires_grad_()
        score = critic(mixed)
        (slope,) = torch.autograd.grad(score.sum(), mixed, create_graph=True)
        session.step(score.mean() + (slope.norm(dim=1) - 1).square().mean(), optimizer)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(5, 6), Block())
        self.actor, self.critic = nn.Linear(6, 3), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(x)
        return self.actor(x), self.critic(x).squeeze(-1)


def played(session: Session, net: Any, step: int) -> tuple[Tensor, Tensor]:
    """Losses of the actor and of the critic."""
    seen, won = drawn(session.rank, step, 4, 5), drawn(session.rank, 100 + step, 4)
    logits, value = net(seen)
    chosen = logits.log_softmax(-1)[:, step % 3]
    return -(chosen * (won - value.detach())).mean(), functional.mse_loss(value, won)


def actor_critic(session: Session) -> None:
    net = session.model(TwoHeads)
    optimizer = adamw(net)
    for step in range(STEPS):
        of_actor, of_critic = played(session, net, step)
        session.step(of_actor + 0.5 * of_critic, optimizer)


def two_losses_over_one_forward(session: Session) -> None:
    net = session.model(TwoHeads)
    optimizer = adamw(net)
    for step in range(STEPS):
        of_actor, of_critic = played(session, net, step)
        session.backward(of_actor, retain_graph=True)
        session.step(of_critic, optimizer)


def one_of_two_losses_in_turn(session: Session) -> None:
    """The other head has gradients of None in that step, and its moments stay."""
    net = session.model(TwoHeads)
    optimizer = adamw(net)
    for step in range(STEPS):
        session.step(played(session, net, step)[step % 2], optimizer)


def two_optimizers(session: Session) -> None:
    net = session.model(TwoHeads)
    of_trunk = sgd(net.trunk)
    of_heads = torch.optim.AdamW([*net.actor.parameters(), *net.critic.parameters()], lr=1e-2)
    for step in range(STEPS):
        session.backward(sum(played(session, net, step)))
        of_heads.step()
        if step % 2:
            of_trunk.step()
        net.zero_grad()


def distillation(session: Session) -> None:
    torch.manual_seed(10)
    teacher = perceptron(5, 3)().eval().requires_grad_(False)
    student = session.model(perceptron(5, 3))
    optimizer = adamw(student)
    for step in range(STEPS):
        x = drawn(session.rank, step, 4, 5)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        session.step(functional.cross_entropy(student(x), wanted), optimizer)


def sharded_teacher(session: Session) -> None:
    teacher, student = session.model(perceptron(5, 3)), session.model(perceptron(5, 3))
    optimizer = adamw(student)
    for step in range(STEPS):
        x = drawn(session.rank, step, 4, 5)
        with torch.no_grad():
            wanted = teacher(x).softmax(-1)
        session.step(functional.cross_entropy(student(x), wanted), optimizer)
        with torch.no_grad():  # the teacher follows the student
            for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                theirs.lerp_(ours, 0.1)


def target_network(session: Session) -> None:
    """Of deep Q-learning: it gets the other's weights now and then."""
    online, target = session.model(perceptron(5, 3)), session.model(perceptron(5, 3))
    optimizer = adamw(online)
    for step in range(6):
        seen, then = drawn(session.rank, step, 4, 5), drawn(session.rank, 100 + step, 4, 5)
        with torch.no_grad():
            wanted = drawn(session.rank, 200 + step, 4) + 0.9 * target(then).amax(1)
        session.step(functional.smooth_l1_loss(online(seen)[:, step % 3], wanted), optimizer)
        if step % 2:
            session.models[1].load_state_dict(session.models[0].state_dict())


def proximal_policy(session: Session) -> None:
    """Played without gradients, then trained on twice, in two parts."""
    net = session.model(TwoHeads)
    optimizer = adamw(net)
    for step in range(2):
        seen, won = drawn(session.rank, step, 6, 5), drawn(session.rank, 100 + step, 6)
        with torch.no_grad():
            before = net(seen)[0].log_softmax(-1)[:, 0]
        for part in (slice(0, 3), slice(3, 6)) * 2:
            logits, value = net(seen[part])
            ratio = (logits.log_softmax(-1)[:, 0] - before[part]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            gain = torch.minimum(ratio * won[part], clipped * won[part]).mean()
            session.step(functional.mse_loss(value, won[part]) - gain, optimizer)


def two_models_in_a_row(session: Session) -> None:
    encoder, decoder = session.model(perceptron(5, 4)), session.model(perceptron(4, 5))
    optimizer = torch.optim.AdamW([*encoder.parameters(), *decoder.parameters()], lr=1e-2)
    for step in range(STEPS):
        x = drawn(session.rank, step, 4, 5)
        session.step(functional.mse_loss(decoder(encoder(x)), x), optimizer)


class Adapted(nn.Module):
    """A layer that stays as it is, and one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.down, self.up = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters(session: Session) -> None:
    """Trained, merged into the layer, and trained on."""
    net = session.model(lambda: nn.Sequential(Adapted(), nn.Tanh(), Adapted()))
    optimizer = adamw(net)
    for step in range(STEPS):
        session.step(net(drawn(session.rank, step, 4, 5)).square().mean(), optimizer)
        if step == 1:
            with torch.no_grad():
                for layer in (session.models[0][0], session.models[0][2]):
                    layer.base.weight.add_(layer.up.weight @ layer.down.weight)
                    layer.up.weight.zero_()


# Weights that are averaged, moved, put back.


def moving_average(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    shadow: dict[str, Tensor] = {}
    for step in range(STEPS):
        session.step(net_loss(net, session.rank, step), optimizer)
        with torch.no_grad():
            for name, param in net.named_parameters():
                if name in shadow:
                    shadow[name].mul_(0.9).add_(param, alpha=0.1)
                else:
                    shadow[name] = param.detach().clone()
    with torch.no_grad():  # it is what is kept in the end
        for name, param in net.named_parameters():
            param.copy_(shadow[name])
    session.note(net_loss(net, session.rank, STEPS))


def averaged_by_another(session: Session) -> None:
    """What the error of a deep copy says: build another one and load its state."""
    net, other = session.model(Net), session.model(Net)
    optimizer = adamw(net)
    follow = swa_utils.get_ema_multi_avg_fn(0.9)
    for step in range(STEPS):
        session.step(net_loss(net, session.rank, step), optimizer)
        with torch.no_grad():
            session.note(net_loss(other, session.rank, step))
        ours, theirs = list(net.parameters()), list(other.parameters())
        if step == 0:
            session.models[1].load_state_dict(session.models[0].state_dict())
        else:
            follow(theirs, ours, step)


def copied_before(session: Session) -> None:
    """A copy made before the first call, trained, too."""
    torch.manual_seed(0)
    first = Net()
    second = copy.deepcopy(first)
    nets = [session.model(lambda: first), session.model(lambda: second)]
    optimizers = [adamw(nets[0]), sgd(nets[1])]
    for step in range(STEPS):
        for net, optimizer in zip(nets, optimizers, strict=True):
            session.step(net_loss(net, session.rank, step), optimizer)


def sharpness_aware(session: Session) -> None:
    """Two forwards and backwards a step, the second of them from weights that are moved."""
    net = session.model(Net)
    optimizer = sgd(net)
    for step in range(STEPS):
        session.backward(net_loss(net, session.rank, step))
        with torch.no_grad():
            moved = [(param, param.grad.sign() * 0.01) for param in net.parameters()]
            for param, by in moved:
                param.add_(by)
        optimizer.zero_grad()
        session.backward(net_loss(net, session.rank, step))
        with torch.no_grad():
            for param, by in moved:
                param.sub_(by)
        optimizer.step()
        optimizer.zero_grad()


def gradients_clipped_by_value(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(STEPS):
        session.backward(net_loss(net, session.rank, step))
        nn.utils.clip_grad_value_(net.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def schedule_and_groups(session: Session) -> None:
    """Made before the first call: groups of parameters, and what changes their learning rates."""
    net = session.model(Net)
    decayed = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=STEPS)
    for step in range(STEPS):
        session.step(net_loss(net, session.rank, step), optimizer)
        schedule.step()


# Several forwards, several backwards.


def contrastive(session: Session) -> None:
    encoder = session.model(perceptron(5, 4))
    optimizer = adamw(encoder)
    for step in range(STEPS):
        seen = drawn(session.rank, step, 6, 5)
        one, other = encoder(seen), encoder(seen + 0.1)
        alike = functional.normalize(one, dim=-1) @ functional.normalize(other, dim=-1).T
        session.step(functional.cross_entropy(alike / 0.5, torch.arange(6)), optimizer)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(5, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return torch.tanh(self.inner(x) + self.outer(state))


def recurrent(session: Session) -> None:
    cell = session.model(Cell)
    optimizer = adamw(cell)
    for step in range(STEPS):
        state = torch.zeros(4, 6)
        for x in drawn(session.rank, step, 3, 4, 5):
            state = cell(x, state)
        session.step(state.square().mean(), optimizer)


def truncated_recurrent(session: Session) -> None:
    """A backward each time step, from a state that is cut off."""
    cell = session.model(Cell)
    optimizer = adamw(cell)
    state = torch.zeros(4, 6)
    for step in range(STEPS):
        state = cell(drawn(session.rank, step, 4, 5), state.detach())
        session.step((state - 1).square().mean(), optimizer)


def accumulation(session: Session) -> None:
    """Each micro-batch's gradients are averaged."""
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(STEPS):
        for batch in range(3):
            session.backward(net_loss(net, session.rank, 3 * step + batch) / 3)
        optimizer.step()
        optimizer.zero_grad()


def accumulation_with_no_sync(session: Session) -> None:
    """What is averaged is the sum of all."""
    net = session.model(Net, sharded_first=True)
    optimizer = adamw(net)
    for step in range(STEPS):
        for batch in range(3):
            loss = net_loss(net, session.rank, 3 * step + batch) / 3
            if session.form == "replicated":
                loss.backward()
                continue
            with net.no_sync() if batch < 2 else contextlib.nullcontext():
                loss.backward()
        if session.form == "replicated":
            for param in net.parameters():
                param.grad = mean(param.grad)
        optimizer.step()
        optimizer.zero_grad()


def gradients_asked_for(session: Session) -> None:
    """torch.autograd.grad in place of backward."""
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(STEPS):
        loss = net_loss(net, session.rank, step)
        params = list(net.parameters())
        for param, grad in zip(params, torch.autograd.grad(loss, params), strict=True):
            param.grad = mean(grad) if session.form == "replicated" else grad
        optimizer.step()
        optimizer.zero_grad()
        session.note(loss)


# Precision and shapes.


def scaled_autocast(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = net_loss(net, session.rank, step)
        session.backward(scaler.scale(loss))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        session.note(loss)


def epochs_with_a_partial_batch(session: Session) -> None:
    net = session.model(perceptron(5, 3))
    optimizer = adamw(net)
    for epoch in range(2):
        for step, size in enumerate((4, 4, 3)):
            x = drawn(session.rank, 10 * epoch + step, size, 5)
            session.step(net(x).square().mean(), optimizer)


def lengths_of_their_own(session: Session) -> None:
    """In each step, and on each rank."""
    net = session.model(Net)
    optimizer = adamw(net)
    for step, length in enumerate((5, 8, 3, 6, 11)):
        ids = tokens(session.rank, step, length=length + session.rank)
        session.step(functional.cross_entropy(net(ids), ids.roll(-1)), optimizer)


# What happens between steps.


def evaluation_in_between(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(STEPS):
        net.train()
        session.step(net_loss(net, session.rank, step), optimizer)
        net.eval()
        with torch.no_grad() if step % 2 else torch.inference_mode():
            session.note(net_loss(net, session.rank, 100 + step))


def evaluation_first(session: Session) -> None:
    """Before any step, as sanity checks do."""
    net = session.model(Net)
    optimizer = adamw(net)
    with torch.no_grad():
        session.note(net_loss(net, session.rank, 100))
    for step in range(STEPS):
        session.step(net_loss(net, session.rank, step), optimizer)


def generation_in_between(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(STEPS):
        session.step(net_loss(net, session.rank, step), optimizer)
        ids = tokens(session.rank, step, length=3)
        with torch.no_grad():
            for _ in range(3):
                ids = torch.cat([ids, net(ids)[-1:].argmax(-1)])
        session.losses.extend(map(float, ids))


def frozen_in_mid_run(session: Session) -> None:
    net = session.model(Net)
    optimizer = adamw(net)
    for step in range(6):
        net.layers[0].requires_grad_(step not in (2, 3))
        session.step(net_loss(net, session.rank, step), optimizer)


def unfrozen_in_mid_run(session: Session) -> None:
    """Only the head at first, of which the optimizer knows; then all."""
    net = session.model(lambda: Net(tied=False))
    net.requires_grad_(False)
    net.head.requires_grad_(True)
    optimizer = adamw(net.head)
    for step in range(6):
        if step == 3:
            net.requires_grad_(True)
            others = [param for name, param in net.named_parameters() if "head" not in name]
            optimizer.add_param_group({"params": others})
        session.step(net_loss(net, session.rank, step), optimizer)


def weights_loaded_in_mid_run(session: Session) -> None:
    """Back to the best state so far, as early stopping does."""
    net = session.model(Net)
    optimizer = adamw(net)
    kept: dict[str, Any] = {}
    for step in range(STEPS):
        session.step(net_loss(net, session.rank, step), optimizer)
        if step == 1:
            kept = copy.deepcopy(session.models[0].state_dict())
    session.models[0].load_state_dict(kept)
    session.step(net_loss(net, session.rank, STEPS), optimizer)


LOOPS = (
    closure,
    lbfgs,
    lbfgs_with_line_search,
    gan,
    wgan_with_clipped_weights,
    wgan_with_penalty,
    actor_critic,
    two_losses_over_one_forward,
    one_of_two_losses_in_turn,
    two_optimizers,
    distillation,
    sharded_teacher,
    target_network,
    proximal_policy,
    two_models_in_a_row,
    adapters,
    moving_average,
    averaged_by_another,
    copied_before,
    sharpness_aware,
    gradients_clipped_by_value,
    schedule_and_groups,
    contrastive,
    recurrent,
    truncated_recurrent,
    accumulation,
    accumulation_with_no_sync,
    gradients_asked_for,
    scaled_autocast,
    epochs_with_a_partial_batch,
    lengths_of_their_own,
    evaluation_in_between,
    evaluation_first,
    generation_in_between,
    frozen_in_mid_run,
    unfrozen_in_mid_run,
    weights_loaded_in_mid_run,
)
NOT_COMPILED = (wgan_with_penalty,)


def names(loops: Iterable[Any]) -> list[str]:
    return [loop.__name__ for loop in loops]


def run(name: str, form: str, rank: int) -> Session:
    session = Session(form, rank)
    globals()[name](session)
    return session


@pytest.mark.parametrize("name", names(LOOPS))
@in_both_forms
@on_ranks(2)
def test_loop(rank: int, form: str, name: str) -> None:
    if form == "compiled" and name in names(NOT_COMPILED):
        return
    want, got = run(name, "replicated", rank), run(name, form, rank)
    assert got.losses == want.losses
    for ours, theirs in zip(got.models, want.models, strict=True):
        assert_same(ours, theirs)


@in_both_forms
@on_ranks(2)
def test_averaged_model(rank: int, form: str) -> None:
    """torch.optim.swa_utils copies the model: a sharded one says how else weights are averaged."""
    net = Session(form, rank).model(Net)
    net_loss(net, rank, 0).backward()
    with pytest.raises(TypeError, match=r"EMA, AveragedModel.*before it is sharded"):
        swa_utils.AveragedModel(net)
