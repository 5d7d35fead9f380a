"""What hosts are given: attention by a flag, for transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autoshard.integrations.transformers import attention_by_flag

transformers = pytest.importorskip("transformers")


def _llama() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=64,
            use_cache=False,
        )
    )


def _masks(model: nn.Module, ids: torch.Tensor) -> list[bool]:
    """Compile `model`, and tell of each attention in its graph whether it gets a mask."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                assert node.kwargs["is_causal"] is (node.kwargs["attn_mask"] is None)
                found.append(node.kwargs["attn_mask"] is not None)
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(input_ids=ids)
    return found


def test_attention_by_flag() -> None:
    """A model that is compiled has no mask, and the logits that it had, but for rounding."""
    model, ids = _llama(), torch.arange(24).view(2, 12)
    before = model(input_ids=ids).logits
    model.set_attn_implementation(attention_by_flag())
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-5, atol=1e-6)
    assert _masks(model, ids) == [False, False]
