"""Graphs as text and back: the readable form that golden files, dumps and tools use.

    %addmm: f32[4,16] = aten.addmm(%whole_b, %x, %t)  # layers.0.b

Names are FX node names, so inserting a node changes one line. `parse(render(g))` is
`g` again: the same ops, arguments, order, dtypes and shapes, symbolic sizes included.
With `axes`, process groups print as the mesh axis they run over: c10d's names are counters.
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
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from autoshard import _torch
from autoshard.passes.ir.layout import DTYPE_NAMES, DTYPES
from autoshard.passes.ir.meta import SOURCE
from autoshard.passes.ir.sizes import read_size

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
    """Render `graph` as text, one node a line.

    axes: process group name -> mesh axis, which is printed in place of the name.
    """
    return "".join(f"{_show_node(node, axes or {})}\n" for node in graph.nodes)


def parse(text: str) -> fx.Graph:
    """Read a graph from text that `render` has written. A text is data: nothing it names is run.

    Nodes get fake tensors, or other examples of their type, as `meta["val"]`, and comments as
    SOURCE. Each symbol in sizes gets a hint of its own, above 1000, but those known only at run
    time ("u0") get none. The graph is neither linted nor verified.
    Raises ValueError, naming the line that can't be read.
    """
    reader = _Reader()
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.read_line(line)
        except _UNREADABLE as error:
            shown = line if len(line) <= 200 else f"{line[:200]}..."
            raise ValueError(f"line {number}: {shown!r}: {error}") from error
    return reader.graph


_UNREADABLE = (
    *(SyntaxError, LookupError, AttributeError, TypeError, ValueError),
    *(ArithmeticError, RuntimeError, MemoryError),  # of what is too deep, or too large
)


def _show_node(node: fx.Node, axes: Mapping[str, str]) -> str:
    """Format a node as one line: "%t: f32[8,7] = aten.t(%w)  # l.w", the comment being its SOURCE.

    An input begins with "in "; the output is "return ...", without a type.
    """
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
    """Format an argument of a node; a process group's name as its axis.

    Such a name is a string, or a string's last word. Tuples are shown as lists.
    """
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
    """Format what a node calls: "aten.mm", "getitem", "hop.cond", "python.torch.sym_max"."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, _torch.ops.OpOverload):
        name = _torch.ops.schema_of(target).name.replace("::", ".")
        overload = _torch.ops.overload_of(target)
        return name if overload == "default" else f"{name}.{overload}"
    if isinstance(target, _torch.ops.HigherOrderOperator):
        return f"hop.{target.name()}"
    if getattr(target, "__module__", "") == "_operator":
        return f"operator.{target.__name__}"
    return f"python.{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def _show_type(value: Any) -> str:
    """Format the type of a node's result: "f32[7]@cuda", "(f32[7], i64[1])", "sym(s0)", "int".

    No device is shown for cpu and meta. What is no tensor, number, list or None is "object". Raises
    KeyError for a dtype that `DTYPE_NAMES` lacks.
    """
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
    """Reader that builds a graph from lines; symbolic sizes share one shape environment."""

    def __init__(self) -> None:
        """Begin an empty graph, and a fake tensor mode for its tensors."""
        self.graph = fx.Graph()
        self._nodes: dict[str, fx.Node] = {}
        self._shapes = ShapeEnv()
        self._fake = _torch.tensors.FakeTensorMode(shape_env=self._shapes)
        self._sizes: dict[str, Any] = {}

    def read_line(self, line: str) -> None:
        """Add the node that `line` describes: an input, an attribute, a call, or the output.

        It gets an example of its type as `meta["val"]`, and the line's comment, if any, as SOURCE;
        the output gets neither. Raises ValueError for a line that is too long, and for a name that
        is taken; may raise anything in `_UNREADABLE`.
        """
        if len(line) > _MAX_LINE:
            raise ValueError(f"a line of {len(line)} characters is too long: at most {_MAX_LINE}")
        line, source = _split_comment(line)
        if line.startswith("return "):
            self.graph.output(self._value(line.removeprefix("return ")))
            return
        head, _, body = line.removeprefix("in ").partition(" = ")
        name, _, type_text = head.removeprefix("%").partition(": ")
        if line.startswith("in "):
            # By its name: `placeholder()` would make a name of it, in small letters.
            node = self.graph.create_node("placeholder", name, name=name)
        elif body.startswith("get_attr("):
            path = ast.literal_eval(body[9:-1])
            if not isinstance(path, str) or not _PATH.fullmatch(path):
                raise ValueError(f"{path!r} is no attribute's path")
            node = self.graph.create_node("get_attr", path, name=name)
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
        """Build the argument that `text` shows; `%name` stands for a node that was read before."""
        text = _NODE.sub(lambda match: match[1] or f"p__{match[2]}", text)
        return self._build(ast.parse(text, mode="eval").body)

    def _build(self, node: ast.expr) -> Any:
        """Build the argument that `node` stands for: a graph's node, a literal, a list, ...

        A call of `_call` stands for a pair: a tuple of its arguments, and a dict of those with a
        name.
        Raises KeyError for a name that is unknown, ValueError for other expressions; nothing is
        run.
        """
        match node:
            case ast.Call(func=ast.Name(id="slice"), args=args):
                return slice(*map(self._build, args))
            case ast.Call(func=ast.Name(id="device"), args=[ast.Constant(value=str(where))]):
                return torch.device(where)
            case ast.Call(func=ast.Name(id="_call"), args=args, keywords=keywords):
                if any(keyword.arg is None for keyword in keywords):
                    raise ValueError("an argument should be a value, or a name and a value")
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

    def _type(self, text: str, depth: int = 0) -> Any:
        """Make an example of the type that `text` names: a fake tensor, a list, a symbol, 0, ...

        Raises ValueError for another text, one that is nested too deep, and too many dims; KeyError
        for another dtype. What torch raises is passed on.

        depth: of the tuple that it is in.
        """
        if text.startswith("("):
            if depth == _MAX_DEPTH:
                raise ValueError(f"a type is nested deeper than {_MAX_DEPTH}")
            return [self._type(part, depth + 1) for part in _split(text[1:-1])]
        if text.startswith("sym("):
            return self._size(text[4:-1])
        if match := re.fullmatch(r"(\w+)\[(.*)\](?:@(\w+))?", text):
            sizes = [self._size(size) for size in _split(match[2])]
            if len(sizes) > _MAX_DIMS:
                raise ValueError(f"{len(sizes)} dims are too many: at most {_MAX_DIMS}")
            with self._fake, self._shapes.suppress_guards():
                return torch.empty(sizes, dtype=DTYPES[match[1]], device=match[3] or "cpu")
        values = {"NoneType": None, "bool": False, "int": 0, "float": 0.0, _OPAQUE: object()}
        if text not in values:
            raise ValueError(f"{text!r} is no type; one looks like f32[7,15]")
        return values[text]

    def _size(self, text: str) -> Any:
        """Make the integer, or symbolic integer, that `text` stands for.

        One text gives one symbolic integer, whose new symbols are declared. Raises ValueError as
        `read_size` does.
        """
        if text.lstrip("-").isdigit():
            return int(text)
        if text not in self._sizes:
            expression = read_size(text)
            for symbol in expression.free_symbols - self._shapes.var_to_range.keys():
                self._declare(symbol)
            self._sizes[text] = self._shapes.create_symintnode(expression, hint=None)
        return self._sizes[text]

    def _declare(self, symbol: sympy.Symbol) -> None:
        """Declare a symbol that the shape environment has not made itself.

        It gets a range, from 2 up, and a hint that no other symbol has. One that is unbacked ("u0")
        is a size from 0 up, and gets no hint.
        """
        if symbol.name.startswith("u"):
            self._shapes.var_to_range[symbol] = _torch.fx.ValueRanges(0, _torch.fx.int_oo)
            self._shapes.size_like.add(symbol)
            return
        self._shapes.var_to_range[symbol] = _torch.fx.ValueRanges(2, _torch.fx.int_oo)
        self._shapes.add_backed_var_to_val(symbol, _FIRST_HINT + len(self._shapes.var_to_range))


_FUNCTIONS = {  # that FX graphs call by themselves, on symbolic sizes
    "math": ("ceil", "floor", "trunc", "sqrt"),
    "torch": (
        "sym_float",
        "sym_int",
        "sym_ite",
        "sym_max",
        "sym_min",
        "sym_not",
        "sym_sum",
        "_sym_sqrt",
    ),
    "operator": (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs"),
        *("eq", "ne", "lt", "le", "gt", "ge", "and_", "or_", "xor", "invert", "not_", "is_"),
        *("lshift", "rshift"),
    ),
}
_MAX_LINE = 1 << 20  # characters
_MAX_DIMS = 64
_MAX_DEPTH = 16  # of tuples in a type
_PATH = re.compile(r"[^\W\d]\w*(\.\w+)*")  # of an attribute: FX writes it into code
_FIRST_HINT = 1 << 10  # of a symbol's value: none is 0 or 1, and no two are equal
_STRING = r"'(?:[^'\\]|\\.)*'" + "|" + r'"(?:[^"\\]|\\.)*"'
_LINE = re.compile(rf"((?:{_STRING}|[^'\"])*?)(?:  # (.*))?")
_NODE = re.compile(rf"({_STRING})|%(\w+)")


def _split_comment(line: str) -> tuple[str, str]:
    """Split a line into what is before its trailing comment, and the comment, "" if there is none.

    A comment begins with two spaces and a `#`; one inside a string argument starts none.
    """
    match = _LINE.fullmatch(line)
    return (match[1], match[2] or "") if match else (line, "")


def _split(text: str) -> list[str]:
    """Split `text` at commas outside brackets; strip the parts, and drop an empty last one."""
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += (char in "([") - (char in ")]")
        if char == "," and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    last = text[start:].strip()
    return [*parts, last] if last else parts


def _read_op(text: str) -> Any:
    """Look up the operator, or function of sizes, that `text` names.

    Raises ValueError for a function that is not in `_FUNCTIONS`, and for what is no operator,
    AttributeError for an operator that torch does not have.
    """
    if text == "getitem":
        return operator.getitem
    namespace, _, rest = text.partition(".")
    if namespace in ("python", "operator"):
        module, _, name = (rest if namespace == "python" else text).rpartition(".")
        if name not in _FUNCTIONS.get(module, ()):
            raise ValueError(f"{text!r} is no function of sizes")
        return getattr(importlib.import_module(module), name)
    if namespace == "hop":
        found = getattr(torch.ops.higher_order, rest)
    else:
        name, _, overload = rest.partition(".")
        found = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")
    if not isinstance(found, (_torch.ops.OpOverload, _torch.ops.HigherOrderOperator)):
        raise ValueError(f"{text!r} is no operator")
    return found
