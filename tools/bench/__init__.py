"""Measurements of the cluster at hand: `autoshard bench`."""
