"""Predicted beside measured times of three models, with each way to bucket, interleaved.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/predicted.py

Measures the cluster first, and the models' ops (`autoshard bench calibrate`), then compiles each
model for the topology found: one bucket a parameter, one a unit, and what the planner finds; that
also with all gathers packed, and all grouped. Every contestant takes a step in turn, forward and
backward, after a barrier: medians over the rounds, of the slowest rank. The prediction is that of
the plans: forward and backward.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

import autoshard
from autoshard.passes.planner.costs import GROUPED, LAYOUTS, PACKED
from autoshard.tools.bench.calibrate import calibrate
from autoshard.tools.demo import build_model

CONTESTANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "none": ("none", (PACKED, GROUPED)),
    "per_unit": ("per_unit", (PACKED, GROUPED)),
    "auto": ("auto", (PACKED, GROUPED)),
    "packed": ("auto", (PACKED,)),
    "grouped": ("auto", (GROUPED,)),
}
"""By name: the option, and the layouts that the planner may choose from for gathers."""


def gpt2() -> nn.Module:
    """Build a GPT-2 of 6 layers, without dropout, with random weights."""
    sizes = {"n_embd": 384, "n_layer": 6, "n_head": 6, "n_positions": 256, "vocab_size": 2048}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropouts))


def vit() -> nn.Module:
    """Build a vision transformer of 6 layers, for pictures of 64 by 64, with random weights."""
    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=64,
        patch_size=8,
        num_labels=100,
        problem_type="single_label_classification",  # else forward writes it, and is compiled again
    )
    return ViTForImageClassification(config)


def text(rank: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Make the batch of a rank: random token ids, i64[4, 128], as inputs and labels."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(vocabulary, (4, 128), generator=generator)
    return {"input_ids": ids, "labels": ids}


def images(rank: int) -> dict[str, torch.Tensor]:
    """Make the batch of a rank: random pictures, f32[8, 3, 64, 64], and labels, i64[8]."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "pixel_values": torch.randn(8, 3, 64, 64, generator=generator),
        "labels": torch.randint(100, (8,), generator=generator),
    }


MODELS: dict[str, tuple[Callable[[], Any], Callable[[int], dict[str, torch.Tensor]]]] = {
    "llama": (build_model, lambda rank: text(rank, 256)),
    "gpt2": (gpt2, lambda rank: text(rank, 2048)),
    "vit": (vit, images),
}


def step_of(name: str) -> Callable[[], object]:
    """Return a function that runs forward and backward of the model `name`, unsharded and eager.

    The model and this rank's batch are made here. Gradients add up.
    """
    build, batch_of = MODELS[name]
    model, batch = build(), batch_of(dist.get_rank())
    return lambda: model(**batch).loss.backward()


def measure(
    name: str, topology: str, lowering: str, rounds: int
) -> dict[str, tuple[float, float, float]]:
    """Run the model `name` with each contestant in turn; return predicted and measured times.

    They are in milliseconds, by contestant: predicted forward, predicted backward, and the median
    over rounds of both together, on the slowest rank. There is no optimizer. All ranks call this;
    Dynamo is reset after it.
    topology: a name or a file.
    rounds: that are timed; three more come before.
    """
    build, batch_of = MODELS[name]
    batch = batch_of(dist.get_rank())
    models = {}
    for contestant, (bucketing, layouts) in CONTESTANTS.items():
        torch.manual_seed(0)
        options = {"bucketing": bucketing, "topology": topology, "lowering": lowering}
        model = autoshard.shard(build())
        model.compile(backend="autoshard", options={**options, "strict": True})
        with mock.patch.dict(LAYOUTS, {"gather": layouts}):
            model(**batch).loss.backward()
        models[contestant] = model
    times: dict[str, list[float]] = {contestant: [] for contestant in models}
    for number in range(rounds + 3):  # the first three warm up
        for contestant, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            model(**batch).loss.backward()
            took = torch.tensor(time.perf_counter() - started)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if number >= 3:
                times[contestant].append(1e3 * took.item())
            model.zero_grad()
    found = {}
    for contestant, model in models.items():
        predicted = dict.fromkeys(("forward", "backward"), 0.0)
        for plan in autoshard.plans(model):  # several of each, where the graph breaks
            predicted[plan.graph] += plan.makespan_us / 1e3
        found[contestant] = *predicted.values(), statistics.median(times[contestant])
    torch._dynamo.reset()
    return found


def main() -> None:
    """Calibrate, unless there is `--topology`, and print on rank 0 a line for each contestant.

    The process group is made here, and destroyed.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--topology", help="a file of autoshard bench calibrate; else it is run")
    parser.add_argument("--lowering", default="inductor")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    dist.init_process_group()
    with tempfile.TemporaryDirectory() as folder:
        paths = [str(Path(folder) / "calibrated.json")]
        dist.broadcast_object_list(paths)
        topology = options.topology or paths[0]
        if not options.topology:
            calibrate(topology, steps=[step_of(name) for name in options.models])
        if dist.get_rank() == 0:
            print(f"torch {torch.__version__}, {dist.get_world_size()} ranks, {options}")
            print("model  contestant predicted ms (forward + backward)  measured ms  ratio")
        for name in options.models:
            found = measure(name, topology, options.lowering, options.rounds)
            if dist.get_rank() == 0:
                for contestant, (forward, backward, measured) in found.items():
                    ratio = (forward + backward) / measured
                    print(
                        f"{name:6} {contestant:9} {forward + backward:8.1f} "
                        f"({forward:.1f} + {backward:.1f}) {measured:12.1f} {ratio:8.2f}"
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
