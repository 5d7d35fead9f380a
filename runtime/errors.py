"""Errors for misuse of what FSDP2 offers, too, of both kinds: ours, and the one that it raises.

Each is a ValueError or a TypeError, as its message says what was wrong with a value, and also the
AssertionError or NotImplementedError that code written for FSDP2 may expect.
"""


class UsageError(ValueError, AssertionError):
    """Something has a wrong value, or was done at a wrong time."""


class UsageTypeError(TypeError, AssertionError):
    """Something has a wrong type."""


class UnsupportedError(ValueError, NotImplementedError):
    """A value that could be meant, and is not supported."""
