"""What a training loop does beside forward and backward: optimizers, clipping, checkpoints."""
