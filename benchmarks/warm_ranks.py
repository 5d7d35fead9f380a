"""Ranks that begin at once: forks of a process that has imported torch, which takes 5 s of CPU.

    torchrun's agent --starts--> this file  ...asks...  server --forks--> keeper --forks--> rank

What the agent starts asks the server for a rank, gives it its environment, and stands for it: it
passes SIGTERM on, and ends as the rank does, by the same signal or with its status.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

LIMIT_S = 120  # for the server to begin
PAUSE_S = 0.02


@contextlib.contextmanager
def serving(program: Sequence[str]) -> Iterator[list[str]]:
    """Run `program` as a server; give the command line that an agent starts a rank by.

    program: command line that calls `serve` with its last argument, which is added here.
    Words that are added to it are the rank's arguments. At the end the server ends; its ranks, if
    there are any, end with what the agent started.
    """
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "ranks")
        process = subprocess.Popen([*program, address], stdin=subprocess.PIPE)
        try:
            yield [sys.executable, "-S", __file__, address]
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


def serve(address: str, rank: Callable[[list[str]], None]) -> None:
    """Fork a process for each that asks at `address`, which calls `rank`; end with stdin.

    rank: is given the arguments, once the environment is that of who asked.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are nobody's concern
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            connection = listener.accept()[0]
            with connection:
                if os.fork():
                    continue
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                text = connection.recv(1 << 20)
                pid = os.fork()
                if pid:
                    _keep(connection, pid)
                    os._exit(0)
            environment, arguments = json.loads(text)
            os.environ.clear()
            os.environ.update(environment)
            rank(arguments)
            return


def _keep(connection: socket.socket, pid: int) -> None:
    """Tell who asked of rank `pid`, and how it ends; kill it if who asked is killed."""
    with contextlib.suppress(OSError):
        connection.send(str(pid).encode())
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if select.select([connection], [], [], PAUSE_S)[0]:  # closed: nothing is ever sent
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        connection.send(str(ended[1]).encode())


def stand_in(address: str, arguments: list[str]) -> int:
    """Ask the server at `address` for a rank, and end by the signal that ends it.

    Returns its exit status. Raises OSError if there is no server within LIMIT_S.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # until there is a rank to tell
    deadline = time.monotonic() + LIMIT_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        while (refused := connection.connect_ex(address)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if refused:
            raise OSError(refused, f"no server at {address}")
        connection.send(json.dumps([dict(os.environ), arguments]).encode())
        pid = int(connection.recv(20))
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(pid, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        code = os.waitstatus_to_exitcode(int(connection.recv(20)))
    if code < 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


if __name__ == "__main__":
    sys.exit(stand_in(sys.argv[1], sys.argv[2:]))
