"""Optimizers, clipping and checkpoints: a training loop beside forward and backward."""
