"""What the fragments of docs/guides/checkpoints.md take for granted."""

from support.guides import names as names
