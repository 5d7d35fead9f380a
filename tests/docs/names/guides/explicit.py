"""What the fragments of docs/guides/explicit.md take for granted."""

from support.guides import names as names
