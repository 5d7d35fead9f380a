"""Two ranks that do not do the same: each says so, names it, and nobody hangs.

Processes of their own, as they end.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from support import diverging
from support.ranks import in_processes

LIMIT_S = 60.0
DONE = "done"


def run(case: str, form: str, caches: Path) -> list[str]:
    """How each rank ended; "" for one that has not said it."""
    environments = [{"TORCHINDUCTOR_CACHE_DIR": str(caches / str(rank))} for rank in range(2)]
    ends = in_processes(diverging.run_rank, case, form, environments=environments, limit_s=LIMIT_S)
    return [end or "" for end in ends]


FORMS = ("eager", "compiled", "one line")
COLLECTIVES_DIFFER = (
    r"compiled other collectives for .*Collective number \d+ is the .* on rank [01], and "
)
MODELS_DIFFER = r"the model to shard differs on ranks \[[01]\]: number \d+ is \S+ torch\.float"
OPTIONS_DIFFER = r"with the options .*bucketing='auto'.*bucketing='none'|bucketing='none'.*'auto'"
ELSEWHERE = r"rank \d waits for (the|others)|has raised RuntimeError|wait elsewhere: rank \d"
ENDS: dict[str, dict[str, str]] = {
    "another model": {
        "eager": r"number 4 is the gather of \S+ .* on rank \d, and the gather of \S+ .* on rank ",
        "compiled": COLLECTIVES_DIFFER,
        "one line": MODELS_DIFFER,
    },
    "another option": {"compiled": OPTIONS_DIFFER, "one line": OPTIONS_DIFFER},
    "another dtype": {
        "eager": r"is the gather of layers\.1 \(float.* and the gather of layers\.1 \(float",
        "compiled": COLLECTIVES_DIFFER,
        "one line": MODELS_DIFFER,
    },
    "frozen": {
        "eager": r"is the (reduce|gather) of layers\.\d.* and the (reduce|gather) of layers\.\d",
        "compiled": COLLECTIVES_DIFFER,
        "one line": COLLECTIVES_DIFFER,
    },
    "frozen later": dict.fromkeys(FORMS, ELSEWHERE),
    "another shape": dict.fromkeys(FORMS, DONE),
}
"""By case and form: how every rank ends."""


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("case", "form"), [(case, form) for case, forms in ENDS.items() for form in forms]
)
def test_all_ranks_say_so(case: str, form: str, tmp_path: Path) -> None:
    for end in run(case, form, tmp_path):
        assert re.search(ENDS[case][form], end), end


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["eager", "layers compiled"])
def test_a_layer_that_one_rank_leaves_out(form: str, tmp_path: Path) -> None:
    """One rank waits in a gather, the other asks what runs next: it says so within seconds, and
    where the first is, however long the group's timeout."""
    first, second = run("skips a layer", form, tmp_path)
    assert re.search(r"rank 0: .*the gather of layers\.[12].* failed, as rank \d ", first), first
    assert re.search(r"rank 1 came to .*layers\.2", second), second
    assert re.search(r"rank 0 (waits for|to) the gather of layers\.[12]", second), second


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", ["eager", "layers compiled"])
def test_another_layer_left_out_by_each(form: str, tmp_path: Path) -> None:
    """Layers that are alike run one graph: their gathers would be of equal sizes, and mix."""
    ends = run("skips another layer", form, tmp_path)
    assert any(re.search(r"rank \d came to .*rank \d waits for the gather of ", e) for e in ends), (
        ends
    )
    assert all(re.search(r"rank \d came to |as one of them ended", end) for end in ends), ends


@pytest.mark.timeout(120)
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_ends_early(form: str, tmp_path: Path) -> None:
    first, _ = run("exits early", form, tmp_path)
    assert re.search(r"rank 0: the gather of layers\.0\.up\.weight, .* over ranks \[0, 1\]", first)


@pytest.mark.timeout(180)
def test_a_cache_on_one_rank_only(tmp_path: Path) -> None:
    assert run("none", "one line", tmp_path) == [DONE, DONE]
    shutil.rmtree(tmp_path / "1")
    assert run("none", "one line", tmp_path) == [DONE, DONE]
