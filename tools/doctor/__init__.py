"""Findings on what is installed, and whether ranks reach each other: `autoshard doctor`."""
