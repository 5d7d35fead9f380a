"""Comparison of replicated, eager and compiled training: `autoshard parity`."""
