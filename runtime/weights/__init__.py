"""Weights in files of other libraries: safetensors, as Hugging Face's models are stored in.

full_state.py     all of a sharded model's tensors, plain
load.py           files to shards: each rank reads its own rows
save.py           shards to files: each rank writes some of them
hugging_face.py   what transformers knows: other names, conversions, ties, configurations
files.py          the format: where each tensor's bytes are
writing.py        files, a tensor at a time, and their folder
lazy.py           tensors that are read later, and in part
"""
