"""Sizes in a graph's text: integers, and expressions such as `s0 + 2*((s1//3))`.

A text may come from anywhere, so it is data: this reads a small grammar, runs nothing that the text
says, and refuses what would take long to simplify.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from typing import Any

import sympy

from autoshard import _torch

MAX_LENGTH = 400
"""Characters of an expression."""

MAX_TERMS = 64
"""Terms that an expression may have when it is multiplied out, as simplifying a quotient does."""

MAX_EXPONENT = 8

_SYMBOL = re.compile(r"[su]\d{1,9}")
_FUNCTIONS: dict[str, Callable[..., sympy.Expr]] = {
    "Max": _torch.fx.size_functions.Max,
    "Min": _torch.fx.size_functions.Min,
    "max": _torch.fx.size_functions.Max,
    "min": _torch.fx.size_functions.Min,
    "FloorDiv": _torch.fx.size_functions.FloorDiv,
    "CeilDiv": _torch.fx.size_functions.CeilDiv,
    "CleanDiv": _torch.fx.size_functions.CleanDiv,
    "Mod": _torch.fx.size_functions.Mod,
    "PythonMod": _torch.fx.size_functions.PythonMod,
    "ModularIndexing": _torch.fx.size_functions.ModularIndexing,
}


def read_size(text: str) -> sympy.Expr:
    """Read the size that `text` stands for, an integer or an expression.

    Symbols are `s0`, positive, and `u0`, known only at run time. There are `+`, `-`, `*`, `//`,
    `%`, `**` with an exponent from 1 to `MAX_EXPONENT`, `Max`, `Min`, and torch's divisions, by
    name.

    Raises ValueError for anything else, and for a text that is too long, has an integer beyond 64
    bits, or has too many terms.

    >>> read_size("2*s0 + Max(1, s1//3)")
    2*s0 + Max(1, (s1//3))
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"a size of {len(text)} characters is too long: at most {MAX_LENGTH}")
    try:
        expression, _ = _build(ast.parse(text, mode="eval").body)
    except (SyntaxError, TypeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text!r} is no size: {error}") from error
    except ValueError as error:
        raise ValueError(f"{text!r} is no size: {error}") from error
    return expression


def _build(node: ast.expr) -> tuple[sympy.Expr, int]:
    """Build the expression of `node`. Returns it, and the most terms it has when multiplied out.

    What a function or a quotient gives counts as one term. Raises ValueError for what `read_size`
    does not accept; other errors of sympy, and of functions that take other arguments, are passed
    on.
    """
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return _in_range(sympy.Integer(value)), 1
        case ast.Name(id=name) if _SYMBOL.fullmatch(name):
            known: dict[str, Any] = {"integer": True, "positive": True}
            return sympy.Symbol(name, **(known if name[0] == "s" else {"integer": True})), 1
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value, terms = _build(operand)
            return -value, terms
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int(exponent))):
            if not 0 < exponent <= MAX_EXPONENT:
                raise ValueError(f"an exponent should be from 1 to {MAX_EXPONENT}, not {exponent}")
            value, terms = _build(base)
            return _in_range(value**exponent), _limited(terms**exponent)
        case ast.BinOp(left=left, op=op, right=right):
            (one, terms), (other, more) = _build(left), _build(right)
            return _operate(op, one, other, terms, more)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            built = [_build(arg) for arg in args]
            _limited(sum(terms for _, terms in built))
            return _FUNCTIONS[name](*(value for value, _ in built)), 1
    raise ValueError("expected integers, symbols such as s0, + - * // %, Max and Min")


def _operate(
    op: ast.operator, one: sympy.Expr, other: sympy.Expr, terms: int, more: int
) -> tuple[sympy.Expr, int]:
    """Apply `op` to `one`, which has `terms` terms, and `other`, which has `more`; see `_build`.

    Raises ValueError for another operator than `+ - * // %`, too many terms, or too large an
    integer.
    """
    match op:
        case ast.Add():
            return _in_range(one + other), _limited(terms + more)
        case ast.Sub():
            return _in_range(one - other), _limited(terms + more)
        case ast.Mult():
            return _in_range(one * other), _limited(terms * more)
        case ast.FloorDiv():
            return _torch.fx.size_functions.FloorDiv(one, other), 1
        case ast.Mod():
            return _torch.fx.size_functions.Mod(one, other), 1
    raise ValueError("expected one of + - * // %")


def _limited(terms: int) -> int:
    """Return `terms`. Raises ValueError if it is more than `MAX_TERMS`."""
    if terms > MAX_TERMS:
        raise ValueError(f"it has {terms} terms when it is multiplied out: at most {MAX_TERMS}")
    return terms


def _in_range(value: sympy.Expr) -> sympy.Expr:
    """Return `value`. Raises ValueError if it is an integer that does not fit 64 bits."""
    if value.is_Integer and abs(int(value)) >= 1 << 63:
        raise ValueError("an integer should fit 64 bits")
    return value
