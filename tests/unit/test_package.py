"""The installed package: found by Dynamo, complete in a wheel, with a command that runs."""

import ast
import inspect
import os
import subprocess
import sys
import types
import typing
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import on_ranks
from torch import nn

import autoshard
from autoshard.tools.cli import main
from autoshard.tools.parity.compare import parity

ROOT = Path(__file__).resolve().parent.parent.parent


def python(*arguments: str, cwd: Path | None = None, **environment: str) -> str:
    """Output of this interpreter, started anew, outside of torchrun and of the checkout."""
    inherited = {
        k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "PYTHONPATH")
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd or "/",
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_dynamo_lists_the_backend() -> None:
    """Though nothing imported it."""
    script = "import sys, torch; print(torch._dynamo.list_backends())"
    backends, imported = python("-c", f"{script}; print('autoshard' in sys.modules)").splitlines()
    assert "'autoshard'" in backends
    assert imported == "False"


def public(module: types.ModuleType) -> dict[str, Any]:
    """Functions, and methods of classes, that `module` makes public."""
    found: dict[str, Any] = {}
    for name in dir(module):
        value = getattr(module, name)
        if name.startswith("_") or not callable(value):
            continue
        if not inspect.isclass(value):
            found[name] = value
            continue
        for attribute, method in vars(value).items():
            is_public = not attribute.startswith("_") or attribute in ("__init__", "__call__")
            if is_public and inspect.isfunction(inspect.unwrap(method)):
                found[f"{name}.{attribute}"] = inspect.unwrap(method)
    return found


@pytest.mark.parametrize("module", [autoshard, autoshard.wrap], ids=lambda m: m.__name__)
def test_public_names_are_typed(module: types.ModuleType) -> None:
    """A67: with types that resolve at run time too. mypy --strict, of `make lint`, has the rest."""
    functions = public(module)
    assert len(functions) > 5
    for name, function in functions.items():
        function = inspect.unwrap(function)
        hints = typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
        missing = {*parameters, "return"} - {"self", *hints}
        assert not missing, f"{name}: {missing}"


def test_names_that_are_imported_when_asked_for() -> None:
    """The same names for type checkers, which read the imports, and at run time."""
    tree = ast.parse(Path(autoshard.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    read = {
        each.asname: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for each in node.names
    }
    assert read.pop("wrap") == "autoshard"
    assert read == {name: f"autoshard.{place}" for name, place in autoshard._PLACES.items()}
    for name in (*read, "wrap"):
        assert getattr(autoshard, name) is vars(autoshard)[name]
    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = autoshard.no_such_name


def test_every_name_is_imported_by_a_star() -> None:
    script = (
        "from autoshard import *\n"
        "import autoshard\n"
        "print(*(name for name in dir(autoshard) if name[:2] != '__' and name not in globals()))"
    )
    assert python("-c", script).split() == []


BENCH = ("bench", "bench step", "bench calibrate")


@pytest.mark.parametrize(
    "command", ["", "parity", *BENCH, "plan", "trace", "golden", "doctor", "opt"]
)
def test_help_without_torch(command: str) -> None:
    """What is typed to learn what to type answers at once: torch alone takes seconds."""
    script = (
        "import sys\n"
        "from autoshard.tools.cli import main\n"
        "try:\n"
        f"    main([*{command.split()!r}, '--help'])\n"
        "except SystemExit:\n"
        "    print('torch' in sys.modules)\n"
    )
    *shown, has_torch = python("-c", script).splitlines()
    assert shown[0].startswith(f"usage: autoshard {command}".rstrip())
    assert has_torch == "False"


STEP = """
import autoshard, torch
assert autoshard.__file__.startswith({folder!r}), autoshard.__file__
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
call = torch.compile(model, backend="autoshard", options={{"lowering": "eager", "strict": True}})
call(torch.ones(2, 3)).sum().backward()
assert all(p.grad is not None for p in model.parameters())
"""


def test_wheel_works_outside_the_checkout(tmp_path: Path) -> None:
    source = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(source)], check=True)
    python("-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("autoshard-*.whl")
    folder = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(folder)
    for expected in (
        "passes/ir/ops.py",
        "runtime/eager/step.py",
        "tools/plan/command.py",
        "py.typed",
    ):
        assert f"autoshard/{expected}" in names
    python("-c", STEP.format(folder=str(folder)), PYTHONPATH=str(folder))


MODEL = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 3))

def batch(rank, step):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "my_model.py").write_text(MODEL)
    return tmp_path


def test_parity_command(model_file: Path) -> None:
    printed = python(
        *("-m", "autoshard.tools.cli", "parity", "my_model:build"),
        *("--batch", "my_model:batch", "--steps", "2"),
        cwd=model_file,
    )
    assert printed.splitlines()[-1] == (
        "parity: eager = replicated bitwise; compiled = eager bitwise; "
        "compiled = replicated bitwise; 2 steps, lowering eager"
    )


@on_ranks(2)
def test_parity_names_what_differs(rank: int) -> None:
    builds = iter(range(3))

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
        with torch.no_grad():
            model[2].bias[2] += next(builds)  # its last row: rank 1's
        return model

    batches = [torch.randn(4, 5, generator=torch.Generator().manual_seed(rank)) for _ in range(2)]
    report = parity(build, batches)
    assert not report.ok
    assert "eager = replicated DIFFERS" in report.text()
    assert "after step 0" in report.text()
    assert "first in 2.bias on rank 1" in report.text() or "first in 0." in report.text()


def test_parity_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["parity", "my_model:build"])
    assert "a model and --batch are required, or --matrix" in capsys.readouterr().err


def test_calibrate_command_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "calibrate", "--out", "here.json", "--model", "my_model:build"])
    assert "--model needs --batch" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "calibrate", "--out", "here.json", "--loss", "my_model:loss"])
    assert "--loss needs --model" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["parity", "plan", "bench calibrate"])
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])
    assert "example" in capsys.readouterr().out
