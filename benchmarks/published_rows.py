"""Rows of a file of published measurements, and what each says that a plan can be made of.

A row that can't be expressed says why: no shape, several kinds of parallelism, an unknown GPU.
Fields may be empty or "?".
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from published_models import Shape

from autoshard.tools.plan.steps import PlannedModel

VOCABULARY = 49152  # of a row that names none
FUSED = ("nanotron", "yafsdp", "megatron", "nemo", "liger")
"""Systems whose norms and rotary positions are a kernel each."""
PARALLEL, SHIFTED = ("nanotron", "megatron", "nemo"), ("atorch", "deepcompile", "hf ", "hugging")
"""Systems whose loss is Megatron's, and those that train models of Transformers."""


class NotExpressible(ValueError):
    """Row of which no plan can be made, and why."""


@dataclass(frozen=True)
class Workload:
    """What is traced: a model with its batch and dtypes, whatever the cluster.

    checkpointing: "none", "full" or "ops".
    """

    shape: Shape
    seq: int
    micro_batch: int
    checkpointing: str
    is_compiled: bool
    is_amp: bool
    param_dtype: str
    reduce_dtype: str
    optimizer: str

    def planned(self) -> PlannedModel:
        return PlannedModel(
            name="published",
            build=lambda: self.shape.build(self.seq),
            batch=None,
            seq=self.seq,
            dtype="bf16",
            param_dtype=self.param_dtype,
            optimizer=self.optimizer,
            lowering="inductor" if self.is_compiled else "eager",
            reduce_dtype=self.reduce_dtype,
            is_amp=self.is_amp,
        )


@dataclass(frozen=True)
class Row:
    """Measurement, and what was run.

    workloads: with their shares of layers: those with checkpoints, and those without.
    gpu: text that names one. network: text, with a rate of a node; "" if it is not told.
    measured_s: of a step; None if neither it nor tokens or operations a second are given.
    is_reserved: whether memory is what the allocator reserved, not what was allocated.
    is_chart: whether numbers were read off a chart.
    """

    source: str
    system: str
    workloads: tuple[tuple[float, Workload], ...]
    gpu: str
    gpus: int
    per_node: int
    network: str
    strategy: str
    replicas: int
    shards: int
    accumulate: int
    is_fp8: bool
    measured_s: float | None
    measured_gib: float | None
    is_reserved: bool
    is_chart: bool

    @property
    def workload(self) -> Workload:
        return self.workloads[0][1]

    @property
    def tokens(self) -> int:
        """Tokens of one step on one rank."""
        return self.workload.micro_batch * self.accumulate * self.workload.seq


def read_rows(path: Path) -> list[Row | NotExpressible]:
    """Read the rows of a CSV file, in its order."""
    with path.open() as file:
        return [read_row(each) for each in csv.DictReader(file)]


def read_row(fields: Mapping[str, str]) -> Row | NotExpressible:
    """Read one row; what is wrong with it is returned, not raised."""
    try:
        return _row(fields)
    except NotExpressible as error:
        return error


def _row(fields: Mapping[str, str]) -> Row:
    given = {name: (value or "").strip() for name, value in fields.items()}
    given = {name: "" if value == "?" else value for name, value in given.items()}
    text = " ".join(given.values()).lower()
    for name in ("tp", "pp", "cp", "ep"):
        if _number(given.get(name, ""), 1) > 1:
            raise NotExpressible(f"{name.upper()} can't be planned yet")
    shape = _shape(given)
    amp = "amp" in given["precision"].lower()
    replicas, shards = _mesh(given)
    strategy = given["strategy"].lower()
    checkpointing, share = _checkpointing(given["ac_kind"], shape.layers)
    low = given["shard_dtype"] not in ("", "f32")
    work = Workload(
        shape=shape,
        seq=_known(given, "seq"),
        micro_batch=_known(given, "micro_batch"),
        checkpointing=checkpointing,
        is_compiled=given["is_compiled"] == "yes",
        is_amp=amp and given["gather_dtype"] in ("", "f32"),
        param_dtype=given["shard_dtype"] or "f32",
        reduce_dtype=given["reduce_dtype"] or "f32",
        optimizer="adamw-f32" if low else "adamw",
    )
    parts = [(share, work), (1.0 - share, replace(work, checkpointing="none"))]
    row = Row(
        source=given["source"],
        system=given["system"],
        workloads=tuple((part, each) for part, each in parts if part),
        gpu=given["gpu"],
        gpus=_known(given, "gpus"),
        per_node=_number(given["gpus_per_node"], 8),
        network=given["network"],
        strategy=strategy,
        replicas=replicas,
        shards=shards,
        accumulate=_number(given["grad_accum"], 1),
        is_fp8=given["compute_dtype"] == "fp8",
        measured_s=None,
        measured_gib=_gib(given["memory"], given["memory_unit"]),
        is_reserved="alloc" not in given["memory_unit"].lower(),
        is_chart="chart" in text,
    )
    return _with_time(row, given, text)


def _shape(given: Mapping[str, str]) -> Shape:
    name, system = given["model"].lower(), f"{given['system']} {given['source']} ".lower()
    hidden, heads = _known(given, "hidden"), _known(given, "heads")
    shape = Shape(
        family="mpt" if re.match(r"mpt|gpt|opt|bloom", name) else "llama",
        hidden=hidden,
        inner=_known(given, "ffn"),
        heads=heads,
        keys=_number(given["kv_heads"], heads),
        layers=_known(given, "layers"),
        vocabulary=_number(given["vocab"], VOCABULARY),
        is_fused=any(word in system for word in FUSED),
        loss=_loss(system),
    )
    params = float(given["params"] or 0)
    if params and not 0.6 < shape.num_parameters / params < 1.6:
        raise NotExpressible(
            f"{given['model']} has {params:.3g} parameters, and a dense model of that shape "
            f"{shape.num_parameters:.3g}"
        )
    return shape


def _loss(system: str) -> str:
    if any(word in system for word in PARALLEL):
        return "parallel"
    return "shifted" if any(word in system for word in SHIFTED) else "plain"


def _mesh(given: Mapping[str, str]) -> tuple[int, int]:
    """Read (replicas, shards)."""
    gpus, strategy = _known(given, "gpus"), given["strategy"].lower()
    if strategy in ("zero0", "zero1", "no_shard", "ddp"):
        return gpus, 1
    if strategy not in ("full_shard", "shard_grad_op", "zero3", "zero2") and not (
        strategy.startswith("hybrid_shard")
    ):
        raise NotExpressible(f"strategy {given['strategy']!r} is not known")
    numbers = [int(each) for each in re.findall(r"\d+", given["mesh"])]
    if not strategy.startswith("hybrid"):
        return 1, gpus
    shards = numbers[-1] if len(numbers) == 2 else _number(given["gpus_per_node"], 8)
    return gpus // shards, shards


def _checkpointing(kind: str, layers: int) -> tuple[str, float]:
    """Read the way of checkpointing, and the share of layers that have it."""
    kind = kind or "none"
    way, _, number = kind.partition(":")
    if way in ("none", "full", "ops"):
        return way, 1.0
    if way == "layers" and number:
        return "full", 1.0 / int(number)
    if way == "first" and number:
        return "full", min(1.0, int(number) / layers)
    raise NotExpressible(f"checkpointing {kind!r} is not known")


def _gib(text: str, unit: str) -> float | None:
    """Read GiB from a number of GB, of 2**30 bytes as torch's users have them, or of MB."""
    if not text:
        return None
    return float(text) / (1024 if unit.upper().startswith("MB") else 1)


def _with_time(row: Row, given: Mapping[str, str], text: str) -> Row:
    """Return `row` with seconds of a step: as given, or from tokens or operations a second."""
    found = None
    if given["step_s"]:
        found = float(given["step_s"])
    elif given["tokens_s_gpu"]:
        found = row.tokens / float(given["tokens_s_gpu"])
    elif given["tflops_gpu"]:
        flops = model_flops(row.workload.shape, row.workload.seq) * row.tokens
        is_again = row.workload.checkpointing == "full"
        if is_again and (
            "hfu" in text or "recompute" in text or "recomputation" in text or row.is_chart
        ):
            flops *= 4 / 3
        found = flops / (float(given["tflops_gpu"]) * 1e12)
    return replace(row, measured_s=found)


def model_flops(shape: Shape, seq: int) -> float:
    """Operations of a token, forward and backward: 6 a parameter, and attention without a mask.

    Source: Chowdhery et al., "PaLM", 2022, appendix B.
    """
    return 6.0 * shape.num_parameters + 12.0 * shape.layers * shape.hidden * seq


def _number(text: str, otherwise: int) -> int:
    try:
        return int(float(text))
    except ValueError:
        return otherwise


def _known(given: Mapping[str, str], name: str) -> int:
    """Return a number that has to be there. Raises NotExpressible if it is not."""
    found = _number(given.get(name, ""), 0)
    if found < 1:
        raise NotExpressible(f"{name} is not told")
    return found
