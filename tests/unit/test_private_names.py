"""Private names of torch: those outside of `autoshard/_torch/` are on a short list here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import _torch
from autoshard.tools import sizes

PACKAGE = Path(autoshard.__file__).parent

ALLOWED = {
    # Each with the page that tells users about it.
    "_version": "a tensor's, in torch's notes on autograd: in-place correctness checks",
    "_parameters": "nn.Module's own; a property in its place, or a swap, can be made no other way",
    "_buffers": "nn.Module's own, as _parameters",
    **dict.fromkeys(
        ("_foreach_add_", "_foreach_div", "_foreach_div_", "_foreach_mul_", "_foreach_norm"),
        "in torch's reference: Foreach Functions",
    ),
    # Not of torch.
    "_getframe": "Python's: sys._getframe",
    "_current_frames": "Python's: sys._current_frames",
    "_exit": "Python's: os._exit",
    "_models": "Accelerate's: whether anything is prepared yet, which has no public name",
    "_fields": "Python's: of named tuples",
    "_wrap_overrides": "the user's, as FullyShardedDataParallel's wrap() reads it",
    **dict.fromkeys(
        (
            *("_adjust_missing_and_unexpected_keys", "_keys_to_ignore_on_save"),
            *("_weight_conversions", "_hf_peft_config_loaded", "_get_dtype_plan"),
        ),
        "Hugging Face's: what a model's own from_pretrained and save_pretrained go by",
    ),
    "_no_split_modules": "Hugging Face's, for what places models: layers to be kept in one piece",
}
"""Names that may be read and set everywhere, with the reason."""

TORCHS = (
    *(Tensor, DTensor, DeviceMesh, torch.UntypedStorage, torch.distributed.ProcessGroup),
    *(nn.Module, nn.RNNBase, torch.optim.Optimizer, torch.autograd.Function),
    *(fx.Node, fx.Graph, fx.GraphModule, _torch.ops.OpOverload),
)
"""Classes with private names that the package has, too: on another object they are torch's."""

OURS = "_autoshard_"
"""Beginning of the names that the package puts on objects of torch and of users."""


def files() -> dict[Path, ast.Module]:
    """Parse the files of the package outside of `_torch/`."""
    found = sizes.modules(PACKAGE).items()
    paths = (path for name, path in found if not name.startswith("_torch."))
    return {path: ast.parse(path.read_text()) for path in paths}


def is_private(name: str) -> bool:
    """Tell whether `name` begins with one underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(trees: list[ast.Module]) -> set[str]:
    """Names that the package defines: functions, classes, variables, and attributes of `self`."""
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                found.add(name)
    return found


def names_of_torch() -> set[str]:
    """Private names that torch's objects have."""
    objects = (nn.Module(), torch.ops.aten.add.Tensor)
    found = {name for each in objects for name in vars(each)}
    return found | {name for cls in TORCHS for name in dir(cls)}


def private_names(tree: ast.Module, own: set[str], torchs: set[str]) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each private name that is neither `own` nor allowed."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                for each in names:
                    if any(map(is_private, each.name.split("."))):
                        yield node.lineno, f"import {each.name}"
            case ast.ImportFrom(module=module, names=names):
                if module and module.split(".")[0] != "autoshard":
                    for path in (f"{module}.{each.name}" for each in names):
                        if any(map(is_private, path.split("."))):
                            yield node.lineno, f"from {module} import {path.split('.')[-1]}"
            case ast.Attribute(value=owner, attr=name):
                if is_private(name) and is_foreign(owner, name, own, torchs):
                    yield node.lineno, ast.unparse(node)
            case ast.Call(
                func=ast.Name(id="getattr" | "setattr" | "hasattr" | "delattr"),
                args=[owner, ast.Constant(value=str(name)), *_],
            ):
                if is_private(name) and is_foreign(owner, name, own, torchs):
                    yield node.lineno, ast.unparse(node)


def is_foreign(owner: ast.expr, name: str, own: set[str], torchs: set[str]) -> bool:
    """Tell whether `owner.name` is a private name of something that is not the package's."""
    if name in ALLOWED or name.startswith(OURS):
        return False
    if ast.unparse(owner) in ("self", "cls", "super()"):
        return name not in own
    return name not in own or name in torchs or ast.unparse(owner).split(".")[0] == "torch"


def test_private_names_are_in_their_place() -> None:
    trees = files()
    own, torchs = own_names(list(trees.values())), names_of_torch()
    found = [
        f"{path.resolve().relative_to(PACKAGE.resolve().parent)}:{line}: {text}"
        for path, tree in trees.items()
        for line, text in sorted(private_names(tree, own, torchs))
    ]
    assert not found, "what is private to torch belongs in autoshard/_torch/:\n" + "\n".join(found)


def test_every_exception_is_used() -> None:
    names = {
        name
        for tree in files().values()
        for node in ast.walk(tree)
        for name in (getattr(node, "attr", None), getattr(node, "value", None))
        if isinstance(name, str)
    }
    assert set(ALLOWED) <= names


@pytest.mark.parametrize(
    "text",
    [
        "import torch._dynamo",
        "import torch.utils._pytree as pytree",
        "from torch._dynamo import reset",
        "from torch import _C",
        "from torch.nn.modules.batchnorm import _BatchNorm",
        "torch._dynamo.reset()",
        "torch.utils._pytree.tree_map(f, x)",
        "module._compiled_call_impl",
        "spec._local_tensor",
        "op._schema",
        "self._flat_weights",
        "node._dynamo_source = None",
        "getattr(param, '_post_accumulate_grad_hooks', None)",
    ],
)
def test_a_private_name_is_found(text: str) -> None:
    found = [text for _, text in private_names(ast.parse(text), {"_schema"}, names_of_torch())]
    assert len(found) == 1


@pytest.mark.parametrize(
    "text",
    [
        "from autoshard import _torch",
        "from __future__ import annotations",
        "from autoshard.runtime.eager.step import _open",
        "self._tell(1)",
        "step._tell(1)",
        "tensor._version",
        "_torch.dynamo.traced_code()",
        "module.__dict__",
    ],
)
def test_a_name_of_ours_is_not(text: str) -> None:
    assert not list(private_names(ast.parse(text), {"_tell"}, names_of_torch()))
