"""Copies of a Python that has imported torch begin and end as one that is started does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import warm

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open")

FACTS = """
import os, sys
print(sys.argv, sys.path[:2], os.getcwd(), __name__, os.environ["WHICH"], input())
print("torch" in sys.modules, file=sys.stderr)
"""
ENDS = {
    "its own end": "import atexit; atexit.register(print, 'over'); print('end')",
    "a status": "print('text', end=''); raise SystemExit(3)",
    "an error": "import sys; sys.excepthook = lambda *error: print(error[:2]); 1 / 0",
    "no end of Python's": "import os; print('lost'); os._exit(4)",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}


def ended(python: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, *arguments],
        env={**os.environ, "WHICH": "one", "PYTHONPATH": "/nowhere", "PYTHONUNBUFFERED": ""},
        cwd=folder,
        input="asked\n",
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("how", ["-c", "-m", "a file"])
def test_what_it_is_told_to_run(how: str, tmp_path: Path) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    what = {"-c": ["-c", FACTS], "-m": ["-m", "facts"], "a file": ["facts.py"]}[how]
    copy, real = (
        ended(python, "-u", *what, "more", folder=tmp_path)
        for python in (warm.python(), sys.executable)
    )
    assert copy.stdout == real.stdout
    assert (copy.returncode, real.returncode) == (0, 0)
    first = [each.stderr.splitlines()[0] for each in (copy, real)]  # a Triton may tell of leaks
    assert first == ["True", "False"]


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS.keys())
def test_how_it_ends(code: str, tmp_path: Path) -> None:
    copy, real = (
        ended(python, "-c", code, folder=tmp_path) for python in (warm.python(), sys.executable)
    )
    assert (copy.stdout, copy.returncode) == (real.stdout, real.returncode)


def test_a_signal_is_handed_on(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(5)); "
        "print('begun', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([warm.python(), "-c", code], stdout=subprocess.PIPE, text=True) as copy:
        assert copy.stdout is not None
        assert copy.stdout.readline() == "begun\n"
        copy.terminate()
        assert copy.wait(60) == 5


def test_what_is_killed_leaves_no_copies(tmp_path: Path) -> None:
    """Neither its own nor that of another one that it has started."""
    code = (
        "import os, subprocess, sys, time; open(str(os.getpid()), 'w').close(); "
        "more = sys.argv[1:] and subprocess.Popen(sys.argv[1:]); time.sleep(600)"
    )
    command = [warm.python(), "-c", code]
    started = subprocess.Popen([*command, *command], cwd=tmp_path)
    until(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    started.kill()
    started.wait()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_server_that_ends(tmp_path: Path) -> None:
    """Who asked it does not take that for success."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        command = [sys.executable, "-IS", str(warm._STARTER), str(tmp_path / "socket"), "-c", ""]
        asked = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        server, _ = listener.accept()
        request = warm._received(server)
        assert request is not None
        for file in request.files:
            os.close(file)
        server.close()
        _, said = asked.communicate(timeout=30)
    assert asked.returncode == 1
    assert "has ended" in said
