"""The eager runtime: reads gather, autograd reduces."""
