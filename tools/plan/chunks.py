"""Loss in chunks of the tokens: of logits, one chunk is in memory at a time.

The last layer, the loss and the backward of both run for one chunk after the other, as in
torchtune's and torchtitan's chunked losses. A step is traced with the loss in one piece, and its
logits, and what is of their size, then count as one chunk.
"""

from __future__ import annotations

import math

from torch import fx

from autoshard.passes.ir.meta import CHUNKS
from autoshard.passes.plans.values import hint_of, tensors_of

NUM_CHUNKS = 8  # what torchtune's and torchtitan's losses have by default


def in_chunks(gm: fx.GraphModule, vocabulary: int, tokens: int, sequences: int) -> bool:
    """Have the values of `gm` that are as large as the logits count as one chunk in memory.

    Their last size is `vocabulary`, and the others hold `tokens`, or one less for each of
    `sequences` where labels are the tokens that follow. Times stay: all chunks are computed.

    Returns whether there are any.
    """
    found = False
    for node in gm.graph.nodes:
        for tensor in tensors_of(node):
            *rows, columns = [1, *map(hint_of, tensor.shape)]
            if columns == vocabulary and tokens - sequences <= math.prod(rows) <= tokens:
                CHUNKS.set(node, NUM_CHUNKS)
                found = True
    return found
