"""What the fragments of docs/guides/overlap.md take for granted."""

from support.guides import names as names
