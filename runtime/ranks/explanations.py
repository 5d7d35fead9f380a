"""Explanations of why a collective has failed, from what other ranks have said in the store."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from autoshard import _torch
from autoshard.runtime.comm.mesh import NAMED
from autoshard.runtime.ranks import farewells, verdicts
from autoshard.runtime.ranks.party import STORE_S
from autoshard.runtime.ranks.positions import Positions

LIMIT_S = 3.0  # for others to say why they end


class Explainer:
    """Looks for why a collective of this rank has failed."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions
        self._in_vain: dist.ProcessGroup | None = None  # default group, of which nothing was found

    def explain(self, ranks: Sequence[int]) -> str:
        """Say why a collective over `ranks` has failed, as "as rank 1 ..."; "" if nothing is known.

        Waits for some seconds for others to say so, but after that was in vain not again.
        """
        group = _torch.dist.default_group()
        deadline = time.monotonic() + (0.0 if self._in_vain is group else LIMIT_S)
        others = [rank for rank in ranks[: NAMED + 1] if rank != self._positions.rank]
        store = self._positions.store
        limit_s, store.limit_s = store.limit_s, min(store.limit_s, STORE_S)
        try:
            while True:
                text, left = self._known(others)
                if text:
                    return f"as {text}"
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        except dist.DistError:
            return (
                "as the process that has the store, mostly rank 0, has ended, or can't be reached: "
                "look at what it says last"
            )
        finally:
            store.limit_s = limit_s
        self._in_vain = group
        return f"as rank {left[0]} {farewells.GONE}" if left else ""

    def _known(self, others: Sequence[int]) -> tuple[str, Sequence[int]]:
        """Return what is known by now, with a remedy, or ""; and which of `others` have left."""
        said = self._positions.verdict()
        text = verdicts.found() or (str(said["text"]) if said.get("breaks") else "")
        if text:
            return f"{text}. {verdicts.HINT}", ()
        left = [rank for rank in others if _torch.dist.has_left(rank)]
        for rank in left:
            how = farewells.read(self._positions.store, rank)
            if how:
                return f"rank {rank} {how}", left
        return "", left
