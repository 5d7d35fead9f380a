"""What a sharded module can do beside what its own class can."""

from __future__ import annotations

from torch import nn


class ShardedModule(nn.Module):
    """Mixed into the class of every module that heads a unit; `isinstance` tells such modules."""
