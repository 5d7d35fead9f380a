"""`autoshard doctor`: what it finds amiss, and that it never waits for long."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest
import torch
from support import warm

from autoshard import _torch
from autoshard.tools.cli import main
from autoshard.tools.doctor import checks, forks


def amiss() -> dict[str, str]:
    """By subject, what is no "ok"."""
    return {each.subject: str(each) for each in checks.checkup() if each.level != "ok"}


def test_nothing_is_amiss_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--only", "here"]) == 0
    printed = capsys.readouterr().out
    assert "FAIL" not in printed
    for subject in ("versions", "devices", "topology", "backend", "compiler", "cache"):
        assert f"\nok   {subject}" in f"\n{printed}"


def test_a_torch_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.__version__", "2.10.1")
    assert "FAIL versions    torch 2.10.1" in amiss()["versions"]
    assert "needs torch 2.11 to 2.15; upgrade torch" in amiss()["versions"]
    monkeypatch.setattr("torch.__version__", "2.16.0.dev1")
    assert "warn" in amiss()["versions"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels for GPUs need triton instead")
def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert 'install g++, or take options={"lowering": "eager"}' in amiss()["compiler"]


@pytest.mark.parametrize(
    ("variable", "value", "subject", "remedy"),
    [
        ("TORCHDYNAMO_DISABLE", "1", "backend", "unset it"),
        ("TORCHINDUCTOR_CACHE_DIR", "/dev/null/x", "cache", "set TORCHINDUCTOR_CACHE_DIR"),
    ],
)
def test_environment(
    variable: str, value: str, subject: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    found = amiss()
    assert found[subject].startswith("FAIL")
    assert remedy in found[subject]
    assert main(["doctor", "--only", "here"]) == 1


def test_ranks_that_do_not_come_are_named() -> None:
    store = _torch.dist.HashStore()
    store.set("doctor/gather/2", "here")
    with pytest.raises(RuntimeError, match=r"ranks \[1, 3\] did not come to it in 0 s"):
        checks._meet(store, "gather", 0, 4, 0.1)


def _group(world: int, ranks: list[int], limit_s: float) -> list[tuple[int, str]]:
    """Exit status and output of `ranks`, of a group of `world`."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    script = (
        "from autoshard.tools.doctor import checks; from autoshard.tools.ranks import leave; "
        f"found = checks.self_test({limit_s}); print(*found, sep='\\n'); "
        "leave(any(each.level == 'FAIL' for each in found))"
    )
    started = [
        subprocess.Popen(
            [warm.python(), "-c", script],
            env={**os.environ, **address, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in ranks
    ]
    outputs = [process.communicate(timeout=100)[0] for process in started]
    return [(process.returncode, text) for process, text in zip(started, outputs, strict=True)]


def test_a_group_that_works() -> None:
    for status, text in _group(2, [0, 1], 60.0):
        assert status == 0, text
        lines = text.splitlines()
        names = [line.split()[1] for line in lines]
        assert names == ["store", "gather", "reduce", "speed", "step"]
        assert "compiled = replicated bitwise" in lines[-1]


def test_ranks_that_the_command_forks() -> None:
    """In a process of its own, as this one may have threads."""
    command = [warm.python(), "-m", "autoshard.tools.cli", "doctor", "--ranks", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    names = [line.split()[1] for line in done.stdout.splitlines()]
    assert names[0] == "versions"
    assert names[-5:] == ["store", "gather", "reduce", "speed", "step"]


def test_a_rank_that_ends_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def end() -> list[checks.Finding]:
        os._exit(7)

    monkeypatch.setattr(forks, "self_test", end)
    with forks.forked(2) as tested:
        found = tested()
    assert [each.level for each in found] == ["FAIL", "FAIL"]
    assert "rank 1 ended" in found[1].text


@pytest.mark.timeout(100)
def test_a_group_that_lacks_a_rank() -> None:
    ((status, text),) = _group(2, [0], 4.0)
    assert status == 1
    assert text.startswith("FAIL group       rank 0: ")
    assert "WORLD_SIZE the number of ranks started?" in text
