"""Drill of artefacts: what they depend on is changed, again and again, and must be noticed.

    python benchmarks/artefacts.py [--mutations 200] [--seed 0]

An artefact of a model, for 8 ranks, is made once. Then one thing is another: a constant, a name, an
operator or a default argument in a line of the model, an attribute, a buffer, a parameter, a
method, a hook, an option of sharding, a flag of torch, a version, a byte of a file. Each time the
artefact is loaded for the model, which is called if that went well. It has to raise ArtefactError,
and the error has to name what differs. In the end it is loaded, and called, as it was made.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib
import itertools
import os
import platform
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import autoshard
from autoshard import _torch, plan_cache
from autoshard.artefacts.make import make

MODULE = "drilled_model"
SOURCE = '''\
"""Model of the drill."""

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-5
ACTIVATIONS = {"gelu": functional.gelu, "silu": functional.silu}


@dataclass
class Config:
    width: int = 12
    depth: int = 2
    factor: float = 0.5
    activation: str = "gelu"
    training: bool = False


def scaled(x, factor=2.0, *, shift=3):
    return x * factor + shift


def normed(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()


def tripled(function):
    return lambda x: function(x) / 3 * 3


SLOPES = [1.0, 0.5]
NAMED = {"plain": lambda x: x * 1.0, "other": lambda x: x * 2.0}


class Layer(nn.Module):
    exponent = 2

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.linear = nn.Linear(config.width, config.width)
        self.activation = ACTIVATIONS[config.activation]
        self.offsets = (1, 2)
        self.kinds = {(1, 2)}
        self.powers = [1.0, 2.0]
        self.named = NAMED["plain"]
        self.register_buffer("mask", torch.ones(config.width))

    @property
    def gain(self):
        return 1.5

    def mixed(self, x):
        for slope in SLOPES:
            x = x * slope
        if hasattr(self, "extra") or "DRILLED" in os.environ:
            x = x + 1
        x = self.named(x) * self.gain
        if self.config.factor > 0.25:
            x = x * self.config.factor
        return x + self.offsets[0] - self.offsets[1]

    def forward(self, x):
        hidden = self.activation(self.linear(normed(x)))
        if (1, 2) in self.kinds:
            hidden = hidden + sum(self.powers)
        return self.mixed(scaled(hidden)).pow(self.exponent).clamp(-5, 5) * self.mask + x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(Layer(self.config) for _ in range(self.config.depth))
        self.norm = nn.LayerNorm(self.config.width)
        self.head = nn.Linear(self.config.width, 4)
        self.temperature = 0.7
        self._special = 1.0
        self.hyper_parameters = {"s": 1.0}

    tones = {"low": 1.0}

    def forward(self, x, y, weight=1.0):
        x = x * self._special * self.hyper_parameters["s"] * self.tones["low"] * len(SLOPES)
        if self.config.training:
            x = -x
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)) / self.temperature
        loss = functional.cross_entropy(logits, y, label_smoothing=0.1) * weight
        return {"loss": loss, "logits": logits}


def build():
    return Model()


def batch(rank, step):
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(0, 4, (6,), generator=generator)
    return {"x": torch.randn(6, 12, generator=generator), "y": ids}
'''

Mutation = tuple[str, str, AbstractContextManager[Any]]
"""(what is changed, a word that the error has, a context in which it is)."""


def changed_sources() -> list[tuple[str, str, str]]:
    """List sources with one thing changed in a line that is run: (what, definition, text)."""
    found = []
    tree = ast.parse(SOURCE)
    places = [
        (node, top)
        for top in tree.body
        if isinstance(top, (ast.FunctionDef, ast.ClassDef)) and top.name not in ("build", "batch")
        for node in ast.walk(top)
    ]
    for number, (node, top) in enumerate(places):
        for kind, change in CHANGES.items():
            copy = ast.parse(SOURCE)
            same = [
                each
                for body in copy.body
                if isinstance(body, (ast.FunctionDef, ast.ClassDef))
                and body.name not in ("build", "batch")
                for each in ast.walk(body)
            ][number]
            if change(same):
                text = ast.unparse(ast.fix_missing_locations(copy))
                where = f"line {getattr(node, 'lineno', 0)}"
                word = MODULE if top.name == "tripled" else top.name  # not run, beside lambdas
                found.append((f"{kind} of {top.name}, {where}", word, text))
    return found


def _number(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        node.value = node.value + 1
        return True
    return False


def _operator(node: ast.AST) -> bool:
    swapped = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
    if isinstance(node, ast.BinOp) and type(node.op) in swapped:
        node.op = swapped[type(node.op)]()
        return True
    return False


def _method(node: ast.AST) -> bool:
    others = {"sqrt": "abs", "pow": "mul", "mean": "sum", "clamp": "clip"}
    if isinstance(node, ast.Attribute) and node.attr in others:
        node.attr = others[node.attr]
        return True
    return False


def _default(node: ast.AST) -> bool:
    if isinstance(node, ast.FunctionDef) and node.args.defaults:
        node.args.defaults[-1] = ast.Constant(value=7.0)
        return True
    return False


CHANGES: dict[str, Callable[[ast.AST], bool]] = {
    "a number": _number,
    "an operator": _operator,
    "a method's name": _method,
    "a default argument": _default,
}


class Drill:
    """An artefact in a folder, and what is done to what it depends on."""

    def __init__(self, folder: Path) -> None:
        """Make the artefact. The process becomes rank 0 of 8 that are not there."""
        self.sources, self.artefact = folder / "sources", folder / "artefact"
        self.sources.mkdir()
        sys.path.insert(0, str(self.sources))
        self.write(SOURCE)
        _torch.dist.pretend_ranks(8)
        self.options: dict[str, Any] = {"lowering": "eager"}
        make(self.artefact, self.build(), (), self.batch(), options=self.options)

    def write(self, text: str) -> None:
        """Have the model's module be `text`."""
        (self.sources / f"{MODULE}.py").write_text(text)
        sys.modules.pop(MODULE, None)
        importlib.invalidate_caches()
        shutil.rmtree(self.sources / "__pycache__", ignore_errors=True)
        self.module: Any = importlib.import_module(MODULE)

    def build(self) -> Any:
        """Build the model."""
        torch.manual_seed(0)
        return self.module.build()

    def batch(self) -> dict[str, Any]:
        """Make the batch."""
        batch: dict[str, Any] = self.module.batch(0, 0)
        return batch

    def run(
        self, change: Callable[[Any], None] | None = None, *, is_late: bool = False, **given: Any
    ) -> None:
        """Load the artefact for a new model, and call it, after `change` was made to the model.

        is_late: whether it is made between two calls of the loaded model, not before.
        """
        model = self.build()
        if change is not None and not is_late:
            change(model)
        autoshard.load_compiled(model, self.artefact)
        if change is not None and is_late:
            model(**self.batch())["loss"].backward()
            change(model)
        model(**{**self.batch(), **given})["loss"].backward()

    @contextlib.contextmanager
    def source(self, text: str) -> Iterator[None]:
        """Have another source of the model in this context."""
        self.write(text)
        try:
            yield
        finally:
            self.write(SOURCE)

    @contextlib.contextmanager
    def file(self, name: str, change: Callable[[bytes], bytes | None]) -> Iterator[None]:
        """Have a file of the artefact changed in this context; None: it is gone."""
        path = self.artefact / name
        before = path.read_bytes()
        changed = change(before)
        if changed is None:
            path.unlink()
        else:
            path.write_bytes(changed)
        try:
            yield
        finally:
            path.write_bytes(before)


Case = tuple[str, str, AbstractContextManager[Any], Callable[[Any], None] | None, dict[str, Any]]
"""(what, a word of the error, a context, a change of the model, other arguments)."""


def models(drill: Drill) -> Iterator[Case]:
    """Yield changes of the model, once it is built."""

    def of(what: str, word: str, change: Callable[[Any], None], **given: Any) -> Case:
        return what, word, contextlib.nullcontext(), change, given

    def shard(model: Any, **given: Any) -> None:
        for layer in model.layers:
            autoshard.fully_shard(layer, **given)
        autoshard.fully_shard(model, **given)

    half = autoshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    yield of("an attribute", "temperature", lambda m: setattr(m, "temperature", 0.8))
    yield of("a field of a config", "factor", lambda m: setattr(m.config, "factor", 0.6))
    yield of("a tuple", "offsets", lambda m: setattr(m.layers[1], "offsets", (1, 3)))
    yield of("a function", "activation", lambda m: setattr(m.layers[0], "activation", torch.tanh))
    yield of("a class", "linear", lambda m: setattr(m.layers[0], "linear", nn.Identity()))
    yield of("a size", "head", lambda m: setattr(m, "head", nn.Linear(12, 5)))
    yield of("a bias", "head", lambda m: setattr(m, "head", nn.Linear(12, 4, bias=False)))
    yield of("eps", "eps", lambda m: setattr(m.norm, "eps", 1e-3))
    yield of("a frozen parameter", "head.weight", lambda m: m.head.weight.requires_grad_(False))
    yield of("a dtype", "bfloat16", lambda m: m.bfloat16())
    yield of("a layer's dtype", "head", lambda m: m.head.double())
    yield of(
        "a buffer's dtype", "mask", lambda m: setattr(m.layers[0], "mask", torch.ones(12).half())
    )
    yield of("a buffer's size", "mask", lambda m: setattr(m.layers[0], "mask", torch.ones(1)))
    yield of("one layer less", "'layers'", lambda m: setattr(m, "layers", m.layers[:1]))
    yield of("one layer more", "layers.2", lambda m: m.layers.append(nn.Linear(12, 12)))
    yield of("a hook", "hooks", lambda m: m.head.register_forward_hook(lambda *a: None) and None)
    yield of(
        "a hook before", "hooks", lambda m: m.register_forward_pre_hook(lambda *a: None) and None
    )
    yield of("eval mode", "eval mode", lambda m: m.eval() and None)
    yield of("eval mode of a part", "eval mode", lambda m: m.layers[0].eval() and None)
    yield of("a forward", "forward", lambda m: setattr(m.head, "forward", m.norm.forward))
    yield of("a unit more", "unit", lambda m: autoshard.fully_shard(m.head) and shard(m))
    yield of("half precision", "unit", lambda m: shard(m, mp_policy=half))
    yield of("what stays", "unit", lambda m: shard(m, reshard_after_forward=False))
    yield of(
        "tied parameters", "linear", lambda m: setattr(m.layers[1], "linear", m.layers[0].linear)
    )
    yield of("a size of an argument", "float32 [5, 12]", lambda m: None, x=torch.randn(5, 12))
    yield of("a dtype of one", "float64", lambda m: None, x=torch.randn(6, 12).double())
    yield of(
        "a gradient of one",
        "with a gradient",
        lambda m: None,
        x=torch.randn(6, 12, requires_grad=True),
    )
    yield of("an argument more", "weight", lambda m: None, weight=2.0)

    def other(x: torch.Tensor) -> torch.Tensor:
        return x * 3.0

    yield of("another lambda", "named", lambda m: setattr(m.layers[0], "named", other))
    yield of("a set", "kinds", lambda m: setattr(m.layers[0], "kinds", {(1, 3)}))
    yield of("a list", "powers", lambda m: m.layers[0].powers.append(1.0))
    yield of("an attribute that was missing", "extra", lambda m: setattr(m.layers[1], "extra", 1))
    yield of(
        "a class's constant, hidden", "exponent", lambda m: setattr(m.layers[0], "exponent", 3)
    )
    yield of("a method, hidden", "mixed", lambda m: setattr(m.layers[0], "mixed", other))
    for name, value in itertools.product(("width", "depth"), (1, 3, 4, 9)):
        config = f"    {name}: int = {12 if name == 'width' else 2}\n"
        text = SOURCE.replace(config, f"    {name}: int = {value}\n")
        yield f"{name}={value}", "Config", drill.source(text), None, {}


def late(drill: Drill) -> Iterator[Case]:
    """Yield changes between two calls of a loaded model."""

    def of(what: str, word: str, change: Callable[[Any], Any]) -> Case:
        return f"{what}, late", word, contextlib.nullcontext(), change, {"is_late": True}

    new = nn.Linear(12, 12)
    yield of(
        "a config", "config", lambda m: setattr(m.layers[0], "config", type(m.config)(factor=1.0))
    )
    yield of("a field of it", "factor", lambda m: setattr(m.config, "factor", 0.6))
    yield of("a list", "powers", lambda m: m.layers[0].powers.append(3.0))
    yield of("a list in place of it", "powers", lambda m: setattr(m.layers[0], "powers", [1.0]))
    yield of("a set", "kinds", lambda m: m.layers[0].kinds.clear())
    yield of("a function", "activation", lambda m: setattr(m.layers[0], "activation", torch.tanh))
    yield of("a lambda", "named", lambda m: setattr(m.layers[0], "named", lambda x: x))
    yield of("a method, hidden", "mixed", lambda m: setattr(m.layers[0], "mixed", lambda x: x))
    yield of("a forward, hidden", "forward", lambda m: setattr(m.head, "forward", torch.tanh))
    yield of("a constant", "temperature", lambda m: setattr(m, "temperature", 0.9))
    yield of("of another type", "offsets", lambda m: setattr(m.layers[0], "offsets", (True, 2)))
    yield of(
        "a class's constant, hidden", "exponent", lambda m: setattr(m.layers[0], "exponent", 3)
    )
    yield of("what was missing", "extra", lambda m: setattr(m.layers[1], "extra", 1))
    yield of("a module", "layers.0.linear", lambda m: setattr(m.layers[0], "linear", new))
    yield of("a module less", "layers.1", lambda m: m.layers.__delitem__(1))
    yield of("a parameter", "head.weight", lambda m: m.head._parameters.update(weight=new.weight))
    yield of("one frozen", "head.weight", lambda m: m.head.weight.requires_grad_(False))
    yield of(
        "a buffer's dtype",
        "mask",
        lambda m: m.layers[0]._buffers.update(mask=torch.ones(12).half()),
    )
    yield of("its size", "mask", lambda m: m.layers[0]._buffers.update(mask=torch.ones(1)))
    yield of("its layout", "mask", lambda m: m.layers[0]._buffers.update(mask=torch.ones(24)[::2]))
    yield of("a hook", "hooks", lambda m: m.head.register_forward_hook(print))
    yield of("a constant with such a name", "_special", lambda m: setattr(m, "_special", 2.0))
    yield of("a field with such a name", "training", lambda m: setattr(m.config, "training", True))
    yield of("a dict of the model", "hyper", lambda m: m.hyper_parameters.update(s=2.0))
    yield of("eval mode", "eval mode", lambda m: m.layers[0].eval())

    def patched(name: str, value: Any) -> Callable[[Any], None]:
        """Set an attribute of the model's module, or of a class in it, while it is this one."""

        def change(model: Any) -> None:
            path, _, last = name.rpartition(".")
            setattr(getattr(drill.module, path) if path else drill.module, last, value)

        return change

    again = drill.source

    def tune(model: Any) -> None:
        drill.module.Model.tones["low"] = 2.0

    yield "a dict of a class, late", "tones", again(SOURCE), tune, {"is_late": True}
    for name, value in {
        "EPSILON": 1e-6,
        "SLOPES": [1.0],
        "scaled": lambda x: x,
        "Layer.mixed": lambda self, x: x,
        "Layer.forward": lambda self, x: x,
        "Layer.exponent": 3,
        "Layer.gain": property(lambda self: 7.0),
    }.items():
        word = name.rpartition(".")[2]
        yield f"{name}, late", word, again(SOURCE), patched(name, value), {"is_late": True}


def processes(drill: Drill) -> Iterator[Case]:
    """Yield changes of versions, flags and globals."""

    def of(what: str, word: str, context: AbstractContextManager[Any]) -> Case:
        return what, word, context, None, {}

    @contextlib.contextmanager
    def flag(set_: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
        set_(value)
        try:
            yield
        finally:
            set_(before)

    cuda, patch = torch.backends.cuda, mock.patch.object
    yield of("torch", "torch was", patch(torch, "__version__", "2.0.0"))
    yield of(
        "Python", "python was", patch(platform, "python_version_tuple", lambda: ("3", "9", "0"))
    )
    yield of("autoshard", "autoshard was", patch(plan_cache, "digest_of_sources", lambda: "0"))
    yield of(
        "the default dtype", "float64", flag(torch.set_default_dtype, torch.float64, torch.float32)
    )
    yield of("autocast", "autocast", torch.autocast("cpu", torch.bfloat16))
    yield of("no gradients", "gradients", torch.no_grad())
    yield of("determinism", "deterministic", flag(torch.use_deterministic_algorithms, True, False))
    yield of("precision", "matmul", flag(torch.set_float32_matmul_precision, "high", "highest"))
    yield of("flash attention", "attention", flag(cuda.enable_flash_sdp, False, True))
    yield of("attention", "attention", flag(cuda.enable_mem_efficient_sdp, False, True))
    yield of("plain attention", "attention", flag(cuda.enable_math_sdp, False, True))
    cudnn: Any = torch.backends.cudnn
    yield of("cudnn", "cudnn", flag(lambda on: setattr(cudnn, "benchmark", on), True, False))
    yield of("torch's forward", "forward", patch(nn.LayerNorm, "forward", lambda self, x: x))

    @contextlib.contextmanager
    def in_model(name: str, make_other: Callable[[Any], Any]) -> Iterator[None]:
        """Have another value at `name` in the model's module, as it is then."""
        path, _, last = name.rpartition(".")
        owner = getattr(drill.module, path) if path else drill.module
        with patch(owner, last, make_other(drill.module)):
            yield

    yield of("a global", "EPSILON", in_model("EPSILON", lambda module: 1e-6))
    yield of("a global function", "scaled", in_model("scaled", lambda module: module.normed))
    yield of("a method", "mixed", in_model("Layer.mixed", lambda module: lambda self, x: x))
    yield of("a forward", "forward", in_model("Layer.forward", lambda module: lambda self, x: x))
    yield of("a class's constant", "exponent", in_model("Layer.exponent", lambda module: 3))
    yield of(
        "a property", "gain", in_model("Layer.gain", lambda module: property(lambda self: 7.0))
    )
    yield of("a list", "SLOPES", in_model("SLOPES", lambda module: [*module.SLOPES, 2.0]))
    wrapped = in_model(
        "normed", lambda module: functools.wraps(module.normed)(module.tripled(module.normed))
    )
    yield of("a function in another", "normed", wrapped)
    yield of("the environment", "DRILLED", mock.patch.dict(os.environ, DRILLED="1"))
    handle: list[Any] = []

    @contextlib.contextmanager
    def hooked() -> Iterator[None]:
        """Have a hook on all modules."""
        handle.append(nn.modules.module.register_module_forward_hook(lambda *given: None))
        try:
            yield
        finally:
            handle.pop().remove()

    yield of("a hook of all modules", "hooks", hooked())
    other = in_model("Layer", lambda module: type("Layer", (module.Layer,), {}))
    yield of("a kind of module", "Layer", other)


def files(drill: Drill, random_: random.Random) -> Iterator[Case]:
    """Yield changes of the artefact's files, without end: a bit, the end, the file."""

    def flipped(data: bytes) -> bytes:
        at = random_.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << random_.randrange(8)]) + data[at + 1 :]

    names = sorted(path.name for path in drill.artefact.iterdir())
    for name in names:
        yield f"{name} is gone", name, drill.file(name, lambda data: None), None, {}
        yield f"{name} is short", name, drill.file(name, lambda data: data[:-9]), None, {}
        yield f"{name} is empty", name, drill.file(name, lambda data: b""), None, {}
    while True:
        for name in names:
            yield f"a bit of {name}", name, drill.file(name, flipped), None, {}


def cases(drill: Drill, number: int, seed: int) -> list[Case]:
    """Draw `number` of all changes: all kinds, then lines of the source, then bits."""
    random_ = random.Random(seed)
    sources: list[Case] = [
        (what, word, drill.source(text), None, {}) for what, word, text in changed_sources()
    ]
    random_.shuffle(sources)
    kinds = [*models(drill), *processes(drill), *late(drill)]
    broken = files(drill, random_)
    found = [*kinds, *sources, *itertools.islice(broken, 40)]
    if number < len(found):
        return random_.sample(found, number)
    return [*found, *itertools.islice(broken, number - len(found))]


def run(folder: Path, number: int, seed: int) -> list[str]:
    """Run the drill; return what was not noticed, or not named."""
    drill = Drill(folder)
    drill.run()
    wrong = []
    for what, word, context, change, given in cases(drill, number, seed):
        try:
            with context:
                drill.run(change, **given)
            wrong.append(f"{what}: not noticed")
        except autoshard.ArtefactError as error:
            if word not in str(error):
                wrong.append(f"{what}: {word!r} is not in: {str(error)[:300]}")
        except Exception as error:
            wrong.append(f"{what}: {type(error).__name__}: {str(error)[:300]}")
    drill.run()
    return wrong


def main() -> int:
    """Run the drill; return 1 if something went wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = run(Path(folder), options.mutations, options.seed)
    print(f"{options.mutations} changes: {options.mutations - len(wrong)} noticed and named")
    for each in wrong:
        print(f"  {each}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
