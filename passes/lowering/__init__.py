"""Lowering of planned graphs, to Inductor and to eager calls."""
