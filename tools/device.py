"""The device of this process, for what measures on it."""

from __future__ import annotations

import torch


def current_device() -> torch.device:
    """The current GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def synchronize() -> None:
    """Wait until the device has done all that it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
