"""What compiled code asks of the runtime: frames, kernels, tables of parameters."""
