"""Sharding of a model: units are found, parameters cut, and modules given methods."""
