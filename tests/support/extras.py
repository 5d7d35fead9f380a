"""What compilations make for logs, and for nobody in a test."""

from __future__ import annotations

import gc

import torch


def leave_out() -> None:
    """Have compilations in this process leave it out, for good, and collect garbage more rarely."""
    gc.set_threshold(50_000)  # one makes and drops many more than 700 objects
    torch.fx.GraphModule.print_readable = lambda *args, **kwargs: ""  # 10 ms a graph
    torch._dynamo.guards.profile_guard_manager = lambda *args: 0.0  # 20 ms a frame
