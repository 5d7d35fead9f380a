"""Names of shards by their address: what messages about collectives call what was sent."""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Protocol

from torch import Tensor


class Named(Protocol):
    """Sharded parameter, as far as messages are concerned: its name, and this rank's rows."""

    name: str

    @property
    def shard(self) -> Tensor:
        """Rows of this rank."""
        ...


_known: weakref.WeakSet[Named] = weakref.WeakSet()


def add(named: Named) -> None:
    """Let `names_at` know `named` for as long as it lives."""
    _known.add(named)


def names_at(addresses: Collection[object]) -> list[str]:
    """Names of the parameters whose shards are at `addresses`, in that order.

    An address at which no known shard lies, or an empty one, gives no name.
    """
    known = {each.shard.data_ptr(): each.name for each in list(_known) if each.shard.numel()}
    return [known[each] for each in addresses if each in known]
