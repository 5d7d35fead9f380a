"""Graph <-> text: the one readable form, used by goldens, dumps and tools.

    %addmm: f32[4,16] = aten.addmm(%whole_b, %x, %t)  # layers.0.b

Names are FX node names, so inserting a node changes one line. `parse(render(g))` is
`g` again: the same ops, arguments, order, dtypes and shapes, symbolic sizes included.
Process groups print as the mesh axis they run over: c10d's names are counters.
"""

from __future__ import annotations

import ast
import importlib
import operator
import re
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from autoshard.passes.layout import DTYPE_NAMES, DTYPES
from autoshard.passes.meta import SOURCE

_CONSTANTS: dict[str, object] = {
    **{str(dtype): dtype for dtype in DTYPES.values()},
    **{
        str(value): value
        for value in (
            torch.strided,
            torch.contiguous_format,
            torch.preserve_format,
            torch.channels_last,
            torch.channels_last_3d,
        )
    },
    "inf": float("inf"),
    "nan": float("nan"),
}
_OPAQUE = "object"  # a value that is no tensor, number or symbol: a mesh, a generator


def render(graph: fx.Graph, *, axes: Mapping[str, str] | None = None) -> str:
    """`graph` as text, one node a line.

    axes: process group name -> mesh axis, to print the latter.
    """
    return "".join(f"{_show_node(node, axes or {})}\n" for node in graph.nodes)


def parse(text: str) -> fx.Graph:
    """Inverse of `render`. Raises ValueError naming the line that it can't read."""
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.read_line(line)
        except (SyntaxError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"line {number}: {line!r}: {error}") from error
    return reader.graph


def _show_node(node: fx.Node, axes: Mapping[str, str]) -> str:
    if node.op == "output":
        return f"return {_show(node.args[0], axes)}"
    head = f"%{node.name}: {_show_type(node.meta.get('val'))}"
    if node.op == "placeholder":
        line = f"in {head}"
    elif node.op == "get_attr":
        line = f"{head} = get_attr({node.target!r})"
    else:
        arguments = [_show(arg, axes) for arg in node.args]
        arguments += [f"{name}={_show(value, axes)}" for name, value in node.kwargs.items()]
        line = f"{head} = {_show_op(node.target)}({', '.join(arguments)})"
    source = SOURCE.get(node)
    return f"{line}  # {source}" if source else line


def _show(arg: object, axes: Mapping[str, str]) -> str:
    if isinstance(arg, fx.Node):
        return f"%{arg.name}"
    if isinstance(arg, (list, tuple)):
        return f"[{', '.join(_show(each, axes) for each in arg)}]"
    if isinstance(arg, slice):
        return f"slice({', '.join(_show(v, axes) for v in (arg.start, arg.stop, arg.step))})"
    if isinstance(arg, torch.device):
        return f"device({str(arg)!r})"
    if isinstance(arg, (torch.dtype, torch.layout, torch.memory_format)):
        return str(arg)
    if isinstance(arg, str):
        head, space, group = arg.rpartition(" ")  # "bf16[7]->f32 0", of a reduce to come
        return repr(axes.get(arg, f"{head}{space}{axes.get(group, group)}"))
    return repr(arg)


def _show_op(target: Any) -> str:
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, torch._ops.OpOverload):
        name = target._schema.name.replace("::", ".")
        overload = target._overloadname
        return name if overload == "default" else f"{name}.{overload}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"hop.{target.name()}"
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{target.__name__}"
    return f"python.{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _show_type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type in ("cpu", "meta") else f"@{value.device.type}"
        return f"{DTYPE_NAMES[value.dtype]}[{','.join(map(str, value.shape))}]{where}"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_show_type, value))})"
    if isinstance(value, torch.SymInt):
        return f"sym({value})"
    if value is None or isinstance(value, (bool, int, float)):
        return type(value).__name__
    return _OPAQUE


class _Reader:
    """Builds a graph from lines; sizes that are symbols share one shape environment."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._shapes = ShapeEnv()
        self._fake = FakeTensorMode(shape_env=self._shapes)
        self._sizes: dict[str, Any] = {}

    def read_line(self, line: str) -> None:
        line, source = _split_comment(line)
        if line.startswith("return "):
            self.graph.output(self._value(line.removeprefix("return ")))
            return
        head, _, body = line.removeprefix("in ").partition(" = ")
        name, _, type_text = head.removeprefix("%").partition(": ")
        if line.startswith("in "):
            node = self.graph.placeholder(name)
        elif body.startswith("get_attr("):
            node = self.graph.create_node("get_attr", ast.literal_eval(body[9:-1]), name=name)
        else:
            op, _, rest = body.partition("(")
            args, kwargs = self._value(f"_call({rest}")
            node = self.graph.create_node("call_function", _read_op(op), args, kwargs, name=name)
        if node.name != name:
            raise ValueError(f"the name {name!r} is taken")
        node.meta["val"] = self._type(type_text)
        if source:
            SOURCE.set(node, source)
        self._nodes[name] = node

    def _value(self, text: str) -> Any:
        text = _NODE.sub(lambda match: match[1] or f"p__{match[2]}", text)
        return self._build(ast.parse(text, mode="eval").body)

    def _build(self, node: ast.expr) -> Any:
        match node:
            case ast.Call(func=ast.Name(id="slice"), args=args):
                return slice(*map(self._build, args))
            case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=str(where))]):
                return torch.device(where)
            case ast.Call(func=ast.Name(id="_call"), args=args, keywords=keywords):
                named = {str(keyword.arg): self._build(keyword.value) for keyword in keywords}
                return tuple(map(self._build, args)), named
            case ast.Name(id=name) if name.startswith("p__"):
                return self._nodes[name.removeprefix("p__")]
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id="inf")):
                return float("-inf")
            case ast.Name() | ast.Attribute():
                return _CONSTANTS[ast.unparse(node)]
            case ast.List(elts=elements):
                return [self._build(element) for element in elements]
        return ast.literal_eval(node)

    def _type(self, text: str) -> Any:
        if text.startswith("("):
            return [self._type(part) for part in _split(text[1:-1])]
        if text.startswith("sym("):
            return self._size(text[4:-1])
        if match := re.fullmatch(r"(\w+)\[(.*)\](?:@(\w+))?", text):
            sizes = [self._size(size) for size in _split(match[2])]
            with self._fake, self._shapes.suppress_guards():
                return torch.empty(sizes, dtype=DTYPES[match[1]], device=match[3] or "cpu")
        values = {"NoneType": None, "bool": False, "int": 0, "float": 0.0, _OPAQUE: object()}
        if text not in values:
            raise ValueError(f"{text!r} is no type; one looks like f32[7,15]")
        return values[text]

    def _size(self, text: str) -> Any:
        if text.lstrip("-").isdigit():
            return int(text)
        if text not in self._sizes:
            expression = _read_expression(text)
            for symbol in expression.free_symbols - self._shapes.var_to_range.keys():
                self._declare(symbol)
            self._sizes[text] = self._shapes.create_symintnode(expression, hint=None)
        return self._sizes[text]

    def _declare(self, symbol: sympy.Symbol) -> None:
        """What the shape environment must know of a symbol that it has not made itself."""
        if symbol.name.startswith("u"):
            self._shapes.var_to_range[symbol] = ValueRanges(0, int_oo)
            self._shapes.size_like.add(symbol)
            return
        self._shapes.var_to_range[symbol] = ValueRanges(2, int_oo)
        self._shapes.add_backed_var_to_val(symbol, _FIRST_HINT + len(self._shapes.var_to_range))


_MODULES = ("torch", "math")  # whose functions FX graphs call by themselves
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop, ast.Call)
_FIRST_HINT = 1 << 10  # of a symbol's value: none is 0 or 1, and no two are equal
_STRING = r"'(?:[^'\\]|\\.)*'" + "|" + r'"(?:[^"\\]|\\.)*"'
_LINE = re.compile(rf"((?:{_STRING}|[^'\"])*?)(?:  # (.*))?")
_NODE = re.compile(rf"({_STRING})|%(\w+)")


def _read_expression(text: str) -> sympy.Expr:
    """A size such as `s0 + 2*((s1//3))`: Python's `//` is torch's FloorDiv, not sympy's floor."""
    tree = ast.fix_missing_locations(_FloorDivs().visit(ast.parse(text, mode="eval")))
    for node in ast.walk(tree):
        if not isinstance(node, (*_ARITHMETIC, ast.Name, ast.Constant, ast.expr_context)):
            raise ValueError(f"{text!r} is no size")
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    symbols = {
        name: sympy.Symbol(name, integer=True, **({} if name[0] == "u" else {"positive": True}))
        for name in names
        if re.fullmatch(r"[su]\d+", name)
    }
    known = {name: getattr(functions, name) for name in names - symbols.keys()}
    return sympy.sympify(eval(compile(tree, text, "eval"), {"__builtins__": {}}, known | symbols))


class _FloorDivs(ast.NodeTransformer):
    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        if not isinstance(node.op, ast.FloorDiv):
            return node
        return ast.Call(ast.Name("FloorDiv", ast.Load()), [node.left, node.right], [])


def _split_comment(line: str) -> tuple[str, str]:
    """A line and its trailing comment; a `#` inside a string argument starts none."""
    match = _LINE.fullmatch(line)
    return (match[1], match[2] or "") if match else (line, "")


def _split(text: str) -> list[str]:
    """Split at the commas that are in no bracket."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _read_op(text: str) -> Any:
    if text == "getitem":
        return operator.getitem
    namespace, _, rest = text.partition(".")
    if namespace == "hop":
        return getattr(torch.ops.higher_order, rest)
    if namespace == "operator":
        return getattr(operator, rest)
    if namespace == "python":
        module, _, name = rest.rpartition(".")
        if module.partition(".")[0] not in _MODULES:
            raise ValueError(f"{text!r} is no function of {' or '.join(_MODULES)}")
        return getattr(importlib.import_module(module), name)
    name, *overload = rest.split(".")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload[0] if overload else "default")
