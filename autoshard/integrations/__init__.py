"""Pieces of autoshard for other libraries; each module imports its own where it is called."""
