"""Train a small Llama on the standard library's own source, sharded over the ranks there are.

    torchrun --nproc-per-node 2 -m autoshard.tools.demo

The demo uses the one-line form on a plain Hugging Face model; then it prints what was done, and
checks parity.
"""

from __future__ import annotations

import argparse
import resource
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.runtime.comm.flights import Issued, observe
from autoshard.runtime.comm.mesh import device_type, ensure_process_group
from autoshard.runtime.unit.param import find
from autoshard.tools.parity.compare import parity
from autoshard.tools.ranks import leave

CORPUS_BYTES = 4_000_000
VOCABULARY = 256  # bytes
PARITY_STEPS = 3


def main() -> int:
    """Train the model as the command line says, print results, and check parity; on every rank.

    The process group is made if there is none, and torch's random generator is seeded. Rank 0
    prints the loss, speed and peak memory of each step, the bytes of its shards, and the number of
    collectives in the last step. Then what torch has compiled is reset, and rank 0 prints the
    report of a parity run of `PARITY_STEPS` steps, from new weights, with the plain lowering.
    Returns the exit status, after a barrier: 1 if parity fails.
    """
    options = _arguments()
    ensure_process_group()
    rank = dist.get_rank()
    corpus = read_corpus()
    torch.manual_seed(0)
    model = build_model().to(device_type())
    num_params = sum(param.numel() for param in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    _say(
        f"{num_params / 1e6:.1f}M parameters, {dist.get_world_size()} ranks, "
        f"{len(corpus) / 1e6:.1f} MB of Python source; compiling ({options.lowering})"
    )
    compiled = torch.compile(model, backend="autoshard", options={"lowering": options.lowering})

    issued: list[Issued] = []
    losses = []
    for step in range(options.steps):
        batch = make_batch(corpus, rank, step, device_type())
        issued.clear()
        started = time.perf_counter()
        with observe(issued.append):
            loss = compiled(**batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(_mean(loss))
        tokens = batch["input_ids"].numel() * dist.get_world_size()
        speed = tokens / (time.perf_counter() - started)
        _say(
            f"step: {step + 1:3d}  loss: {losses[-1]:.4f}  tokens/s: {speed:,.0f}  "
            f"memory: {_memory_gib():.2f} GiB"
        )

    whole = sum(param.numel() * param.element_size() for param in model.parameters())
    here = sum(_shard_bytes(param) for param in model.parameters())
    gathers = sum(each.kind == "gather" for each in issued)
    _say(f"loss: {losses[0]:.4f} -> {losses[-1]:.4f}")
    _say(f"parameter bytes: {here:,} on rank {rank} of {whole:,} in the model")
    _say(f"collectives a step: {gathers} gathers, {len(issued) - gathers} reduces")

    torch.compiler.reset()
    batches = [make_batch(corpus, rank, step, device_type()) for step in range(PARITY_STEPS)]
    report = parity(build_model, batches, options={"lowering": "eager"})
    _say(report.text())
    dist.barrier()
    return 0 if report.ok else 1


def build_model() -> nn.Module:
    """Build a Llama of 4 layers over bytes, with random weights, on the default device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
    )
    return LlamaForCausalLM(config)


def read_corpus() -> Tensor:
    """Read the first `CORPUS_BYTES` bytes of the standard library's modules: u8[bytes].

    Modules come in the order of their names, without those in packages. There may be fewer bytes.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8).clone()


def make_batch(
    corpus: Tensor, rank: int, step: int, device: str, *, rows: int = 8, length: int = 128
) -> dict[str, Any]:
    """Cut random windows out of the corpus, the same for a rank and step each time.

    Returns keyword arguments: `input_ids` and `labels`, one tensor on `device`, i64[rows, length].
    """
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    starts = torch.randint(0, len(corpus) - length, (rows,), generator=generator)
    ids = torch.stack([corpus[start : start + length] for start in starts.tolist()])
    ids = ids.long().to(device)
    return {"input_ids": ids, "labels": ids}


def _arguments() -> argparse.Namespace:
    """Read the options `--steps` and `--lowering` from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lowering", default="inductor", choices=["inductor", "eager"])
    return parser.parse_args()


def _mean(loss: Tensor) -> float:
    """Average a scalar loss over all ranks, which all call this."""
    value = loss.detach().clone()
    dist.all_reduce(value)
    return value.item() / dist.get_world_size()


def _shard_bytes(param: nn.Parameter) -> int:
    sharded = find(param)
    assert sharded is not None
    return sharded.shard.numel() * sharded.shard.element_size()


def _memory_gib() -> float:
    """GiB of this rank at its peak: allocated on the accelerator, or resident on a CPU."""
    if device_type() == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    leave(main())
