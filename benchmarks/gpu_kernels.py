"""What the kernels of one GPU take, beside what the planner says of them.

    python benchmarks/gpu_kernels.py [--cases llama-8b gpt2] [--rounds 10] [--topology h100]

Models of a few real layers are trained in bf16 on random tokens, unsharded, compiled and eagerly,
as FlashAttention and cuBLAS compute them. A line for each of forward, backward and the optimizer's
step (fused AdamW), with the median of rounds, and one for each kind of kernel of a profiled forward
and backward: products, attention, all others, and the time in which the GPU waits for the host. The
planner's figures are of the same graphs, with the named topology; they are the last column, over
what was measured. Without a GPU there are only these.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
from one_gpu import on_device
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from autoshard.integrations.transformers import attention_by_flag
from autoshard.passes.planner.kernels import Kernel
from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan.estimate import Configuration, estimate
from autoshard.tools.plan.steps import PlannedModel, traced_step

WARM_UP = 3
PARTS = ("forward", "backward", "optimizer")
KINDS = ("products", "attention", "others")
LOWERINGS = {"compiled": "inductor", "eager": "eager"}

# Pieces of kernels' names. Attention comes first, as cuDNN's is made of products, too.
NAMES = {
    "attention": ("flash", "fmha", "sdpa", "attention"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk"),
}


class Case(NamedTuple):
    """Model and its batch: sizes of `LlamaConfig`, or of `GPT2Config` if no `groups` are given.

    groups: heads of keys and values.
    has_mask: whether attention gets its causal mask as a tensor, where it is compiled, as models of
        transformers have it before torch 2.14; else a flag.
    """

    width: int
    hidden: int
    layers: int
    heads: int
    groups: int | None
    words: int
    sequences: int
    length: int
    has_mask: bool = False


CASES = {
    "llama-8b": Case(4096, 14336, 4, 32, 8, 128256, 1, 8192),
    "llama-8b, mask": Case(4096, 14336, 4, 32, 8, 128256, 1, 8192, has_mask=True),
    "llama-13b": Case(5120, 13824, 4, 40, 40, 32000, 2, 4096),
    "llama-1b": Case(2048, 8192, 12, 32, 8, 128256, 4, 2048),
    "gpt2": Case(1024, 4096, 24, 16, None, 50304, 8, 1024),
}


def build(case: Case) -> nn.Module:
    """Build the model, with random weights on the default device."""
    import transformers

    attention = "sdpa" if case.has_mask else attention_by_flag()
    if case.groups is None:
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_embd=case.width,
                n_layer=case.layers,
                n_head=case.heads,
                n_positions=case.length,
                vocab_size=case.words,
                use_cache=False,
                attn_implementation=attention,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
        model.loss_type = "ForCausalLM"  # else it is asked for, with a warning, in each forward
        return model
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=case.width,
            intermediate_size=case.hidden,
            num_hidden_layers=case.layers,
            num_attention_heads=case.heads,
            num_key_value_heads=case.groups,
            max_position_embeddings=case.length,
            vocab_size=case.words,
            use_cache=False,
            attn_implementation=attention,
        )
    )


def predict(name: str, lowering: str, topology: str) -> dict[str, float]:
    """Predict milliseconds of each of `PARTS` and `KINDS`, and "peak" in MB, of a case by name."""
    case, found = CASES[name], Topology.load(topology)
    planned = PlannedModel(
        name,
        build=functools.partial(build, case),
        batch=None,
        seq=case.length,
        dtype="bf16",
        param_dtype="bf16",
        optimizer="adamw",
        lowering=lowering,
    )
    step = traced_step(planned, case.sequences, "none")
    configuration = Configuration(1, 1, True, case.sequences, "none")
    result = estimate(step, configuration, found, searched=False)
    times = dict.fromkeys(KINDS, 0.0)
    for graph in step.graphs.values():
        for number, op_us in zip(graph.problem.op_us, graph.op_us(found), strict=True):
            times[_kind(graph.kernels[int(number)])] += op_us / 1e3
    times |= {part: result.timelines[part].time_us / 1e3 for part in ("forward", "backward")}
    times["optimizer"] = result.outside.optimizer_us / 1e3
    times["peak"] = result.memory.peak_bytes / 1e6
    return times


def _kind(kernel: Kernel | None) -> str:
    if kernel is None:
        return "others"  # views, which take no time
    return "attention" if kernel.attention else "products" if kernel.product else "others"


class Training:
    """Steps of a model on the GPU, on one batch.

    form: "compiled" or "eager".
    """

    def __init__(self, case: Case, form: str) -> None:
        """Build the model in bf16, and compile it if it is to be."""
        torch.manual_seed(0)
        with torch.device("cuda"):
            model = build(case).to(torch.bfloat16)
            self.ids = torch.randint(case.words, (case.sequences, case.length))
        self.model: Any = torch.compile(model) if form == "compiled" else model
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def forward(self) -> Tensor:
        """Compute the loss."""
        loss: Tensor = self.model(input_ids=self.ids, labels=self.ids).loss
        return loss

    def step(self) -> list[float]:
        """Run a step; return the milliseconds of `PARTS`, each between events on the GPU."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        loss = self.forward()
        marks[1].record()
        loss.backward()
        marks[2].record()
        self.optimizer.step()
        marks[3].record()
        self.optimizer.zero_grad()
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]


def measure(case: Case, form: str, rounds: int) -> dict[str, float]:
    """Measure what `predict` predicts, and "idle": ms in which the GPU waits for the host."""
    torch._dynamo.reset()
    training = Training(case, form)
    for _ in range(WARM_UP):
        training.step()
    torch.cuda.reset_peak_memory_stats()
    steps = [training.step() for _ in range(rounds)]
    found = dict(zip(PARTS, map(statistics.median, zip(*steps, strict=True)), strict=True))
    found["peak"] = torch.cuda.max_memory_allocated() / 1e6
    return found | by_kind(lambda: training.forward().backward())


def by_kind(call: Callable[[], object]) -> dict[str, float]:
    """Profile `call` on the GPU: milliseconds of `KINDS`, and "idle" between them."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    times, spans = dict.fromkeys(KINDS, 0.0), []
    for event in profiled.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[kind_of(event.name)] += event.time_range.elapsed_us() / 1e3
            spans.append((event.time_range.start, event.time_range.end))
    return {**times, "idle": on_device(spans).idle_ms}


def kind_of(name: str) -> str:
    """Tell the kind of a kernel, one of `KINDS`, by its name."""
    lower = name.lower()
    for kind, pieces in NAMES.items():
        if not lower.startswith("triton_") and any(piece in lower for piece in pieces):
            return kind
    return "others"


def table(title: str, measured: Mapping[str, float], predicted: Mapping[str, float]) -> str:
    """Format a case's figures, one a line; what was not measured is left out."""
    lines = [f"{title}: measured, predicted, predicted of measured (ms; MB)"]
    for key in (*PARTS, *KINDS, "idle", "peak"):
        there, said = measured.get(key), predicted.get(key)
        texts = [f"{each:10.2f}" if each is not None else f"{'':10}" for each in (there, said)]
        ratio = f"{said / there:8.2f}" if there and said else ""
        lines.append(f"  {key:10} {' '.join(texts)} {ratio}".rstrip())
    return "\n".join(lines)


def main() -> None:
    """Print a table for each case and form."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--forms", nargs="+", default=list(LOWERINGS), choices=LOWERINGS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--topology", default="h100", help="of the planner's figures")
    options = parser.parse_args()
    there = torch.cuda.is_available()
    name = torch.cuda.get_device_name() if there else "no GPU"
    print(f"torch {torch.__version__}, {name}, {vars(options)}", flush=True)
    spawn = multiprocessing.get_context("spawn")  # a process each: it becomes one of many ranks
    with ProcessPoolExecutor(4, spawn, max_tasks_per_child=1) as pool:
        said: dict[tuple[str, str], Future[dict[str, float]]] = {
            (case, form): pool.submit(predict, case, LOWERINGS[form], options.topology)
            for case in options.cases
            for form in options.forms
        }
        for (case, form), future in said.items():
            measured = measure(CASES[case], form, options.rounds) if there else {}
            print(table(f"{case}, {form}", measured, future.result()), flush=True)


if __name__ == "__main__":
    main()
