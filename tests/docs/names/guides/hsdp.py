"""What the fragments of docs/guides/hsdp.md take for granted."""

from support.guides import names as names
