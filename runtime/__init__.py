"""Units, parameters, gather and reduce. See README.md for the nouns."""

from autoshard.runtime import kernels as kernels  # gives the ops their implementations
