"""Two hosts with two ranks each, as network namespaces with a cable between them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import one_of_two_hosts, warm

LIMIT_S = 150.0


@pytest.fixture
def hosts() -> Iterator[list[tuple[str, str, str]]]:
    """(name, address, interface) of each. Skips where namespaces can't be made."""
    names = [f"autoshard{os.getpid()}{letter}" for letter in "ab"]
    ends = [f"as{os.getpid() % 100_000}{letter}" for letter in "ab"]
    addresses = ["10.213.77.1", "10.213.77.2"]
    made = []
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
                made.append(name)
            _ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1],
                "netns", names[1])  # fmt: skip
            for name, end, address in zip(names, ends, addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
                for device in (end, "lo"):
                    _ip("-n", name, "link", "set", device, "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces can't be made here: {error}")
        yield list(zip(names, addresses, ends, strict=True))
    finally:
        for name in made:
            _ip("netns", "del", name)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.mark.timeout(240)
def test_parity_and_a_cut_cable(hosts: list[tuple[str, str, str]], tmp_path: Path) -> None:
    for rank, lines in enumerate(_cut_after(hosts, tmp_path, "steps")):
        assert lines[0].startswith("parity ok"), rank
        assert f"rank {rank}: the " in lines[-1], lines
        assert "can't be reached" in lines[-1] or "as one of them ended" in lines[-1], lines


@pytest.mark.timeout(240)
def test_a_cable_that_is_cut_while_ranks_compare_notes(
    hosts: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    """Those on the host that has no store get no answer from it, and no error either."""
    for lines in _cut_after(hosts, tmp_path, "notes"):
        assert re.search("did not within|can't be reached|wait elsewhere", lines[-1]), lines


def _cut_after(hosts: list[tuple[str, str, str]], folder: Path, what: str) -> list[list[str]]:
    """What each rank wrote, the cable being cut once all are in the middle of `what`."""
    processes = []
    for number, (name, address, end) in enumerate(hosts):
        command = [
            *("ip", "netns", "exec", name, warm.python(), "-m", "torch.distributed.run"),
            *("--nnodes", "2", "--nproc-per-node", "2", "--node-rank", str(number)),
            *(
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"{hosts[0][1]}:29400",
            ),  # of its namespace
            *("--rdzv-conf", f"is_host={number == 0}"),  # its name does not say so in a namespace
            *("--local-addr", address, one_of_two_hosts.__file__, str(folder), what),
        ]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHON_EXEC": warm.python(),
            "GLOO_SOCKET_IFNAME": end,
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        with (folder / f"output_{number}").open("w") as output:
            processes.append(
                subprocess.Popen(command, env=environment, stdout=output, stderr=output)
            )
    try:
        _until(folder, "stepping")
        name, _, end = hosts[1]
        _ip("-n", name, "link", "set", end, "down")
        _until(folder, "Error: ")
    finally:
        _stop(processes)
    return [(folder / str(rank)).read_text().splitlines() for rank in range(4)]


def _stop(agents: list[subprocess.Popen[bytes]]) -> None:
    """These, and their ranks: an agent that can't reach the other one takes minutes to notice."""
    for agent in agents:
        children = subprocess.run(["pgrep", "-P", str(agent.pid)], capture_output=True, text=True)
        for pid in (*map(int, children.stdout.split()), agent.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()


def _until(folder: Path, word: str) -> None:
    """All four ranks have written `word`."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        texts = [(folder / str(rank)) for rank in range(4)]
        if all(path.exists() and word in path.read_text() for path in texts):
            return
        time.sleep(0.2)
    outputs = [path.read_text()[-2000:] for path in sorted(folder.glob("[0-3]"))]
    outputs += [path.read_text()[-2000:] for path in sorted(folder.glob("output_*"))]
    raise AssertionError(f"no {word!r} within {LIMIT_S:.0f} s: " + "\n---\n".join(outputs))
