"""Train a vision transformer with Lightning, the model sharded.

    pip install 'autoshard[hosts]'
    torchrun --standalone --nproc-per-node 2 examples/vit_lightning.py

The images are made here: a bright square in one of four corners, to be told which.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy
from transformers import ViTConfig, ViTForImageClassification

from autoshard.integrations.lightning import AutoshardStrategy


class Corners(lightning.LightningModule):
    """ViT that tells in which corner of an image the square is."""

    def __init__(self) -> None:
        super().__init__()
        config = ViTConfig(
            image_size=32,
            patch_size=8,
            hidden_size=64,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=128,
            num_labels=4,
            hidden_dropout_prob=0.0,
        )
        torch.manual_seed(0)
        self.model = ViTForImageClassification(config)
        self.accuracy = MulticlassAccuracy(4)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> Tensor:
        images, labels = batch
        loss: Tensor = self.model(pixel_values=images, labels=labels).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        images, labels = batch
        self.accuracy(self.model(pixel_values=images).logits, labels)
        self.log("accuracy", self.accuracy)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def images(number: int, seed: int) -> Dataset[Any]:
    """Make noisy images with a bright square in a corner, and the corners."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(number, 3, 32, 32, generator=generator)
    corners = torch.randint(0, 4, (number,), generator=generator)
    for image, corner in zip(found, corners.tolist(), strict=True):
        row, column = divmod(corner, 2)
        image[:, 16 * row + 4 : 16 * row + 12, 16 * column + 4 : 16 * column + 12] += 4.0
    return TensorDataset(found, corners)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("corners"))
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()

    trainer = lightning.Trainer(
        strategy=AutoshardStrategy(bucketing="auto"),
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),  # as many as torchrun has started
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=options.epochs,
        gradient_clip_val=1.0,
        default_root_dir=options.out,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    module, saved = Corners(), options.out / "last.ckpt"
    batches = [DataLoader(images(*size), batch_size=16) for size in ((2048, 0), (256, 1))]
    trainer.fit(module, *batches, ckpt_path=saved if saved.exists() else None)
    trainer.save_checkpoint(saved)  # by all ranks; run it again with more epochs to go on
    if trainer.is_global_zero:
        print(f"accuracy {trainer.callback_metrics['accuracy']:.3f}")


if __name__ == "__main__":
    main()
