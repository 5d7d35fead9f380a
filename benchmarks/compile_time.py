"""What our passes take of a compilation: Llamas of 16, 32, 80 and 126 layers, on no real ranks.

    OMP_NUM_THREADS=1 python benchmarks/compile_time.py [--layers 126] [--lowering inductor]

As many layers as Llama-3 8B, 70B and 405B have, and the same ops in each, but narrow: how long a
graph takes to trace, plan and lower depends on its ops, not on their sizes. "auto" for H100s. Every
number is of one compilation, forward and backward, in a process that has compiled a smaller one
before; kernels are not in Inductor's cache.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._inductor.utils
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard import _torch, compilation
from autoshard.passes.pipeline import Pass, pass_name

RANKS = 8
Clock = Counter[str]
"""Seconds, by the name of what takes them."""


def llama(layers: int) -> nn.Module:
    """Build a narrow Llama of that many layers, with random weights."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def timed(clock: Clock, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run`, made to add the seconds of each call to `clock[name]`, also if it raises.

    What is returned has `name` as its name.
    """

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        """Call `run`, and add its seconds to `clock`."""
        begin = time.perf_counter()
        try:
            return run(*args, **kwargs)
        finally:
            clock[name] += time.perf_counter() - begin

    wrapped.__name__ = name
    return wrapped


def compile_once(layers: int, lowering: str) -> tuple[float, Clock]:
    """Compile a Llama of that many layers; return seconds of its first step, and of our passes.

    A step is forward and backward. Dynamo is reset before, and Inductor's cache is empty. There has
    to be a process group.
    Returns the whole, and a clock by pass, with "joint" for all over the joint graph, and "all".
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = autoshard.shard(llama(layers))
    options = {"lowering": lowering, "strict": True, "topology": "h100"}
    model.compile(backend="autoshard", options=options)
    ids = torch.zeros(1, 16, dtype=torch.long)
    clock: Clock = Counter()
    run_passes = compilation.passes.run

    def run(gm: fx.GraphModule, transforms: Sequence[Pass], **kwargs: Any) -> fx.GraphModule:
        named = [timed(clock, pass_name(each), each) for each in transforms]
        return run_passes(gm, named, **kwargs)

    frames = compilation.Compilation
    begin = time.perf_counter()
    with (
        torch._inductor.utils.fresh_cache(),
        mock.patch.object(compilation.passes, "run", timed(clock, "all", run)),
        mock.patch.object(frames, "_joint", timed(clock, "joint", frames._joint)),
    ):
        model(input_ids=ids, labels=ids).loss.backward()
    clock["all"] += clock["joint"]
    return time.perf_counter() - begin, clock


def main() -> None:
    """Print the seconds of a compilation and of our passes, a line for each number of layers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[16, 32, 80, 126])
    parser.add_argument("--lowering", default="inductor")
    options = parser.parse_args()
    _torch.dist.pretend_ranks(RANKS)
    compile_once(2, options.lowering)
    print(f"torch {torch.__version__}, lowering {options.lowering}; seconds")
    print("layers   whole  passes  share  of which")
    for layers in options.layers:
        whole, clock = compile_once(layers, options.lowering)
        passes = clock.pop("all")
        most = ", ".join(f"{name} {seconds:.1f}" for name, seconds in clock.most_common(5))
        print(f"{layers:6}{whole:8.1f}{passes:8.1f}{passes / whole:7.1%}  {most}", flush=True)


if __name__ == "__main__":
    main()
