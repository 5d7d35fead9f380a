"""What the fragments of docs/guides/offload.md take for granted."""

from support.guides import names as names
