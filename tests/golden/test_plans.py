"""What `autoshard plan` says of Llama-3 8B on 8 H100: golden/plans/llama3_8b_8xh100.txt.

On torch 2.11, whose decompositions differ a little, llama3_8b_8xh100_torch2.11.txt.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from autoshard.passes.planner.topology import Topology
from autoshard.tools.plan.planning import Choices, PlannedModel, plan
from autoshard.tools.plan.report import text

SUFFIX = "_torch2.11" if torch.__version__.startswith("2.11") else ""


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
    golden(f"plans/llama3_8b_8xh100{SUFFIX}.txt", text(report, with_buckets=True))
