"""Read what the command line says of a model, a cluster and a mesh."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from autoshard.passes.ir.layout import DTYPES
from autoshard.passes.planner.topology import Topology, default_topology, is_known, names
from autoshard.tools.plan.estimate import OPTIMIZERS
from autoshard.tools.plan.steps import PlannedModel


def read_model(options: Any, load: Callable[[str], Callable[..., Any]]) -> PlannedModel:
    """Read a model from the command line's options; it is not built yet.

    options: what is parsed, with the options of `add_workload`, `micro_batch`, `optimizer` and
        `lowering`. `model` is a Hugging Face configuration if such a file exists, or its name ends
        in ".json", else a function's place.
    load: returns the function at "package.module:name".
    Raises ValueError, naming the option, for what is not known, and as `from_hugging_face` does.
    """
    for name in ("dtype", "param_dtype", "reduce_dtype"):
        given = getattr(options, name)
        if given is not None and given not in DTYPES:
            flag = "--" + name.replace("_", "-")
            raise ValueError(f"{flag} {given!r}: expected one of {list(DTYPES)}")
    if options.optimizer not in OPTIMIZERS:
        raise ValueError(f"--optimizer {options.optimizer!r}: expected one of {list(OPTIMIZERS)}")
    for name in ("seq", "micro_batch", "accumulate"):
        value = getattr(options, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected a number from 1 on")
    path = Path(options.model)
    is_file = path.suffix == ".json" or path.exists()
    return PlannedModel(
        name=options.model,
        build=from_hugging_face(path) if is_file else load(options.model),
        batch=load(options.batch) if options.batch else None,
        seq=options.seq,
        dtype=options.dtype,
        param_dtype=options.param_dtype,
        optimizer=options.optimizer,
        lowering=options.lowering,
        reduce_dtype=options.reduce_dtype,
        is_amp=options.amp,
    )


def from_hugging_face(path: Path) -> Callable[[], nn.Module]:
    """Return a function that builds the model of a `config.json`, of the class that it names first.

    If it names none, or transformers has no such class, the model is a causal language model.
    `use_cache` is turned off. The file is read here, not when the model is built. Weights are not
    loaded.
    Raises ValueError if there is no such file, if it is no configuration, or if transformers is not
    installed.
    """
    if not path.exists():  # else it is taken for a name on the hub, and asked for there
        raise ValueError(f"{path} is no configuration of a Hugging Face model: no such file")
    try:
        import transformers
    except ImportError as error:
        raise ValueError(f"{path} needs transformers: pip install transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no configuration of a Hugging Face model: {error}") from None
    if hasattr(config, "use_cache"):
        config.use_cache = False  # no step of training has one
    names = getattr(config, "architectures", None) or []
    named = next((getattr(transformers, name, None) for name in names), None)

    def build() -> nn.Module:
        make: Any = named or transformers.AutoModelForCausalLM.from_config
        model: nn.Module = make(config)
        return model

    return build


def read_gpus(text: str, topology: str | None) -> tuple[int, Topology]:
    """Read a number of ranks and a topology from "64xH100", or "64" and a topology's name.

    topology: a name or a JSON file, which goes before the kind in `text`.
    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"(\d+)(?:x(\w+))?", text)
    number = int(found[1]) if found else 0
    if not found or not number:
        raise ValueError(f"--gpus {text!r}: expected a number and a kind, such as 64xH100")
    if topology is None and found[2] is None:
        raise ValueError(f"--gpus {text!r} names no kind: write {text}xH100, or add --topology")
    return number, Topology.load(topology or _topology_of(found[2]))


def _topology_of(kind: str) -> str:
    """Name of the topology for a kind of GPU, "h100" for "H100", or of this package's topologies.

    Raises ValueError for a kind of which none is known.
    """
    if kind.lower() in names():
        return kind.lower()
    if not is_known(kind):
        raise ValueError(
            f"no topology is known of {kind!r}, but of {', '.join(names())}: write one of these, "
            "or add --topology, a name or a file"
        )
    return default_topology(kind)


def read_network(text: str, topology: Topology) -> Topology:
    """Return `topology` with a network of a rate such as "800Gb/node" or "400Gb/gpu".

    Raises ValueError for anything else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)Gb/(node|gpu)", text)
    if found is None or float(found[1]) <= 0:
        raise ValueError(f"--network {text!r}: expected a rate such as 800Gb/node or 400Gb/gpu")
    ranks = topology.ranks_per_node if found[2] == "gpu" else 1
    return topology.with_network(float(found[1]) * ranks)


def read_mesh(text: str, gpus: int) -> tuple[int, int]:
    """Read (replicas, shards) from "2048x8", or from "8", shards alone: replicas then fill `gpus`.

    Raises ValueError for anything else. Whether the mesh has `gpus` ranks is not checked.
    """
    found = re.fullmatch(r"(?:(\d+)x)?(\d+)", text)
    if not found or int(found[2]) < 1:
        raise ValueError(f"--mesh {text!r}: expected replicas x shards, such as 2048x8")
    shards = int(found[2])
    return int(found[1]) if found[1] else gpus // shards, shards
