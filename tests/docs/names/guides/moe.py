"""What the fragments of docs/guides/moe.md take for granted."""

from support.guides import names as names
