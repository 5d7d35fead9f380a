"""Seconds of a compilation by phase, beside plain torch.compile, with cold caches and warm ones.

    OMP_NUM_THREADS=1 python benchmarks/compile_phases.py [--layers 32] [--rounds 1]

A narrow Llama, forward and backward, each compilation in a process of its own, in turn: without
sharding by Inductor, and by our backend for 8 H100s of which none is there. A cold one has a new
cache folder, the warm one after it the same again. Imports and building the model are not counted.
"C++" is the time that is waited for the compiler's processes; the rest is guards and the step.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
from compile_time import RANKS, llama
from torch._dynamo.utils import compilation_time_metrics

import autoshard
from autoshard import _torch

PLAIN, OURS = "torch.compile", "autoshard"


def compile_here(contestant: str, layers: int) -> dict[str, float]:
    """Compile a Llama in this process; return seconds of each phase, by name.

    They are as `_phases` gives them. For `OURS`, this becomes rank 0 of `RANKS` that are not there.
    contestant: PLAIN or OURS.
    """
    torch.manual_seed(0)
    model = llama(layers)
    if contestant == OURS:
        _torch.dist.pretend_ranks(RANKS)
        model = autoshard.shard(model)
        model.compile(backend="autoshard", options={"strict": True, "topology": "h100"})
    else:
        model.compile()
    ids = torch.zeros(1, 16, dtype=torch.long)
    begin = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    whole = time.perf_counter() - begin
    return _phases(whole, {name: sum(each) for name, each in compilation_time_metrics.items()})


def _phases(whole: float, took: dict[str, float]) -> dict[str, float]:
    """Split a step's seconds into phases, which add up to "whole", the first of them.

    whole: seconds of forward and backward.
    took: seconds by torch's own names, one phase inside another.
    """

    def seconds(name: str) -> float:
        return took.get(name, 0.0)

    backend = seconds("OutputGraph.call_user_compiler")
    inductor = seconds("compile_fx_inner")
    compiler = seconds("async_compile.wait")
    backward = seconds("backward._backward_impl")  # plain torch.compile lowers it when it is run
    phases = {
        "Dynamo": seconds("_compile.compile_inner") - backend,
        "AOTAutograd, passes": backend + backward - inductor,
        "Inductor": inductor - compiler,
        "C++": compiler,
    }
    return {"whole": whole, **phases, "rest": whole - sum(phases.values())}


def compile_in_a_process(contestant: str, layers: int, folder: str) -> dict[str, float]:
    """Run `compile_here` in a new process, with Inductor's cache in `folder`.

    Raises CalledProcessError if the process fails.
    """
    command = [sys.executable, __file__, "--here", contestant, "--layers", str(layers)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Print phases with cold and warm caches, medians over rounds, and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--here", choices=[PLAIN, OURS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(compile_here(options.here, options.layers)))
        return
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for _ in range(options.rounds):
        for contestant in (PLAIN, OURS):
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    measured = compile_in_a_process(contestant, options.layers, folder)
                    found.setdefault((contestant, state), []).append(measured)
    print(f"torch {torch.__version__}, {options.layers} layers; seconds")
    medians = {
        key: {name: statistics.median(each[name] for each in measured) for name in measured[0]}
        for key, measured in found.items()
    }
    for (contestant, state), phases in medians.items():
        print(f"{contestant:14}{state:6}", *(f"{name} {took:.1f}" for name, took in phases.items()))
    cold = medians[OURS, "cold"]["whole"]
    print(
        f"cold, of torch.compile's: {cold / medians[PLAIN, 'cold']['whole']:.2f}; "
        f"warm, of cold: {medians[OURS, 'warm']['whole'] / cold:.2f}"
    )


if __name__ == "__main__":
    main()
