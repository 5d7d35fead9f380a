"""Hugging Face's Trainer and TRL's, with the real packages: DDP's losses, resumed as they went."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hosts import launched, lines, llama, num_bytes, texts, tokenizer, training_bytes
from support.ranks import on_ranks

REASON = "{} is not installed: pip install '.[hosts]'"
pytest.importorskip("accelerate", reason=REASON.format("Accelerate"))

EAGER = {"lowering": "eager"}
SETTINGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "logging_steps": 1,
    "save_steps": 2,
    "report_to": [],
    "use_cpu": True,
    "disable_tqdm": True,
}


def trainer(folder: Path, options: dict[str, Any] | None, **settings: Any) -> Any:
    """Make transformers' Trainer of a small Llama, or ours if there are `options`."""
    from transformers import Trainer, TrainingArguments

    from autoshard.integrations.trainer import AutoshardTrainer

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        **SETTINGS,
        **settings,
    )
    rows = [{"input_ids": text, "labels": text} for text in texts(24)]
    data = {"train_dataset": rows[:16], "eval_dataset": rows[16:]}
    if options is None:
        return Trainer(llama(), args=arguments, **data)
    return AutoshardTrainer(llama(), args=arguments, autoshard=options, **data)


def losses(trained: Any) -> list[float]:
    """Losses that were logged, of training and of evaluation."""
    logged = (each.get("loss", each.get("eval_loss")) for each in trained.state.log_history)
    return [each for each in logged if each is not None]


@on_ranks(2)
def test_train_evaluate_and_predict(rank: int, tmp_path: Path) -> None:
    """Losses, the best checkpoint and predictions are DDP's, for half the memory."""
    with launched(rank) as gradients:
        ddp = trainer(tmp_path / "ddp", None, load_best_model_at_end=True)
        ddp.train()
        memory = training_bytes(ddp.model, ddp.optimizer, gradients)
        want = ddp.predict(ddp.eval_dataset)
    with launched(rank) as gradients:
        ours = trainer(tmp_path / "ours", EAGER, load_best_model_at_end=True)
        ours.train()
        found = ours.predict(ours.eval_dataset)
        again = ours.evaluate()["eval_loss"]
    assert losses(ours)[: len(losses(ddp))] == pytest.approx(losses(ddp), rel=1e-6)
    assert ours.state.best_global_step == ddp.state.best_global_step
    assert again == pytest.approx(ours.state.best_metric, rel=1e-6)  # the best model is loaded
    assert torch.tensor(found.predictions).allclose(torch.tensor(want.predictions), atol=1e-5)
    assert training_bytes(ours.model, ours.optimizer, gradients) <= (1 / 2 + 0.1) * memory


@on_ranks(2)
def test_resumed(rank: int, tmp_path: Path) -> None:
    """A run from a checkpoint goes on as the one that wrote it; evaluation alone shards, too."""
    with launched(rank):
        whole = trainer(tmp_path, EAGER)
        whole.train()
    with launched(rank):
        rest = trainer(tmp_path / "rest", EAGER)
        rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(rest) == losses(whole)
    with launched(rank):
        alone = trainer(tmp_path, EAGER)
        first = alone.evaluate()["eval_loss"]
        rows = [{key: value[None] for key, value in row.items()} for row in alone.eval_dataset]
        with torch.no_grad():
            want = torch.stack([llama()(**row).loss for row in rows]).mean()
    assert first == pytest.approx(want.item(), rel=1e-6)
    kept = num_bytes(alone.model.parameters())
    assert kept <= (1 / 2 + 0.1) * num_bytes(llama().parameters())


@on_ranks(2)
def test_saved(rank: int, tmp_path: Path) -> None:
    """`save_model` writes the whole model, as transformers loads it, whatever checkpoints are."""
    from transformers import LlamaForCausalLM

    with launched(rank):
        trained = trainer(tmp_path, EAGER)
        trained.train()
        trained.save_model(str(tmp_path / "final"))
        state = trained.accelerator.get_state_dict(trained.model)
    if rank == 0:
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "final").state_dict()
        assert all(torch.equal(value, state[name]) for name, value in loaded.items())
        assert (tmp_path / "final" / "training_args.bin").is_file()
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()
    with launched(rank):
        trainer(tmp_path / "only", EAGER, save_only_model=True).train()
    assert (tmp_path / "only" / "checkpoint-4" / "model.safetensors").is_file()
    with launched(rank), pytest.raises(ValueError, match="leave save_only_model or"):
        trainer(tmp_path, EAGER, save_only_model=True, load_best_model_at_end=True)


def tuner(folder: Path, options: dict[str, Any] | None, adapters: str) -> Any:
    """Make TRL's SFTTrainer of a small Llama, with LoRA, DoRA or neither."""
    from peft import LoraConfig
    from trl import SFTConfig, SFTTrainer

    from autoshard.integrations.trainer import AutoshardMixin

    class Tuner(AutoshardMixin, SFTTrainer):
        """TRL's trainer, with autoshard."""

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=adapters == "DoRA")
    given = {
        "args": SFTConfig(
            output_dir=str(folder), max_steps=4, max_length=16, bf16=False, **SETTINGS
        ),
        "train_dataset": lines(24),
        "processing_class": tokenizer(),
        "peft_config": lora if adapters != "none" else None,
    }
    if options is None:
        return SFTTrainer(llama(), **given)
    return Tuner(llama(), autoshard=options, **given)


@pytest.mark.skipif(find_spec("trl") is None, reason=REASON.format("TRL"))
@pytest.mark.parametrize("adapters", ["none", "LoRA", "DoRA"])
@on_ranks(2)
def test_fine_tuning(rank: int, adapters: str, tmp_path: Path) -> None:
    """TRL, and PEFT with it: losses are DDP's; resumed; saved, loaded, merged; and it generates."""
    ids = texts(1)[0][None]
    with launched(rank) as gradients:
        ddp = tuner(tmp_path / "ddp", None, adapters)
        ddp.train()
        memory = training_bytes(ddp.model, ddp.optimizer, gradients)
        want = answer(ddp.accelerator.unwrap_model(ddp.model), ids)
    with launched(rank) as gradients:
        ours = tuner(tmp_path / "ours", EAGER, adapters)
        ours.train()
        assert training_bytes(ours.model, ours.optimizer, gradients) <= (1 / 2 + 0.1) * memory
        ours.save_model(str(tmp_path / "final"))
        assert answer(ours.accelerator.unwrap_model(ours.model), ids) == want
        with torch.no_grad():
            loss = ours.model(input_ids=ids, labels=ids).loss.item()
        dist.barrier()
    assert losses(ours) == pytest.approx(losses(ddp), rel=1e-6)
    loaded = read(tmp_path / "final", adapters)
    with torch.no_grad():
        assert loaded(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-6)
        if adapters != "none":
            merged = loaded.merge_and_unload()
            assert merged(input_ids=ids, labels=ids).loss.item() == pytest.approx(loss, rel=1e-6)
    with launched(rank):
        rest = tuner(tmp_path / "rest", EAGER, adapters)
        rest.train(resume_from_checkpoint=str(tmp_path / "ours" / "checkpoint-2"))
    assert losses(rest) == losses(ours)


def answer(model: Any, ids: torch.Tensor) -> list[int]:
    """Words that `model` puts after `ids`, without chance."""
    model.eval()
    with torch.no_grad():
        words = model.generate(input_ids=ids[:, :4], max_new_tokens=5, do_sample=False)
    found: list[int] = words[0].tolist()
    return found


def read(folder: Path, adapters: str) -> Any:
    """Read what was saved, as their users do."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    if adapters == "none":
        return LlamaForCausalLM.from_pretrained(folder)
    return PeftModel.from_pretrained(llama(), folder)
