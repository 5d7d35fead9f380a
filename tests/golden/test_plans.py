"""What `autoshard plan` says of Llama-3 8B on 8 H100: golden/plans/llama3_8b_8xh100_<torch>.txt.

Torch's decompositions differ a little by version, and so do times and activations.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan.planning import Choices, PlannedModel, plan
from autoshard.tools.plan.report import text

VERSION = ".".join(torch.__version__.split(".")[:2])
KNOWN = ("2.13", "2.15")  # on 2.11, transformers' Llama is more than one graph


def llama3_8b() -> nn.Module:
    import transformers as hf

    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            max_position_embeddings=8192,
            use_cache=False,
        )
    )


@pytest.mark.skipif(VERSION not in KNOWN, reason=f"no golden plan for torch {VERSION}")
@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("fake_world", [1024], indirect=True)
def test_llama3_8b(golden: Callable[[str, str], None]) -> None:
    planned = PlannedModel(
        name="Llama-3 8B",
        build=llama3_8b,
        batch=None,
        seq=4096,
        dtype="bf16",
        param_dtype="f32",
        optimizer="adamw",
        lowering="inductor",
    )
    choices = Choices(strategy="full_shard", micro_batches=(1,), checkpointing="none")
    report = plan(planned, Topology.load("h100"), 8, choices)
    golden(f"plans/llama3_8b_8xh100_torch{VERSION}.txt", text(report, with_buckets=True))


def test_every_file_is_read() -> None:
    folder = Path(__file__).resolve().parents[2] / "golden" / "plans"
    wanted = {f"llama3_8b_8xh100_torch{version}.txt" for version in KNOWN}
    assert {path.name for path in folder.iterdir()} == wanted
