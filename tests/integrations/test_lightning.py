"""Lightning's Trainer and Fabric, with the real package: DDP's losses, resumed as they went."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.hosts import WORDS, launched, llama, loader, training_bytes
from support.ranks import on_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

lightning = pytest.importorskip(
    "lightning", reason="Lightning is not installed: pip install '.[hosts]'"
)
import torchmetrics  # noqa: E402  # it comes with Lightning, without which all is skipped

EAGER = {"lowering": "eager"}


class Module(lightning.LightningModule):
    """Small Llama with a schedule and a metric; notes losses, and which backwards reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.model = llama()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(WORDS, average="micro")
        self.losses: list[float] = []
        self.reduced: list[bool] = []

    def on_after_backward(self) -> None:
        grad = self.model.lm_head.weight.grad  # zeros while it waits to be reduced
        self.reduced.append(bool((grad.to_local() if isinstance(grad, DTensor) else grad).any()))

    def training_step(self, ids: Tensor, number: int) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=ids).loss
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.losses.append(mean.item() / 2)
        return loss

    def validation_step(self, ids: Tensor, number: int) -> None:
        out = self.model(input_ids=ids, labels=ids)
        self.accuracy(out.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        self.log("accuracy", self.accuracy)
        self.log("loss", out.loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 4)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def fit(
    strategy: Any, folder: Path, epochs: int, resumed: Path | None = None
) -> tuple[Module, dict[str, float], Any]:
    """Train a `Module`, an epoch of which has four steps; return it, metrics, and the trainer."""
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )
    trainer.fit(module, loader(32), ckpt_path=resumed)
    (metrics,) = trainer.validate(module, loader(8), verbose=False)
    return module, metrics, trainer


@on_ranks(2)
def test_a_module(rank: int, tmp_path: Path) -> None:
    """Trained by its name: losses and metrics are DDP's, for half the memory."""
    import autoshard.integrations.lightning  # noqa: F401  # registers the name

    with launched(rank) as gradients:
        ddp, want, trainer = fit("ddp", tmp_path, 1)
        memory = training_bytes(ddp, trainer.optimizers[0], gradients)
    with launched(rank) as gradients:
        ours, found, trainer = fit("autoshard", tmp_path, 1)
    assert ours.reduced == [False, True] * 4  # of two microbatches the second
    assert ours.losses == pytest.approx(ddp.losses, rel=1e-4)  # Inductor rounds in another order
    assert found == pytest.approx(want, rel=1e-4)
    assert training_bytes(ours, trainer.optimizers[0], gradients) <= (1 / 2 + 0.1) * memory
    ours.model.save_pretrained(tmp_path / "model")  # by all ranks, each its part
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, param in ours.model.named_parameters():
        assert torch.equal(param.full_tensor(), loaded[name])


@pytest.mark.parametrize("form", ["a file for each rank", "one file"])
@on_ranks(2)
def test_checkpoints(rank: int, form: str, tmp_path: Path) -> None:
    """A run from a checkpoint goes on as the one that wrote it."""
    from autoshard.integrations.lightning import AutoshardStrategy

    def strategy() -> Any:
        return AutoshardStrategy(
            save_distributed_checkpoint=form != "one file", lowering="eager", bucketing="per_unit"
        )

    saved = tmp_path / "last.ckpt"
    with launched(rank):
        *_, trainer = fit(strategy(), tmp_path, 1)
        trainer.save_checkpoint(saved)
    assert saved.is_file() == (form == "one file")
    with launched(rank):
        whole, want, _ = fit(strategy(), tmp_path, 2)
    with launched(rank):
        rest, found, _ = fit(strategy(), tmp_path, 2, resumed=saved)
    assert rest.losses == whole.losses[8:]
    assert found == want


@on_ranks(2)
def test_fabric(rank: int, tmp_path: Path) -> None:
    """Accumulated, clipped, saved and loaded: losses are DDP's."""
    from autoshard.integrations.lightning import AutoshardFabricStrategy

    def train(
        strategy: Any, first: int, last: int, saved: Path | None = None
    ) -> tuple[list[float], int]:
        fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
        fabric.launch()
        model = fabric.setup_module(llama())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        batches = fabric.setup_dataloaders(loader(32))
        if saved is not None:
            fabric.load(saved, {"model": model, "optimizer": optimizer})
        losses = []
        for number, ids in enumerate(batches):
            if not first <= number < last:
                continue
            with fabric.no_backward_sync(model, enabled=number % 2 == 0):
                loss = model(input_ids=ids, labels=ids).loss
                fabric.backward(loss)
            if number % 2:
                fabric.clip_gradients(model, optimizer, max_norm=0.5)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(fabric.all_reduce(loss.detach()).item())
            if number == 3 and strategy != "ddp":
                fabric.save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
        return losses, training_bytes(model, optimizer, gradients)

    with launched(rank) as gradients:
        want, whole = train("ddp", 0, 8)
    with launched(rank) as gradients:
        found, part = train(AutoshardFabricStrategy(**EAGER), 0, 8)
    assert found == pytest.approx(want, rel=1e-6)
    assert part <= (1 / 2 + 0.1) * whole
    with launched(rank) as gradients:
        rest, _ = train(AutoshardFabricStrategy(**EAGER), 4, 8, tmp_path / "saved")
    assert rest == found[4:]
