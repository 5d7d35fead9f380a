"""Graph texts are data: no text runs code, and none takes long to refuse."""

from __future__ import annotations

import subprocess

import pytest
from support import warm

from autoshard.passes.ir.sizes import MAX_LENGTH, read_size
from autoshard.passes.ir.text import parse

RUN = "__import__('os').system('touch RAN')"

HOSTILE = {
    "a power of powers": "in %x: f32[9**9**9]",
    "a large power": "in %x: f32[s0**999999999]",
    "a large product": f"in %x: f32[{'*'.join(['9' * 18] * 20)}]",
    "a long integer": f"in %x: f32[{'9' * 100_000}]",
    "a long expression": f"in %x: f32[{'+'.join(['s0'] * 10_000)}]",
    "a product of sums": "in %x: f32[(" + "*".join(["(s0+s1+s2+s3+s4)"] * 8) + ")//7]",
    "a shift": "in %x: f32[1 << 99999999]",
    "a division by zero": "in %x: f32[s0//0]",
    "a call in a size": f"in %x: f32[{RUN}]",
    "a class in a size": "in %x: f32[().__class__.__bases__]",
    "a lambda in a size": "in %x: f32[(lambda: 1)()]",
    "another function of sympy's": "in %x: f32[sympify('1')]",
    "a call in a symbol": f"in %x: sym({RUN})",
    "a call as argument": f"in %x: f32[2]\n%a: f32[2] = aten.mul(%x, {RUN})",
    "a module of torch's": "%a: int = python.torch.utils.collect_env.main()",
    "a method of an object": "%a: object = aten.__class__.mro()",
    "an attribute getter": "%a: object = operator.attrgetter('x')",
    "loading a library": "%a: object = load_library.x('evil.so')",
    "code as a path": """%a: f32[2] = get_attr("x'); import evil; ('")""",
    "code as a name": f"in %a = {RUN}: f32[2]",
    "a keyword as a name": "in %lambda: f32[2]",
    "brackets without end": f"in %x: {'(' * 100_000}",
    "lists without end": f"in %x: f32[2]\n%a: f32[2] = aten.cat({'[' * 100_000})",
    "signs without end": f"in %x: f32[2]\n%a: f32[2] = aten.mul(%x, {'-' * 100_000}1)",
    "names without end": f"%a: f32[2] = aten.mul({'a.' * 100_000}a)",
    "many dims": f"in %x: f32[{','.join(['1'] * 10_000)}]",
    "a size below zero": "in %x: f32[-3]",
    "a size beyond memory": f"in %x: f32[{','.join(['9' * 18] * 3)}]",
    "arguments out of a dict": "%a: f32[2] = aten.mul(**{'x': 1})",
    "a line without end": f"# {'x' * 2_000_000}",
    "a quote without end": "%a: f32[2] = aten.mul('" + "  # " * 100_000,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_is_refused(case: str) -> None:
    with pytest.raises(ValueError, match=r"^line \d: "):
        parse(HOSTILE[case])


def test_at_once_and_nothing_is_run(tmp_path: object) -> None:
    """All of them in a process that ends within the time that all may take; it made no file."""
    program = (
        "import os, sys, time\n"
        "from autoshard.passes.ir.text import parse\n"
        "for text in eval(sys.stdin.read()):\n"
        "    begin = time.process_time()\n"
        "    try:\n"
        "        parse(text)\n"
        "        print('read', text[:60])\n"
        "    except ValueError:\n"
        "        pass\n"
        "    seconds = time.process_time() - begin\n"
        "    if seconds >= 1.0: print(seconds, text[:60])\n"
        "print('files', os.listdir('.'))\n"
    )
    done = subprocess.run(
        [warm.python(), "-c", program],
        input=repr(list(HOSTILE.values())),
        cwd=str(tmp_path),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout == "files []\n"


@pytest.mark.parametrize(
    "text", ["s0**2*s1", "Max(1, s0 - 1)", "-u3 + 7", "((s0 + 3)//4)*4", "Mod(s0, 3)", "12"]
)
def test_sizes_as_torch_prints_them(text: str) -> None:
    assert str(read_size(str(read_size(text)))) == str(read_size(text))


def test_a_size_that_is_too_long_says_so() -> None:
    with pytest.raises(ValueError, match=f"too long: at most {MAX_LENGTH}"):
        read_size("+".join(["s0"] * 1000))
