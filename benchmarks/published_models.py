"""Models of published measurements, by their shapes: Llamas and MPTs, as their authors ran them.

Norms and rotary positions are a kernel each where a system has such kernels (`is_fused`), and as
many as plain PyTorch makes of them where it has none. No weights are ever made, and nothing is run:
these are traced on the meta device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a dense transformer.

    family: "llama", with a gate in its MLP and rotary positions, or "mpt", without either.
    inner: width of the MLP.
    keys: heads of keys and values.
    is_fused: whether norms and rotary positions are a kernel each.
    loss: how a Llama's is computed: "plain", "shifted" or "parallel".
    """

    family: str
    hidden: int
    inner: int
    heads: int
    keys: int
    layers: int
    vocabulary: int
    is_fused: bool
    loss: str

    @property
    def num_parameters(self) -> int:
        """Number of elements of all matrices; vectors are left out."""
        width = self.hidden // self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * self.keys * width
        if self.family == "llama":
            ends, products = 2, 3
        else:
            ends, products = 1, 2  # one matrix for both ends
        block = attention + products * self.hidden * self.inner
        return self.layers * block + ends * self.hidden * self.vocabulary

    def build(self, seq: int) -> nn.Module:
        """Build the model, for sequences of at most `seq` tokens, on the default device."""
        return Llama(self, seq) if self.family == "llama" else Mpt(self, seq)


def _linear(inward: int, outward: int) -> nn.Linear:
    return nn.Linear(inward, outward, bias=False)


# ---- kernels of a system's own: of which only sizes are known here


@torch.library.custom_op("published::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("published::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


@torch.library.custom_op("published::rotate", mutates_args=())
def rotate(x: Tensor, turns: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("published::cross_entropy", mutates_args=())
def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.new_empty(labels.shape, dtype=torch.float32)


@torch.library.custom_op("published::cross_entropy_backward", mutates_args=())
def cross_entropy_backward(grad: Tensor, logits: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _save_logits(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _loss_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.published.cross_entropy_backward(grad, *ctx.saved_tensors), None


def _save_norm(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _save_turns(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


def _norm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return torch.ops.published.rms_norm_backward(grad, *ctx.saved_tensors)


def _rotate_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return torch.ops.published.rotate(grad, *ctx.saved_tensors), None


rms_norm.register_fake(lambda x, weight: torch.empty_like(x))
rms_norm_backward.register_fake(
    lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight))
)
rotate.register_fake(lambda x, turns: torch.empty_like(x))
cross_entropy.register_fake(
    lambda logits, labels: logits.new_empty(labels.shape, dtype=torch.float32)
)
cross_entropy_backward.register_fake(lambda grad, logits: torch.empty_like(logits))
cross_entropy.register_autograd(_loss_backward, setup_context=_save_logits)
rms_norm.register_autograd(_norm_backward, setup_context=_save_norm)
rotate.register_autograd(_rotate_backward, setup_context=_save_turns)


# ---- Llama


class RmsNorm(nn.Module):
    def __init__(self, hidden: int, is_fused: bool) -> None:
        super().__init__()
        self.is_fused = is_fused
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        if self.is_fused:
            return rms_norm(x, self.weight)
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        return y.type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Turn pairs of elements of `x`, in float32, as Llama's authors do: as complex numbers."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def plain_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), ids.flatten())


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the loss as Transformers does: of a copy of the logits, without the last token."""
    wanted = logits.float()[:, :-1].contiguous()
    return F.cross_entropy(wanted.flatten(0, 1), ids[:, 1:].flatten())


def parallel_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Compute the loss as Megatron does, whose ranks may share a vocabulary: step by step."""
    shifted = logits.float() - logits.float().amax(-1, keepdim=True)
    powers = shifted.exp()
    return (powers.sum(-1).log() - shifted.gather(-1, ids[..., None])[..., 0]).mean()


LOSSES = {"plain": plain_loss, "shifted": shifted_loss, "parallel": parallel_loss}


class Llama(nn.Module):
    """Gives the mean loss of the next token, computed in float32."""

    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__()
        self.loss = shape.loss
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(LlamaBlock(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.hidden, shape.is_fused)
        self.head = _linear(shape.hidden, shape.vocabulary)
        width = shape.hidden // shape.heads
        turns = torch.empty(seq, width // 2, dtype=torch.complex64)
        self.register_buffer("turns", turns, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        turns = self.turns[None, :, None]
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, turns)
        return LOSSES[self.loss](self.head(self.norm(x)), ids)


class LlamaBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.width = width = shape.hidden // shape.heads
        self.repeats = shape.heads // shape.keys
        self.turn = rotate if shape.is_fused else rotated
        self.norm1 = RmsNorm(shape.hidden, shape.is_fused)
        self.q = _linear(shape.hidden, shape.heads * width)
        self.k = _linear(shape.hidden, shape.keys * width)
        self.v = _linear(shape.hidden, shape.keys * width)
        self.o = _linear(shape.hidden, shape.hidden)
        self.norm2 = RmsNorm(shape.hidden, shape.is_fused)
        self.gate = _linear(shape.hidden, shape.inner)
        self.up = _linear(shape.hidden, shape.inner)
        self.down = _linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (each(y).unflatten(-1, (-1, self.width)) for each in (self.q, self.k, self.v))
        q, k = self.turn(q, turns), self.turn(k, turns)
        if self.repeats > 1:
            k, v = (each.repeat_interleave(self.repeats, 2) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


# ---- MPT


class LayerNorm(nn.LayerNorm):
    """In the dtype of computation, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.bfloat16
        return F.layer_norm(x.to(low), self.normalized_shape, self.weight.to(low), None, self.eps)


class Mpt(nn.Module):
    """Gives the mean loss of the next token, computed in one kernel of logits as they are."""

    def __init__(self, shape: Shape, seq: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(seq, shape.hidden)
        self.blocks = nn.ModuleList(MptBlock(shape) for _ in range(shape.layers))
        self.norm = LayerNorm(shape.hidden, bias=False)
        self.register_buffer("places", torch.empty(1, seq, dtype=torch.long), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions(self.places)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embed.weight)
        return cross_entropy(logits.flatten(0, 1), ids.flatten()).mean()


class MptBlock(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm1 = LayerNorm(shape.hidden, bias=False)
        self.qkv = _linear(shape.hidden, 3 * shape.hidden)
        self.o = _linear(shape.hidden, shape.hidden)
        self.norm2 = LayerNorm(shape.hidden, bias=False)
        self.up = _linear(shape.hidden, shape.inner)
        self.down = _linear(shape.inner, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in parts)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))
