"""Exchanges of ranks beside tensors: texts, what they agree on, and where each of them is."""
