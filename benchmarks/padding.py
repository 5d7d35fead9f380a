"""What large models take a rank, and what is sent beyond their bytes, from 8 to 16,384 ranks.

    python benchmarks/padding.py [--ranks 8 64 512 4096 16384] [--models mixtral_8x7b ...]

Each model is built from its configuration, on meta, and sharded over ranks that are not there, once
as `shard()` chooses placements and once by rows, as FSDP2 does. For each: bytes on the rank that
has most, over the model's bytes divided by the ranks; and what a gather of all units receives, over
the model's bytes. Both are the same number where every rank's piece is sent with its padding.
Needs transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from autoshard.runtime.sharding.find_units import find_units
from autoshard.runtime.sharding.shard import fully_shard
from autoshard.runtime.unit.param import find
from autoshard.tools.plan.dry_run import pretend_ranks

RANKS = (8, 64, 512, 4096, 16384)


def llama(hidden: int, inner: int, layers: int, heads: int) -> Any:
    """Configuration of a Llama 3.1."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=128256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
    )


def mixtral() -> Any:
    """Configuration of Mixtral 8x7B, the default one of transformers."""
    from transformers import MixtralConfig

    return MixtralConfig()


def qwen3_moe() -> Any:
    """Configuration of Qwen3 30B A3B."""
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
    )


def deepseek_v3() -> Any:
    """Configuration of DeepSeek V3, the default one of transformers."""
    from transformers import DeepseekV3Config

    return DeepseekV3Config()


MODELS: dict[str, Callable[[], Any]] = {
    "mixtral_8x7b": mixtral,
    "qwen3_moe_30b": qwen3_moe,
    "deepseek_v3": deepseek_v3,
    "llama_8b": lambda: llama(4096, 14336, 32, 32),
    "llama_70b": lambda: llama(8192, 28672, 80, 64),
    "llama_405b": lambda: llama(16384, 53248, 126, 128),
}


def build(name: str) -> nn.Module:
    """Build model `name` on meta, in bf16."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(MODELS[name]())
    return model.to(torch.bfloat16)


def measure(name: str, ranks: int) -> None:
    """Print one line: the model, its ranks, and both numbers for both ways to choose."""
    pretend_ranks(ranks)
    found = []
    for placing in ("auto", None):
        model = build(name)
        whole = sum(param.numel() for param in model.parameters())
        for unit in find_units(model, None):
            fully_shard(unit, shard_placement_fn=placing)
        fully_shard(model, shard_placement_fn=placing)
        held = sent = 0
        for param in model.parameters():
            sharded = find(param)
            assert sharded is not None
            held += sharded.shard.numel()  # rank 0 has most
            sent += sharded.member.chunk_numel(ranks) * ranks
        found += [held * ranks / whole, sent / whole]
    print(f"{name:15} {ranks:6} {whole / 1e9:8.2f} " + "".join(f"{each:12.4f}" for each in found))


def main(given: Sequence[str] | None = None) -> None:
    """Measure each model at each number of ranks, in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.one:
        measure(options.models[0], options.ranks[0])
        return
    print("                                        chosen             by rows, as FSDP2")
    print(
        "model            ranks   billion      held        sent        held        sent", flush=True
    )
    for name in options.models:
        for ranks in options.ranks:
            one = ["--one", "--models", name, "--ranks", str(ranks)]
            with contextlib.suppress(KeyboardInterrupt):
                subprocess.run([sys.executable, __file__, *one], check=True)


if __name__ == "__main__":
    main()
