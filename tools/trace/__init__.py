"""Graphs and plans of ranks that are not there: `autoshard trace` and `autoshard golden`."""
