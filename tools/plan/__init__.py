"""Predictions for a cluster that is not there: `autoshard plan`."""
