"""What the fragments of docs/guides/memory.md take for granted."""

from support.guides import names as names
