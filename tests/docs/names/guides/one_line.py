"""What the fragments of docs/guides/one_line.md take for granted."""

from support.guides import names as names
