"""Names in traces: which spans are collectives, which is around one, and how many bytes one sends.

They are those of torch 2.11 to 2.15: of NCCL's kernels, of c10d's operations and works
("gloo:all_gather"), and of annotations by FSDP1, FSDP2, DDP and autoshard.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

KINDS = (
    ("reduce", re.compile("reduce_?scatter")),
    ("all_reduce", re.compile("all_?reduce")),
    ("gather", re.compile("gather")),
    ("reduce", re.compile("reduce")),
    ("broadcast", re.compile("broadcast")),
    ("exchange", re.compile("all_?to_?all")),
    ("message", re.compile("send|recv")),
)
"""Kinds of collectives, with what their names have in them; the first that fits counts."""

WORK = re.compile(r"\w+:_?(?:\w*(?:gather|reduce|scatter|broadcast|to_?all|send|recv)\w*)$")
"""Title of a work of c10d: its backend, and what it does."""

AROUND = re.compile(
    r"FSDP::(?!root_|cast_|inputs_)|fsdp::|FullyShardedDataParallel\._|autoshard::"
    r"|_?c10d(?:_functional)?::|nccl:|torch::distributed::reducer::|record_param_comms"
)
"""Beginning of annotations and operations that launch, wait for or copy for collectives."""

PLAIN = re.compile(r"_?c10d|nccl:|record_param_comms")
"""Beginning of those of them that name no module."""

COPY = re.compile("chunk_cat|split_with_sizes_copy")
"""Kernels that copy for collectives, whoever launches them."""

MAYBE_COPY = re.compile(r"Memcpy|CatArrayBatchedCopy|direct_copy_kernel|\bcopy")
"""Kernels that do so if they are not where the model computes."""

STEP = re.compile(r"ProfilerStep#?")
COMPILED = "## Call CompiledFxGraph"

OPERATION = re.compile(r"(?!autograd::|torch::|profiler::)\w+::")
"""Beginning of operations that compute, if they are not around a collective."""

SIZES = {
    **dict.fromkeys(("double", "float64", "long", "long int", "int64"), 8),
    **dict.fromkeys(("half", "c10::half", "float16", "bfloat16", "c10::bfloat16", "short"), 2),
    **dict.fromkeys(("byte", "char", "unsigned char", "signed char", "bool"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), 1),
}
"""Bytes of dtypes, in lower case; those of all others are 4."""


@functools.cache
def is_work(name: str) -> bool:
    """Tell whether a span is a work of c10d, by its title."""
    return WORK.match(name) is not None


@functools.cache
def is_around(name: str) -> bool:
    """Tell whether a span launches, waits for or copies for collectives."""
    return AROUND.match(name) is not None


@functools.cache
def is_operation(name: str) -> bool:
    """Tell whether an operation computes, if it is not around a collective."""
    return OPERATION.match(name) is not None


@functools.cache
def kind_of(name: str) -> str:
    """Find the kind of a collective by its name, of a kernel, an operation or an annotation."""
    lower = name.lower()
    return next((kind for kind, pattern in KINDS if pattern.search(lower)), "collective")


def is_collective_kernel(name: str, args: dict[str, Any]) -> bool:
    """Tell whether a device's kernel is a collective, by its name or what c10d says of it."""
    return "Collective name" in args or name.startswith(("nccl", "rccl", "ncclDevKernel"))


def kernel_bytes(args: dict[str, Any]) -> int:
    """Return the bytes of the larger side of a kernel of NCCL; 0 if it doesn't say."""
    sizes = [args.get(f"{side} msg nelems") for side in ("In", "Out")]
    largest = max((0, *(each for each in sizes if isinstance(each, int))))
    return largest * SIZES.get(str(args.get("dtype")).lower(), 4)


def operation_bytes(args: dict[str, Any]) -> int:
    """Return the bytes of the largest input of an operation; 0 if shapes were not recorded.

    args: of the profiler's event. A list of tensors is one input; elements of a dtype that is not
        in `SIZES` count 4 bytes.
    """
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list):
        return 0
    types = types if isinstance(types, list) and len(types) == len(shapes) else [""] * len(shapes)
    sizes = (SIZES.get(str(each).lower(), 4) for each in types)
    found = (_numel(shape) * size for shape, size in zip(shapes, sizes, strict=True))
    return max((0, *found))


def _numel(shape: Any) -> int:
    """Count the elements of a tensor of this shape; of a list of shapes, of all of them."""
    if not isinstance(shape, Sequence) or isinstance(shape, str) or not shape:
        return 0
    if all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return sum(map(_numel, shape))
