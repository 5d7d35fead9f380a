"""PEFT in a loop of one's own, with its real package: adapters of a sharded model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hosts import launched, llama, num_bytes, texts
from support.ranks import on_ranks
from torch import nn

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
        dist.barrier()
        base = llama(bos_token_id=None, eos_token_id=None)
        check(PeftModel.from_pretrained(base, tmp_path / "adapters"), theirs)
        merged, want = ours.merge_and_unload(), theirs.merge_and_unload()
        check(merged, want)
        merged.save_pretrained(tmp_path / "merged")
        check(LlamaForCausalLM.from_pretrained(tmp_path / "merged"), want)


def stored(folder: Path, rank: int) -> Path:
    """Have rank 0 write the weights of a small Llama to `folder`."""
    if rank == 0:
        llama(bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    dist.barrier()
    return folder


def on_meta(config: Any) -> Any:
    """Make the small Llama without values, with adapters in it."""
    from peft import get_peft_model

    with torch.device("meta"):
        base = llama(bos_token_id=None, eos_token_id=None)
    return get_peft_model(base, config)


@pytest.mark.parametrize("form", ["eager", "compiled"])
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "LoRA of embeddings"])
@on_ranks(2)
def test_adapters_of_a_folder(rank: int, kind: str, form: str, tmp_path: Path) -> None:
    """Base and adapters are read into shards; at first the model is what the folder has."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForCausalLM

    targets = ["q_proj", "v_proj"]
    if kind == "LoRA of embeddings":
        targets += ["embed_tokens", "lm_head"]
    config = LoraConfig(r=4, target_modules=targets, use_dora=kind == "DoRA")
    with launched(rank):
        folder = stored(tmp_path / "base", rank)
        ours = on_meta(config)
        if form == "compiled":
            ours.compile(backend="autoshard", options={"lowering": "eager"})
        torch.manual_seed(rank)  # rank 0's numbers count
        read = autoshard.load_pretrained(ours, folder)
        assert not read.missing
        assert not read.unexpected
        ids = texts(1)[0][None]
        base = LlamaForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            found, want = ours(input_ids=ids).logits, base(input_ids=ids).logits
        if kind == "DoRA":  # which scales by a quotient that is one up to rounding
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(found, want)
        theirs = get_peft_model(base, config)
        names = {name for name, param in theirs.named_parameters() if param.requires_grad}
        state = autoshard.full_state_dict(ours)
        assert all("lora_A" not in name or state[name].std() > 0.01 for name in names)
        for name in names:
            if "lora_B" in name or "lora_embedding_A" in name:
                assert not state[name].any()
        if kind == "DoRA":
            for name in names:
                if "magnitude" in name:
                    assert torch.equal(state[name], theirs.state_dict()[name])
        theirs.load_state_dict(state)
        assert train(ours) == pytest.approx(train(theirs), rel=1e-6)
        ours.save_pretrained(tmp_path / "adapters")
        dist.barrier()
        again = on_meta(config)
        autoshard.load_pretrained(again, folder)
        autoshard.load_pretrained(again, tmp_path / "adapters")
        found, want = autoshard.full_state_dict(again), autoshard.full_state_dict(ours)
        assert found.keys() == want.keys()
        assert all(torch.equal(found[name], want[name]) for name in want)


@on_ranks(2)
def test_modules_that_are_trained_whole(rank: int, tmp_path: Path) -> None:
    """A module and its copy that is trained begin alike, whether files have it or not."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaForSequenceClassification

    with launched(rank):
        folder = stored(tmp_path / "base", rank)
        config = llama().config
        config.num_labels = 3
        with torch.device("meta"):
            base = LlamaForSequenceClassification(config)
        saved = ["score", "norm"]
        model = get_peft_model(
            base, LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=saved)
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # rank 0 tells of both
            read = autoshard.load_pretrained(model, folder, strict=False)
        assert read.missing == ("score.weight",)
        assert read.unexpected == ("lm_head.weight",)
        state = autoshard.full_state_dict(model)
        for path in ("model.norm", "score"):
            path = f"base_model.model.{path}"
            own = state[f"{path}.original_module.weight"]
            assert own.any()
            assert torch.equal(own, state[f"{path}.modules_to_save.default.weight"])
        model.save_pretrained(tmp_path / "adapters")
        dist.barrier()
        with torch.no_grad():
            for param in model.parameters():
                if param.requires_grad:
                    param.zero_()
        autoshard.load_pretrained(model, tmp_path / "adapters")
        found = autoshard.full_state_dict(model)
        assert all(torch.equal(found[name], its) for name, its in state.items())
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            autoshard.load_pretrained(model, folder, strict=False)
        kept = autoshard.full_state_dict(model)  # what was trained is not loaded over
        for path in ("model.norm", "score"):
            path = f"base_model.model.{path}"
            assert kept[f"{path}.original_module.weight"].any()
            assert not kept[f"{path}.modules_to_save.default.weight"].any()


@on_ranks(2)
def test_adapters_that_were_trained(rank: int, tmp_path: Path) -> None:
    """What PEFT could not read into a model on meta stays there, until it is loaded."""
    from peft import LoraConfig, PeftModel

    with launched(rank):
        folder = stored(tmp_path / "base", rank)
        ours = on_meta(LoraConfig(r=4, target_modules=["q_proj"]))
        autoshard.load_pretrained(ours, folder)
        train(ours)
        ours.save_pretrained(tmp_path / "adapters")
        dist.barrier()
        with torch.device("meta"):
            base = llama(bos_token_id=None, eos_token_id=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch: nothing is copied
            model = PeftModel.from_pretrained(base, tmp_path / "adapters")
        autoshard.load_pretrained(model, folder)
        ids = texts(1)[0][None]
        with pytest.raises(
            RuntimeError, match=r"lora_A.* for adapters that were trained also with"
        ):
            model(input_ids=ids)
        autoshard.load_pretrained(model, tmp_path / "adapters")
        with torch.no_grad():
            found, want = (each(input_ids=ids).logits for each in (model.eval(), ours.eval()))
        assert torch.equal(found, want)


@pytest.mark.parametrize("way", ["shard", "compile", "prepare"])
@on_ranks(2)
def test_a_base_that_is_not_loaded(rank: int, way: str) -> None:
    """A frozen base of random values is an error, before anything is sharded."""
    from accelerate import Accelerator
    from peft import LoraConfig

    from autoshard.integrations.accelerate import with_autoshard

    with launched(rank):
        ways: dict[str, Callable[[Any], object]] = {
            "shard": autoshard.shard,
            "compile": lambda model: torch.compile(model, backend="autoshard")(input_ids=ids),
            "prepare": with_autoshard(Accelerator()).prepare,
        }
        ids = texts(1)[0][None]
        model = on_meta(LoraConfig(r=4, target_modules=["q_proj"]))
        with pytest.raises(ValueError, match=r"q_proj is an adapter around weights on the meta"):
            ways[way](model)


@on_ranks(2)
def test_adapters_around_a_sharded_model(rank: int) -> None:
    """Accelerate is told that adapters come first."""
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    from autoshard.integrations.accelerate import with_autoshard

    with launched(rank):
        model = get_peft_model(autoshard.shard(llama()), LoraConfig(target_modules=["q_proj"]))
        with pytest.raises(ValueError, match=r"PeftModel is not sharded, and a part .*come first"):
            with_autoshard(Accelerator()).prepare(model)


@on_ranks(2)
def test_a_peft_model_is_no_whole_model(rank: int, tmp_path: Path) -> None:
    """Its adapters are saved by itself."""
    with launched(rank):
        model = autoshard.shard(adapted("LoRA"))
        with pytest.raises(ValueError, match=r"saved by model.save_pretrained\(folder\)"):
            autoshard.save_pretrained(model, tmp_path)


@on_ranks(2)
def test_adapters_that_are_refused(rank: int, tmp_path: Path) -> None:
    """What has no first values without its weights is refused, before the model is changed."""
    from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model

    def refused(config: Any, match: str) -> None:
        model = on_meta(config)
        with pytest.raises(Exception, match=match):
            autoshard.load_pretrained(model, folder)
        assert all(param.is_meta for param in model.parameters())

    with launched(rank):
        folder = stored(tmp_path / "base", rank)
        its = {"target_modules": ["q_proj"]}
        refused(LoraConfig(r=4, init_lora_weights="eva", **its), "'eva', which takes .*weights")
        refused(IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "is a Linear, and on")
        prompts = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
        with torch.device("meta"):
            refused(prompts, r"prompt_encoder.* not inside the model: build")
        model = get_peft_model(llama(), LoraConfig(r=4, **its))
        model.add_adapter("second", LoraConfig(r=4, **its))
        autoshard.shard(model)
        model.save_pretrained(tmp_path, selected_adapters=["second"])
        dist.barrier()
        with pytest.raises(Exception, match=r"\['default', 'second'\], and the folder is of one"):
            autoshard.load_pretrained(model, tmp_path / "second")
        other = autoshard.shard(get_peft_model(llama(), LoraConfig(r=4, lora_alpha=32, **its)))
        with pytest.raises(Exception, match="lora_alpha=8, not 32 as the model's adapter"):
            autoshard.load_pretrained(other, tmp_path / "second")
        inside = nn.Sequential(on_meta(LoraConfig(r=4, **its)))
        with pytest.raises(Exception, match="has an adapter, and Sequential no peft_config: give"):
            autoshard.load_pretrained(inside, folder, strict=False)
