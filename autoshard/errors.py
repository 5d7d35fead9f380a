"""Errors for misuse that FSDP2 refuses, too, each of two types: ours, and the one that it raises.

Each is a ValueError or a TypeError, as its message says what was wrong with a value, and also the
AssertionError or NotImplementedError that code written for FSDP2 may expect.
"""


class UsageError(ValueError, AssertionError):
    """Error for a wrong value, or for a call at a wrong time."""


class UsageTypeError(TypeError, AssertionError):
    """Error for a wrong type."""


class UnsupportedError(ValueError, NotImplementedError):
    """Error for a value that is meaningful, but not supported."""
