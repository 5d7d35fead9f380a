"""A Python that has imported torch, and autoshard, before it is started.

`python()` gives a program that takes the place of `sys.executable` where a test starts one. What it
is told to run runs in a copy of a process that has imported both, with the environment, the folder,
the files and the network of who asked, and ends as any Python does. Imports take four seconds of a
processor; a copy takes a third of one, most of that at its end.

Not for tests of what happens while torch or autoshard is imported: their variables have been read
before (TORCH_LOGS, PYTHONHASHSEED), and each copy has the same hash seed.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import os
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FIRST = ("torch._inductor.compile_fx", "torch.distributed.launcher", "autoshard.backend")
_VARIABLE = "WARM_PYTHON"
_STARTER = Path(__file__).with_name("start_warm.py")
_C = ctypes.CDLL(None, use_errno=True)
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def python() -> str:
    """Path of the program; `sys.executable` where the system can't wait for such copies."""
    return os.environ.get(_VARIABLE) or start()


def start() -> str:
    """Start the process that makes the copies, for this process and those that it will start.

    It imports what copies have when the first is asked for.
    """
    if not hasattr(os, "pidfd_open"):
        return sys.executable
    folder = tempfile.TemporaryDirectory(prefix="warm")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{folder.name}/socket")
    listener.listen(64)
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}  # nor are copies
    server = subprocess.Popen(
        [sys.executable, "-P", __file__, str(listener.fileno())],
        env={**inherited, **_ENVIRONMENT},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
    )
    listener.close()
    program = Path(folder.name, "python")
    command = [sys.executable, "-IS", str(_STARTER), f"{folder.name}/socket"]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o700)

    def end() -> None:
        server.communicate()  # it ends with its input, and so do copies that are left
        folder.cleanup()

    atexit.register(end)
    os.environ[_VARIABLE] = str(program)
    return str(program)


class Request(NamedTuple):
    """What is to run, as it came from `start_warm.py`."""

    arguments: list[str]
    folder: str
    environment: dict[str, str]
    files: Sequence[int]  # input, output, errors, and the network that the starter is in


class Copy(NamedTuple):
    """A copy of this process, and who waits for its end."""

    pid: int
    end: int  # a file that can be read once it has ended
    starter: socket.socket
    parent: int  # the process that has started the starter


def serve(listener: socket.socket) -> Request:
    """Make a copy for each request until the input ends; return, in a copy, what it is to run.

    A copy gets the signals that its starter gets. If that is gone it is killed, with the copies
    that it has started.
    """
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    copies: dict[int, Copy] = {}  # by each of its two files
    while True:
        file = selector.select()[0][0].fd
        if file == 0:
            for copy in copies.values():
                os.kill(copy.pid, signal.SIGKILL)
            os._exit(0)
        elif file == listener.fileno():
            starter, _ = listener.accept()
            request = _received(starter)
            if request is None:
                starter.close()
                continue
            _import_first()
            pid = os.fork()
            if pid == 0:
                selector.close()
                for each in (listener, starter, *(copy.starter for copy in copies.values())):
                    each.close()
                return request
            for each in request.files:
                os.close(each)
            copy = Copy(pid, os.pidfd_open(pid), starter, _parent_of(starter))
            for each in (copy.end, starter.fileno()):
                copies[each] = copy
                selector.register(each, selectors.EVENT_READ)
        elif file == copies[file].end:
            copy = copies[file]
            code = os.waitstatus_to_exitcode(os.waitpid(copy.pid, 0)[1])
            with contextlib.suppress(OSError):  # it has gone
                copy.starter.sendall(code.to_bytes(4, "big", signed=True))
            for each in (copy.end, copy.starter.fileno()):
                del copies[each]
                if each in selector.get_map():
                    selector.unregister(each)
            os.close(copy.end)
            copy.starter.close()
        else:
            signals = copies[file].starter.recv(16)
            for number in signals:
                os.kill(copies[file].pid, number)
            if not signals:
                selector.unregister(file)
                _kill(copies[file].pid, set(copies.values()))


def _kill(pid: int, copies: set[Copy]) -> None:
    os.kill(pid, signal.SIGKILL)
    for copy in copies:
        if copy.parent == pid:
            _kill(copy.pid, copies)


def _parent_of(starter: socket.socket) -> int:
    """The parent of the process at the other end; 0 if that has gone."""
    pid = int.from_bytes(
        starter.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder
    )
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


@functools.cache
def _import_first() -> None:
    for name in FIRST:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # copies need not look at a million objects, least of all as they end


def _received(starter: socket.socket) -> Request | None:
    """What the starter asks for; None if it ended before it had said so."""
    size, files, *_ = socket.recv_fds(starter, 4, 4)
    text, more = b"", size
    while more and len(text) < int.from_bytes(size, "big"):
        text += (more := starter.recv(1 << 20))
    if not more:
        for file in files:
            os.close(file)
        return None
    folder, num_arguments, *rest = text.decode(errors="surrogateescape").split("\0")
    arguments, settings = rest[: int(num_arguments)], rest[int(num_arguments) :]
    return Request(arguments, folder, dict(each.split("=", 1) for each in settings), files)


def _enter_network(file: int) -> None:
    """Be in the network namespace of `file`, as the starter is."""
    if os.fstat(file).st_ino != os.stat("/proc/self/ns/net").st_ino and _C.setns(file, 0):
        raise OSError(ctypes.get_errno(), "setns failed")


def become(request: Request, other_paths: Sequence[str]) -> Callable[[], Any]:
    """Make this process what the request asks for; return what runs it.

    other_paths: of Python's, which come after those of the environment.
    """
    *files, network = request.files
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    _enter_network(network)
    os.close(network)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    arguments = list(request.arguments)
    is_unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    while arguments[0] in ("-u", "-B"):
        is_unbuffered |= arguments.pop(0) == "-u"
    if is_unbuffered:
        for output in (sys.stdout, sys.stderr):
            assert isinstance(output, io.TextIOWrapper)
            output.reconfigure(write_through=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    what, *more = arguments
    if what == "-c":
        sys.argv, first = ["-c", *more[1:]], ""
        code = compile(more[0], "<string>", "exec")
    elif what == "-m":
        sys.argv, first = ["-m", *more[1:]], os.getcwd()
    else:
        assert not what.startswith("-"), f"no option {what} of Python's is known here"
        sys.argv, first = arguments, str(Path(what).resolve().parent)
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec")
    sys.path[:] = [first, *paths, *other_paths]
    if what == "-m":
        return functools.partial(runpy._run_module_as_main, more[0])  # type: ignore[attr-defined]
    return functools.partial(exec, code, vars(main))


if __name__ == "__main__":
    _itself = sys.modules["__main__"]  # lives on in copies, as what runs is in it
    _num_paths = len(list(filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))))
    _rest = sys.path[_num_paths:]
    become(serve(socket.socket(fileno=int(sys.argv[1]))), _rest)()
