"""docs/troubleshooting.md quotes messages as they are, and what it says to do runs.

Messages of ours are looked for in the source, and many of them provoked, with the remedy run after
that; messages of others are provoked, or looked for in the files of torch.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import logging
import mmap
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from docs.names.troubleshooting import Model, names
from support.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard import backend, compilation
from autoshard.passes.ir.plan import SavedBlock
from autoshard.runtime.comm import mesh as meshes
from autoshard.runtime.compiled import plans
from autoshard.runtime.sharding import first_call
from autoshard.runtime.training import as_planned
from autoshard.runtime.unit.param import find

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "troubleshooting.md"
HOLE = "\0"  # of a message: what an f-string fills in; "..." on the page


@dataclass(frozen=True)
class Entry:
    """Section of the page about one message."""

    message: str
    kind: str  # class of the error or warning, or "Log line"
    source: str  # "torch", "NCCL", ...; "" for ours
    remedies: tuple[str, ...]  # code

    def pattern(self) -> str:
        return ".+?".join(map(re.escape, self.message.split("...")))


@functools.cache
def entries() -> dict[str, Entry]:
    found = {}
    for section in re.split(r"^#{2,3} ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        if not section.startswith("`"):
            continue
        match = re.match(r"`(.+)`\n\n(?:`(\w+)`|(Log line))(?: of (\w+))?[.,]", section)
        assert match, f"no message, or no kind of it, in {section[:200]!r}"
        message, kind, line, source = match.groups()
        code = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
        found[message] = Entry(message, kind or line, source or "", tuple(code))
    return found


@functools.cache
def trees() -> list[ast.Module]:
    folders = ("autoshard", "passes", "runtime", "tools")
    paths = {path.resolve() for each in folders for path in (ROOT / each).rglob("*.py")}
    return [ast.parse(path.read_text()) for path in sorted(paths)]


@functools.cache
def written() -> str:
    """All texts in the source, with holes, one after the other."""
    texts = [text for tree in trees() for text in _texts(tree)]
    return re.sub(f"{HOLE}+", HOLE, "\n\n".join(texts))


def _texts(tree: ast.AST) -> Iterator[str]:
    """Texts of a file: whole f-strings, not their parts; docstrings are none."""
    quoted = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts |= {id(part) for part in node.values}
            pieces = (
                part.value if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
            yield "".join(map(str, pieces))
        elif isinstance(node, ast.Constant) and id(node) not in quoted | parts:
            yield re.sub(r"%(?:s|d|r|\.0f)", HOLE, str(node.value))  # of a line of the log


def in_torch(text: str) -> bool:
    """Tell whether a file of torch, its source or a library, has `text`."""
    folder = Path(torch.__file__).parent
    places = ("_dynamo", "_inductor", "_functorch", "distributed", "nn")
    for path in [path for place in places for path in (folder / place).rglob("*.py")]:
        if text in path.read_text(errors="replace"):
            return True
    for path in (folder / "lib").glob("libtorch_*.so"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data.find(text.encode()) >= 0:
                return True
    return False


def test_messages_of_ours_are_in_the_source() -> None:
    """Each piece as it is, and each `...` one thing that is filled in."""
    ours = [entry.message for entry in entries().values() if not entry.source]
    assert len(ours) >= 40
    assert [each for each in ours if each.replace("...", HOLE) not in written()] == []


# What only builds of torch for GPUs, or libraries beside it, say.
NOT_HERE = {
    "Watchdog caught collective operation timeout",
    "Duplicate GPU detected",
    "out of memory. Tried to allocate",
    "unsupported format string passed to",  # Python's, for a class of torch
}


def test_messages_of_others_are_theirs() -> None:
    others = {entry.message for entry in entries().values() if entry.source}
    assert others >= NOT_HERE
    rest = others - NOT_HERE - {*PROVOKED}
    assert [each for each in rest if not in_torch(each.split("...")[0])] == []


def test_classes_of_errors_are_named() -> None:
    """Those that can reach a user; each by a path that can be imported."""
    within = {
        "Stopped",
        "Missing",
        "CannotBeKept",
        "NoSource",
        "UnknownPath",
    }  # always caught, by us
    classes = set()
    for node in (node for tree in trees() for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.endswith(("Error", "Exception")) for base in bases):
                classes.add(node.name)
    named = re.findall(r"^\| `(autoshard[\w.]+)` \|", PAGE.read_text(), re.MULTILINE)
    assert {path.rpartition(".")[2] for path in named} == classes - within
    for path in named:
        module, _, name = path.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), Exception)


# How each of these comes about: a function of a folder that all ranks share.
Mistake = Callable[[Path], object]
EAGER = {"lowering": "eager"}
STRICT = {**EAGER, "strict": True}


def loss_of(model: Any) -> Tensor:
    given = names()
    return functional.cross_entropy(model(given["ids"]), given["labels"])


def one_line(model: Any = None, **options: Any) -> Any:
    """Call a model once that is sharded by that; the least that there is if none is given."""
    call = torch.compile(model or tiny(), backend="autoshard", options={**STRICT, **options})
    if model is None:
        call(torch.ones(2, 4))
    else:
        loss_of(call)
    return call


def tiny() -> nn.Module:
    return nn.Linear(4, 4)


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def left_out(folder: Path) -> None:
    model = Model()
    for block in model.layers:
        autoshard.fully_shard(block)
    model.compile(backend="autoshard", options=EAGER)
    loss_of(model)


def of_no_module(folder: Path) -> None:
    weight = nn.Parameter(torch.ones(3))
    torch.compile(lambda x: x * weight, backend="autoshard", options=STRICT)(torch.ones(3))


def captured_nothing(folder: Path) -> None:
    model = Model()
    run = torch.compiler.disable(lambda ids: model(ids))
    torch.compile(lambda ids: run(ids + 0) * 2, backend="autoshard", options=EAGER)(names()["ids"])


class Unseen(Model):
    """A model whose forward Dynamo does not trace."""

    forward = torch.compiler.disable(Model.forward)


def no_graph(folder: Path) -> None:
    torch.compile(Unseen(), backend="autoshard", options=EAGER)(names()["ids"])


def two_devices(folder: Path) -> None:
    model = Model()
    model.head.to("meta")
    autoshard.fully_shard(model)


class Bare(nn.Module):
    """A module that does not say how it is initialised."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))


def no_reset(folder: Path) -> None:
    with torch.device("meta"):
        model = Bare()
    autoshard.shard(model)


def on_meta(folder: Path) -> None:
    with torch.device("meta"):
        model = Model()
    loss_of(autoshard.fully_shard(model))


def gradient_before(folder: Path) -> None:
    model = Model()
    loss_of(model).backward()
    autoshard.shard(model)


def hook_before(folder: Path) -> None:
    model = Model()
    model.head.weight.register_hook(lambda grad: grad)
    one_line(model)


def not_contiguous(folder: Path) -> None:
    model = Model()
    model.head.weight = nn.Parameter(torch.ones(8, 11).t())
    autoshard.shard(model)


def sharded_twice(folder: Path) -> None:
    model = Model()
    autoshard.fully_shard(model.head)
    autoshard.fully_shard(model)
    autoshard.fully_shard(model.head)


def root_first(folder: Path) -> None:
    model = autoshard.fully_shard(Model())
    autoshard.fully_shard(model.head)


def told_again(folder: Path) -> None:
    model = autoshard.shard(Model())
    model.compile(backend="autoshard", options={"strategy": "no_shard"})
    model(torch.zeros(2, 3, dtype=torch.long))


def mesh_of_three(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("a", "b", "c"))
    autoshard.fully_shard(Model(), mesh=mesh)


def uneven_dim(folder: Path) -> None:
    from torch.distributed.tensor import Shard

    autoshard.fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(p.dim() - 1))


def ddp_around(folder: Path) -> None:
    call = torch.compile(DistributedDataParallel(tiny()), backend="autoshard", options=EAGER)
    call(torch.ones(2, 4))


def told_twice(folder: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    one_line(fully_shard(Model()), strategy="no_shard")


def deep_copy(folder: Path) -> None:
    import copy

    copy.deepcopy(autoshard.shard(Model()))


def pickled(folder: Path) -> None:
    torch.save(autoshard.shard(Model()), folder / "model.pt")


def no_torchrun(folder: Path) -> None:
    from torch.distributed.rendezvous import rendezvous

    with mock.patch.dict("os.environ"):
        __import__("os").environ.pop("RANK")
        next(rendezvous("env://"))


def no_group(folder: Path) -> None:
    with mock.patch.object(dist.distributed_c10d, "is_initialized", return_value=False):
        dist.get_rank()


class Scaled(nn.Linear):
    """Has a graph that nothing else here has: what was compiled is used again."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.25


def falls_back(folder: Path) -> None:
    call = torch.compile(Scaled(4, 4), backend="autoshard", options=EAGER)
    with mock.patch.object(compilation, "lower_eagerly", side_effect=NotImplementedError("why")):
        call(torch.ones(2, 4))


def many_shapes(folder: Path) -> None:
    call = torch.compile(tiny(), backend="autoshard", options=EAGER, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=1):
        for length in range(1, 4):
            call(torch.ones(length, 4))


class Breaks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def graph_break(folder: Path) -> None:
    torch.compile(Breaks(4, 4), backend="autoshard", options=EAGER)(torch.ones(2, 4))


def long_compilation(folder: Path) -> None:
    from autoshard import progress

    with mock.patch.object(progress, "INTERVAL", 0.01), progress.progress("Model.forward", 2):
        time.sleep(0.2)
    if dist.get_rank() > 0:
        progress.log.warning("compiling %s: %s, %.0f s elapsed", "", "", 1.0)  # rank 0 alone logs


def switched_off(folder: Path) -> None:
    with (
        mock.patch.dict("os.environ", TORCHDYNAMO_DISABLE="1"),
        mock.patch.object(first_call._torch.dynamo, "watch_compile"),
    ):
        first_call.watch_first_calls(lambda options: {})


def no_compiler(folder: Path) -> None:
    from torch._inductor import cpp_builder

    with torch._inductor.config.patch("cpp.cxx", ("no-such-compiler",)):
        cpp_builder.get_cpp_compiler()


def optimizer_before(folder: Path) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    loss_of(autoshard.fully_shard(model)).backward()
    optimizer.step()


def never_called(folder: Path) -> None:
    model = Model()
    optimizer = optimizer_of(model)
    torch.compile(model, backend="autoshard")
    loss_of(model).backward()
    optimizer.step()


def list_before(folder: Path) -> None:
    model = Model()
    parameters = list(model.parameters())
    loss_of(one_line(model)).backward()
    nn.utils.clip_grad_norm_(parameters, 1.0)


def waiting_gradient(folder: Path) -> None:
    model = autoshard.shard(Model())
    optimizer = optimizer_of(model)
    with model.no_sync():
        loss_of(model).backward()
    optimizer.step()


class Clamps(Model):
    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        return super().forward(ids)


def written_in_forward(folder: Path) -> None:
    loss_of(autoshard.shard(Clamps()))


def step_before_backward(folder: Path) -> None:
    model = autoshard.shard(Model())
    first, second = loss_of(model), loss_of(model)
    first.backward()
    optimizer_of(model).step()
    second.backward()


def added_later(folder: Path) -> None:
    model = autoshard.shard(Model())
    model.extra = nn.Linear(11, 2)
    model.extra(model(names()["ids"])).sum().backward()
    optimizer_of(model.extra).step()


def beside(folder: Path) -> None:
    model, critic = autoshard.shard(Model()), nn.Linear(11, 1)
    critic(model(names()["ids"])).sum().backward()
    torch.optim.SGD([*model.parameters(), *critic.parameters()], lr=0.1).step()


def replaced(folder: Path) -> None:
    model = autoshard.shard(Model())
    model.embed.weight = nn.Parameter(model.embed.weight.detach()[:8])
    loss_of(model)


def data_assigned(folder: Path) -> None:
    model = autoshard.shard(Model())
    model.head.weight.data = torch.ones(11, 8, dtype=torch.bfloat16)


def mixed(folder: Path) -> None:
    model = autoshard.shard(Model())
    functional.linear(torch.ones(1, 8), model.head.weight)


def penalty(folder: Path) -> None:
    model = autoshard.shard(Model())
    (model(names()["ids"]).sum() + model.head.weight.square().sum()).backward()


def no_rule(folder: Path) -> None:
    autoshard.shard(Model()).embed.weight.renorm(2, 0, 1.0)


def forward_inside(folder: Path) -> None:
    model = autoshard.shard(Model())
    with model.full_params():
        loss_of(model)


def adafactor(folder: Path) -> None:
    model = autoshard.shard(Model())
    optimizer = torch.optim.Adafactor(model.parameters())
    loss_of(model).backward()
    optimizer.step()


def states_on_host(folder: Path) -> None:
    model = autoshard.shard(Model(), offload_policy=autoshard.OptimizerOffloadPolicy())
    theirs = type("MyAdamW", (torch.optim.AdamW,), {})
    loss_of(model).backward()
    theirs(model.parameters()).step()


def states_stay(folder: Path) -> None:
    model = autoshard.shard(Model())
    for param in model.parameters():
        find(param).has_planned_states = True
    theirs = type("MyAdamW", (torch.optim.AdamW,), {})
    loss_of(model).backward()
    theirs(model.parameters()).step()


def bitsandbytes(folder: Path) -> None:
    theirs = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "bitsandbytes.optim.adamw"})
    model = autoshard.shard(Model())
    optimizer = theirs(model.parameters(), lr=0.1)
    loss_of(model).backward()
    optimizer.step()


def double_backward(folder: Path) -> None:
    model = autoshard.shard(tiny())
    loss = model(torch.ones(2, 4)).square().sum()
    (grad, *_) = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    grad.sum().backward()


class Wide(Model):
    """Another model on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 11 + dist.get_rank())


class Branches(Model):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x if dist.get_rank() else self.layers[0](x))


def other_graph(folder: Path) -> None:
    one_line(Branches(), bucketing="per_unit")


def port_taken(folder: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)


def over_budget(folder: Path) -> None:
    one_line(bucketing="auto", memory_budget=1)


def not_compiled(folder: Path) -> None:
    autoshard.as_planned(autoshard.shard(Model())).__enter__()


def renamed(folder: Path) -> None:
    model = one_line(lowering="eager", topology="h100", memory_budget=2**30)
    block = SavedBlock("layers.99", 0, 1, 1.0)
    found = plans.plans_by_root(model)
    found = {root: [replace(made[0], saved=(block,))] for root, made in found.items()}
    with mock.patch.object(as_planned, "plans_by_root", return_value=found):
        autoshard.as_planned(model).__enter__()


def saved(folder: Path) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = autoshard.shard(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model).backward()
    optimizer.step()
    autoshard.save_checkpoint(folder / "run", model, optimizer, step=1)
    return model, optimizer


def no_room(folder: Path) -> None:
    full = mock.patch("os.fsync", side_effect=OSError("No space left on device"))
    model = autoshard.shard(Model())
    with full:
        autoshard.save_checkpoint(folder / "run", model, step=1)


def broken(folder: Path) -> None:
    model, optimizer = saved(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        next((folder / "run").rglob("complete.json")).write_text("{")
    dist.barrier()
    autoshard.load_checkpoint(folder / "run", model, optimizer)


def too_new(folder: Path) -> None:
    model, optimizer = saved(folder)
    dist.barrier()
    if dist.get_rank() == 0:
        path = next((folder / "run").rglob("complete.json"))
        path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    dist.barrier()
    autoshard.load_checkpoint(folder / "run", model, optimizer)


def other_model(folder: Path) -> None:
    saved(folder)
    autoshard.load_checkpoint(folder / "run", autoshard.shard(nn.Linear(3, 3)))


def other_groups(folder: Path) -> None:
    saved(folder)
    model = autoshard.shard(Model())
    groups = [{"params": [p for p in model.parameters() if p.ndim == ndim]} for ndim in (1, 2)]
    autoshard.load_checkpoint(folder / "run", model, torch.optim.AdamW(groups))


def another_run(folder: Path) -> None:
    from autoshard.runtime.training.checkpoint import folder as folders

    saved(folder)
    dist.barrier()
    folders._runs.clear()  # as in a process that begins
    autoshard.save_checkpoint(folder / "run", autoshard.shard(Model()), step=2)


def not_shared(folder: Path) -> None:
    model, _ = saved(folder)
    autoshard.load_checkpoint(folder / ("run" if dist.get_rank() == 0 else "other"), model)


class OfPaths:
    def state_dict(self) -> dict[str, Any]:
        return {"at": Path("/")}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def state_of_paths(folder: Path) -> None:
    model = autoshard.shard(Model())
    autoshard.save_checkpoint(folder / "run", model, step=1, states={"loader": OfPaths()})


def prefixed(folder: Path) -> None:
    model = autoshard.shard(Model())
    model.load_state_dict({f"module.{name}": each for name, each in model.state_dict().items()})


def by_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(autoshard.shard(Model()).state_dict(), folder / "model.safetensors")


def no_header(folder: Path) -> None:
    dist.barrier()
    (folder / "model.safetensors").write_text("version https://git-lfs")
    dist.barrier()
    autoshard.load_pretrained(Model(), folder)


def old_format(folder: Path) -> None:
    dist.barrier()
    (folder / "pytorch_model.bin").write_text("")
    dist.barrier()
    autoshard.load_pretrained(Model(), folder)


def other_names(folder: Path) -> None:
    autoshard.save_pretrained(autoshard.shard(nn.Linear(3, 3)), folder / "weights")
    autoshard.load_pretrained(Model(), folder / "weights")


def restarts(folder: Path) -> None:
    given = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with mock.patch.dict("os.environ", given), mock.patch.object(dist, "get_rank", return_value=0):
        meshes.warn_of_restarts.__wrapped__()


def no_kind(folder: Path) -> None:
    from autoshard.tools.plan.reading import read_gpus

    read_gpus("64xH1000", None)


def no_config(folder: Path) -> None:
    from autoshard.tools.plan.reading import from_hugging_face

    from_hugging_face(folder / "config.json")


def no_prices(folder: Path) -> None:
    model = one_line(bucketing="per_unit")
    print(autoshard.plans(model)[0].makespan_us)


PROVOKED: dict[str, Mistake] = {
    "Invalid backend: ...": lambda folder: torch.compile(Model(), backend="autosharded"),
    "backend='autoshard' raised:": of_no_module,
    "unknown option ... for backend 'autoshard'; valid options:": (
        lambda folder: one_line(bucketting="auto")
    ),
    "option ... for backend 'autoshard' is ...; expected ...": (
        lambda folder: one_line(memory_budget="8GB")
    ),
    "parameters of size ... were left out of fully_shard": left_out,
    "the compiled code reads parameters of size ... that belong to no module which was compiled": (
        of_no_module
    ),
    "Dynamo captured no model in ...: autoshard has sharded nothing in it": captured_nothing,
    "Dynamo captured no graph of ..., which runs on the eager runtime": no_graph,
    "the parameters of ... are on several devices": two_devices,
    "has parameters or buffers on the meta device and no reset_parameters()": no_reset,
    "parameters ... of unit ... are still on the meta device": on_meta,
    "has a gradient from before sharding, which is this rank's own": gradient_before,
    "has gradient hooks, which sharding can't move": hook_before,
    "is not contiguous (size ..., stride ...)": not_contiguous,
    "a container without forward is never called. Shard its modules:": (
        lambda folder: autoshard.fully_shard(Model().layers)
    ),
    "already: call fully_shard or replicate once for each module, children first": sharded_twice,
    "whose parameters are in the unit of ... around it: call it for modules inside "
    "first": root_first,
    "is sharded already, and options ... of the backend say how to shard it": told_again,
    "expects a 1D or 2D DeviceMesh but got a ...D mesh": mesh_of_three,
    "ranks: only dim 0 may be uneven; give it Shard(0) or FlatShard()": uneven_dim,
    "it renormalises in forward the rows that a rank has looked up": (
        lambda folder: autoshard.shard(nn.Embedding(9, 4, max_norm=1.0))
    ),
    "DistributedDataParallel around ... does nothing from now on": ddp_around,
    "was given to DistributedDataParallel, and is sharded by autoshard": (
        lambda folder: DistributedDataParallel(autoshard.shard(Model()))
    ),
    "was sharded by torch's fully_shard, whose settings are kept, and options ... say how to "
    "shard it": told_twice,
    "is sharded and can't be deep-copied": deep_copy,
    "is sharded and can't be pickled": pickled,
    "environment variable ... expected, but not set": no_torchrun,
    "Default process group has not been initialized": no_group,
    "autoshard could not compile a frame, which runs on the eager runtime instead:": falls_back,
    "hit config.recompile_limit": many_shapes,
    "graph break at ...: ...; what follows has a plan of its own": graph_break,
    "compiling ...: ..., ... s elapsed": long_compilation,
    "mode 'reduce-overhead' for backend 'autoshard' would replay collectives": (
        lambda folder: one_line(mode="reduce-overhead")
    ),
    "option 'inductor' for backend 'autoshard' sets ..., which autoshard sets itself": (
        lambda folder: one_line(inductor={"reorder_for_peak_memory": True})
    ),
    "TORCHDYNAMO_DISABLE=1 switches torch.compile off, and with it the sharding of models by it": (
        switched_off
    ),
    "No working C++ compiler found": no_compiler,
    "from before sharding, before load_state_dict(assign=True) or inside full_params(), so its "
    "step would train nothing": optimizer_before,
    "which was compiled with autoshard but never called through what torch.compile gave back": (
        never_called
    ),
    "through its parameter from before sharding, which the model no longer reads": list_before,
    "whose gradient is still waiting to be reduced: let the last backward before the step "
    "synchronise gradients": waiting_gradient,
    "were written to in forward, where they are gathered copies": written_in_forward,
    "was modified in place between forward and backward": step_before_backward,
    "which was put into its module after sharding: it is not sharded": added_later,
    "that is not sharded, with a loss that sharded parameters are part of": beside,
    "was replaced after sharding by": replaced,
    ".data was assigned ...: a sharded parameter stays a DTensor of": data_assigned,
    "got mixed torch.Tensor and DTensor": mixed,
    "the gradient of the model's output is a DTensor, as the loss has a term that is one": penalty,
    "does not have a sharding strategy registered": no_rule,
    "was called inside full_params(), where gradients would be lost": forward_inside,
    "keeps means over rows and columns of whole matrices, and a rank has some rows of": adafactor,
    "live on the host, from where they are copied some at a time": states_on_host,
    "so its states stay on the device, where memory_budget has no room for them": states_stay,
    "of bitsandbytes takes no DTensors, as parameter": bitsandbytes,
    "trying to differentiate twice a function that was marked with @once_differentiable": (
        double_backward
    ),
    "Build the same model on every rank, or raise the process group's timeout": (
        lambda folder: autoshard.shard(Wide())
    ),
    "compiled other collectives for ... than": other_graph,
    "The server socket has failed to listen on any local network address": port_taken,
    "torchrun may start these ranks again ... times, over one store": restarts,
    "is predicted to need more memory than option 'memory_budget' allows": over_budget,
    "has no plans to follow: compile it with a memory_budget": not_compiled,
    "is no module of it any more: compile it again": renamed,
    "could not be written to": no_room,
    "can't be loaded as complete checkpoints, and there is no other one": broken,
    "and this version of autoshard reads": too_new,
    "it is of another model": other_model,
    "the optimizer's parameters are grouped otherwise": other_groups,
    "has checkpoints of another run, which stay": another_run,
    "is not there: do all ranks share it?": not_shared,
    "have objects that could not be loaded as weights only": state_of_paths,
    "Missing key(s) in state_dict": prefixed,
    "Attempted to access the data pointer on an invalid python storage": by_safetensors,
    "there is no folder ...: give one with": (
        lambda folder: autoshard.load_pretrained(Model(), folder / "nowhere")
    ),
    "weights in another format, as pytorch_model.bin, become such files by": old_format,
    "begins with no header of a safetensors file": no_header,
    "load them into the model that they are of, give key_mapping, or pass strict=False": (
        other_names
    ),
    "no topology is known of": no_kind,
    "is no configuration of a Hugging Face model": no_config,
    "plan was made without prices and has no figures": no_prices,
}


def said_by(mistake: Mistake, folder: Path) -> list[tuple[set[str], str]]:
    """What a mistake raises, warns of and logs: names of its classes, and the text."""
    found: list[tuple[set[str], str]] = []
    with warnings.catch_warnings(record=True) as caught, logged() as lines:
        warnings.simplefilter("always")
        try:
            mistake(folder)
        except Exception as error:
            at: BaseException | None = error
            while at is not None:
                found.append(({cls.__name__ for cls in type(at).__mro__}, str(at)))
                at = getattr(at, "inner_exception", None) or at.__cause__
    found += [({cls.__name__ for cls in w.category.__mro__}, str(w.message)) for w in caught]
    return found + [({"Log line"}, line) for line in lines]


class Lines(logging.Handler):
    """Handler that keeps what is logged, as text."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Lines that torch and autoshard log meanwhile, from INFO on for the latter."""
    handler = Lines()
    ours, theirs = logging.getLogger("autoshard"), logging.getLogger("torch._dynamo")
    level = ours.level
    ours.setLevel(logging.INFO)
    for each in (ours, theirs):
        each.addHandler(handler)
    try:
        yield handler.lines
    finally:
        ours.setLevel(level)
        for each in (ours, theirs):
            each.removeHandler(handler)


def forget() -> None:
    """Have warnings that are given once be given again."""
    backend._warned.clear()
    torch._dynamo.reset()


PARTS = 3  # tests, so that no one takes long


@pytest.mark.parametrize("part", range(PARTS))
@on_ranks(2)
def test_a_mistake_says_what_the_page_quotes(rank: int, part: int, tmp_path: Path) -> None:
    """And what the page tells to do then runs."""
    failed = []
    for number, (message, mistake) in list(enumerate(PROVOKED.items()))[part::PARTS]:
        entry = entries()[message]
        folder = tmp_path / str(number)
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        forget()
        found = said_by(mistake, folder)
        is_said = torch.tensor(
            any(
                entry.kind in kinds and re.search(entry.pattern(), text, re.DOTALL)
                for kinds, text in found
            ),
            dtype=torch.int,
        )
        dist.all_reduce(is_said)  # on one rank is enough, where only that one warns
        if not is_said:
            failed.append(f"{entry.kind}: {message}\n{found}")
            continue
        forget()
        with pytest.MonkeyPatch.context() as patched:
            patched.chdir(folder)
            for remedy in entry.remedies:
                exec(compile(remedy, f"the remedy of {message!r}", "exec"), names())
    assert not failed, "\n\n".join(failed)


def another_call(model: Any) -> None:
    if dist.get_rank() == 0:
        autoshard.full_state_dict(model)
    else:
        autoshard.save_checkpoint("nowhere", model, step=1)


def another_place(model: Any) -> None:
    if dist.get_rank() == 0:
        autoshard.full_state_dict(model)
    else:
        autoshard.shard(Model())


def other_rate(model: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 + dist.get_rank())
    for _ in range(20):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


APART: dict[str, Callable[[Any], None]] = {
    "in ..., rank ... came to": another_call,
    "while others wait elsewhere": another_place,
    "have not done the same": other_rate,
}


@pytest.mark.parametrize("message", APART)
@on_ranks(2)
def test_ranks_that_are_apart(rank: int, message: str) -> None:
    """Messages of ranks that wait for each other: all say so, and can go on."""
    model = autoshard.shard(Model())
    with pytest.raises(RuntimeError, match=entries()[message].pattern()):
        APART[message](model)
