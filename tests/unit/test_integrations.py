"""What hosts are given: attention by a flag, for transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autoshard.integrations.transformers import attention_by_flag

transformers = pytest.importorskip("transformers")


def _llama(**changed: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    config = {**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    if changed:
        return transformers.MistralForCausalLM(transformers.MistralConfig(**config, **changed))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))


def _masks(model: nn.Module, **batch: torch.Tensor) -> list[bool]:
    """Compile `model`, and tell of each attention in its graph whether it gets a mask."""
    found: list[bool] = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Any:
        for node in gm.graph.nodes:
            if node.target is torch.nn.functional.scaled_dot_product_attention:
                assert node.kwargs["is_causal"] is (node.kwargs["attn_mask"] is None)
                found.append(node.kwargs["attn_mask"] is not None)
        return gm

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(**batch)
    return found


IDS = torch.arange(24).view(2, 12)
PADDED = torch.ones(2, 12, dtype=torch.long).index_fill(1, torch.arange(3), 0)  # on the left


def test_attention_by_flag() -> None:
    """A model that is compiled has no mask, and the logits that it had, but for rounding."""
    model = _llama()
    before = model(input_ids=IDS).logits
    model.set_attn_implementation(attention_by_flag())
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-5, atol=1e-6)
    assert _masks(model, input_ids=IDS) == [False, False]


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({}, {"attention_mask": PADDED}),
        ({"sliding_window": 4}, {}),
        ({}, {"position_ids": torch.arange(12).remainder(6).expand(2, 12)}),
    ],
    ids=["padded", "window", "packed"],
)
def test_other_masks_stay(changed: dict[str, Any], more: dict[str, torch.Tensor]) -> None:
    model = _llama(**changed)
    before = model(input_ids=IDS, **more).logits
    model.set_attn_implementation(attention_by_flag())
    after = model(input_ids=IDS, **more).logits
    kept = more.get("attention_mask", torch.ones(2, 12)).bool()
    torch.testing.assert_close(after[kept], before[kept], rtol=1e-5, atol=1e-6)
    plain = model(input_ids=IDS).logits if more else _llama()(input_ids=IDS).logits
    assert (plain[kept] - before[kept]).abs().max() > 1e-3  # it makes a difference
    if "position_ids" not in more:  # which, compiled, transformers can't tell from others
        assert _masks(model, input_ids=IDS, **more) == [True, True]
