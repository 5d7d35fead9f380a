"""What the fragments of docs/guides/precision.md take for granted."""

from support.guides import names as names
