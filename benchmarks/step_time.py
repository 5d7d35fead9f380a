"""Step time of a small Llama on the ranks there are: autoshard beside FSDP2, interleaved.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/step_time.py

One process group, one run: every contestant takes one step in turn, so that a busy
moment of the machine hits all alike. Medians over the rounds, and their ratio to the
first contestant. A step is forward, backward and AdamW.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.tools.demo import make_batch, read_corpus


def build(hidden: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 43 // 16,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def fsdp2(model: Any) -> Any:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp2_compiled_blocks(model: Any) -> Any:
    for layer in model.model.layers:
        layer.compile()
    return fsdp2(model)


def autoshard_eager(model: Any) -> Any:
    return autoshard.shard(model)


def autoshard_compiled(model: Any) -> Any:
    return torch.compile(autoshard.shard(model), backend="autoshard")


CONTESTANTS: dict[str, Callable[[Any], Any]] = {
    "FSDP2": fsdp2,
    "FSDP2, blocks compiled": fsdp2_compiled_blocks,
    "autoshard, eager": autoshard_eager,
    "autoshard, compiled": autoshard_compiled,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group()
    rank = dist.get_rank()
    corpus = read_corpus()
    models = {
        name: make(build(options.hidden, options.layers)) for name, make in CONTESTANTS.items()
    }
    optimizers = {
        name: torch.optim.AdamW(model.parameters(), lr=1e-3) for name, model in models.items()
    }
    times: dict[str, list[float]] = {name: [] for name in models}
    for number in range(options.rounds + 3):  # the first three compile and warm up
        batch = make_batch(corpus, rank, number, "cpu")
        for name, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            model(**batch).loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if number >= 3:
                times[name].append(time.perf_counter() - started)
    if rank == 0:
        medians = {name: statistics.median(values) for name, values in times.items()}
        first = next(iter(medians.values()))
        print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {options}")
        for name, median in medians.items():
            low, high = min(times[name]), max(times[name])
            print(
                f"{name:26} {1e3 * median:7.1f} ms  ({1e3 * low:.1f} to {1e3 * high:.1f})  "
                f"{median / first:.2f}"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
