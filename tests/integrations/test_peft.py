"""PEFT in a loop of one's own, with its real package: adapters of a sharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.hosts import launched, llama, num_bytes, texts
from support.ranks import on_ranks

import autoshard

pytest.importorskip("peft", reason="PEFT is not installed: pip install '.[hosts]'")


def adapted(kind: str) -> Any:
    """Make a small Llama with adapters, always of the same values."""
    from peft import LoraConfig, get_peft_model

    base = llama(bos_token_id=None, eos_token_id=None)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=kind == "DoRA")
    return get_peft_model(base, config)


def train(model: Any) -> list[float]:
    """Train the adapters on the same text on all ranks; return the losses."""
    ids, losses = texts(1)[0][None], []
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check(ours: Any, theirs: Any) -> None:
    """Compare losses, and words that both generate."""
    ids = texts(2)[1][None]
    for each in (ours, theirs):
        each.eval()
    with torch.no_grad():
        found, want = (each(input_ids=ids, labels=ids).loss.item() for each in (ours, theirs))
        assert found == pytest.approx(want, rel=1e-6)
        settings = {"input_ids": ids[:, :4], "max_new_tokens": 4, "do_sample": False}
        assert torch.equal(ours.generate(**settings), theirs.generate(**settings))


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
@on_ranks(2)
def test_adapters(rank: int, kind: str, form: str, tmp_path: Path) -> None:
    """Trained, saved and loaded; merged, saved and loaded: as the model that is not sharded."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    with launched(rank):
        theirs, ours = adapted(kind), autoshard.shard(adapted(kind))
        if form == "compiled":
            ours.compile(backend="autoshard", options={"lowering": "eager"})
        assert num_bytes(ours.parameters()) <= (1 / 2 + 0.1) * num_bytes(theirs.parameters())
        assert train(ours) == pytest.approx(train(theirs), rel=1e-6)
        autoshard.register_forward_method(ours, "generate")
        check(ours, theirs)
        ours.save_pretrained(tmp_path / "adapters")
        torch.distributed.barrier()
        base = llama(bos_token_id=None, eos_token_id=None)
        check(PeftModel.from_pretrained(base, tmp_path / "adapters"), theirs)
        merged, want = ours.merge_and_unload(), theirs.merge_and_unload()
        check(merged, want)
        merged.save_pretrained(tmp_path / "merged")
        check(LlamaForCausalLM.from_pretrained(tmp_path / "merged"), want)
