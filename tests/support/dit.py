"""A diffusion transformer: patches of a noisy image, blocks modulated by the time, the noise.

Source: Peebles and Xie, Scalable Diffusion Models with Transformers, 2023, adaLN-Zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

NUM_TIMES, NUM_LABELS = 1000, 5


class DiT(nn.Module):
    """Predicts the noise in f32[images, 3, size, size], given times and labels, i64[images]."""

    def __init__(
        self, dim: int = 32, layers: int = 2, heads: int = 4, size: int = 16, patch: int = 4
    ) -> None:
        super().__init__()
        self.patch = patch
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, dim))
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.label = nn.Embedding(NUM_LABELS, dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.modulation = _zeros(nn.Linear(dim, 2 * dim))
        self.out = _zeros(nn.Linear(dim, 3 * patch * patch))

    def forward(self, images: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        condition = self.time(sinusoids(times, x.shape[-1])) + self.label(labels)
        condition = functional.silu(condition)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(condition).chunk(2, dim=-1)
        x = self.out(modulate(self.norm(x), shift, scale))
        return functional.fold(
            x.transpose(1, 2), images.shape[-2:], kernel_size=self.patch, stride=self.patch
        )


class DiTBlock(nn.Module):
    """Attention and an MLP, each shifted, scaled and gated; gates are zero at first."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim, elementwise_affine=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim, elementwise_affine=False)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.modulation = _zeros(nn.Linear(dim, 6 * dim))

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition).chunk(6, dim=-1)
        x = x + gate1.unsqueeze(1) * self.attend(modulate(self.norm1(x), shift1, scale1))
        hidden = functional.gelu(
            self.up(modulate(self.norm2(x), shift2, scale2)), approximate="tanh"
        )
        return x + gate2.unsqueeze(1) * self.down(hidden)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def sinusoids(times: Tensor, dim: int) -> Tensor:
    """i64[n] -> f32[n, dim]: cosines and sines, of periods up to 10000."""
    steps = torch.arange(dim // 2, device=times.device) / (dim // 2)
    angles = times[:, None] * torch.exp(-math.log(10000.0) * steps)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def dit_loss(model: Any, rank: int, step: int) -> Tensor:
    """How far off the noise is, in images of this rank's own, each at a time of its own."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    clean, noise = torch.randn(2, 2, 3, 16, 16, generator=generator)
    times = torch.randint(0, NUM_TIMES, (2,), generator=generator)
    labels = torch.randint(0, NUM_LABELS, (2,), generator=generator)
    kept = (torch.cos(times / NUM_TIMES * math.pi / 2) ** 2).view(-1, 1, 1, 1)
    noisy = kept.sqrt() * clean + (1 - kept).sqrt() * noise
    return functional.mse_loss(model(noisy, times, labels), noise)


def _zeros(linear: nn.Linear) -> nn.Linear:
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
