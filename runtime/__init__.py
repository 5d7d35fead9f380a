"""Runtime: units, parameters, gathers and reduces. See README.md for the terms."""

from autoshard.runtime.compiled import kernels as kernels  # gives the ops their implementations
