"""What the fragments of docs/guides/checkpoints.md take for granted."""

from __future__ import annotations

from typing import Any

from support import guides


def names() -> dict[str, Any]:
    """Add a small Llama to what other guides have."""
    from support.hosts import llama

    return {**guides.names(), "llama": llama()}
