"""Frames, kernels and tables of parameters, which compiled code asks for when it runs."""
