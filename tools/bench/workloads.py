"""Models that `autoshard bench step` trains: Llamas of three sizes, GPT-2, and a vision model.

Weights and batches are random, another batch on each rank. Sizes are those of a laptop on a CPU,
and larger on a GPU.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.integrations.transformers import attention_by_flag

VOCABULARY = 256
WIDEST_HEAD = 128  # of attention; FlashAttention is slower beyond, and takes none above 256


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its batches.

    hidden: the width.
    batch: samples of a rank.
    length: tokens of one sample; of a picture, patches.
    """

    hidden: int
    layers: int
    batch: int
    length: int


@dataclass(frozen=True)
class Workload:
    """Model to train, with its batches.

    build: makes an unsharded model.
    blocks: returns its repeated modules, a unit each.
    batch: makes the batch of a rank, by name.
    tokens: in the batch of one rank; of pictures, patches.
    """

    build: Callable[[], nn.Module]
    blocks: Callable[[Any], Sequence[nn.Module]]
    batch: Callable[[int], dict[str, Tensor]]
    tokens: int


SIZES: dict[str, dict[str, Sizes]] = {
    "cpu": {
        "small": Sizes(256, 8, 4, 128),
        "medium": Sizes(512, 6, 4, 128),
        "large": Sizes(768, 6, 4, 128),
        "gpt2": Sizes(384, 6, 4, 128),
        "vit": Sizes(192, 6, 8, 64),
    },
    "cuda": {
        "small": Sizes(1024, 16, 4, 2048),
        "medium": Sizes(2048, 16, 4, 2048),
        "large": Sizes(4096, 8, 2, 4096),
        "gpt2": Sizes(1024, 24, 8, 1024),
        "vit": Sizes(1024, 24, 32, 256),
    },
}
"""Sizes of the models, by kind of device and name."""


def read_workloads(names: Collection[str], device: str) -> dict[str, Workload]:
    """Look workloads up by name, with the sizes for `device`, "cuda" or any other.

    Raises ValueError, with all names, for an unknown name, and if transformers is not installed.
    """
    sizes = SIZES["cuda" if device == "cuda" else "cpu"]
    unknown = [name for name in names if name not in sizes]
    if unknown:
        raise ValueError(f"there is no model {unknown}; expected some of {list(sizes)}")
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("the models need transformers: pip install transformers")
    makers = {"gpt2": _gpt2, "vit": _vit}
    return {name: makers.get(name, llama)(sizes[name]) for name in names}


def llama(sizes: Sizes) -> Workload:
    """Make the workload of a Llama of these sizes, with all parts that a Llama has.

    The model itself is not built yet, here and in the others. Attention is told by a flag that it
    is causal, so that contestants which compile the whole model have the kernels of the others.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    by_flag: dict[str, Any] = {"attn_implementation": attention_by_flag()}
    heads = max(8, sizes.hidden // WIDEST_HEAD)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.hidden * 43 // 16,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=sizes.length,
        use_cache=False,
        **by_flag,
    )
    return _of_text(sizes, lambda: LlamaForCausalLM(config), lambda model: model.model.layers)


def _gpt2(sizes: Sizes) -> Workload:
    """Make the workload of a GPT-2 of these sizes, without dropout, with heads of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    others: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    others["attn_implementation"] = attention_by_flag()
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=sizes.hidden,
        n_layer=sizes.layers,
        n_head=sizes.hidden // 64,
        n_positions=sizes.length,
        use_cache=False,
        **others,
    )
    return _of_text(sizes, lambda: GPT2LMHeadModel(config), lambda model: model.transformer.h)


def _of_text(
    sizes: Sizes, build: Callable[[], nn.Module], blocks: Callable[[Any], Sequence[nn.Module]]
) -> Workload:
    """Make a workload of token ids, random and the same for a rank each time: inputs and labels."""

    def batch(rank: int) -> dict[str, Tensor]:
        source = torch.Generator().manual_seed(rank)
        ids = torch.randint(VOCABULARY, (sizes.batch, sizes.length), generator=source)
        return {"input_ids": ids, "labels": ids}

    return Workload(build, blocks, batch, sizes.batch * sizes.length)


def _vit(sizes: Sizes) -> Workload:
    """Make the workload of a vision transformer of these sizes: square pictures in 100 classes."""
    from transformers import ViTConfig, ViTForImageClassification

    patch = 8
    side = patch * round(sizes.length**0.5)
    labels: dict[str, Any] = {"num_labels": 100}
    config = ViTConfig(
        hidden_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 64,
        intermediate_size=4 * sizes.hidden,
        image_size=side,
        patch_size=patch,
        **labels,
        problem_type="single_label_classification",  # else its first forward writes it
    )

    def batch(rank: int) -> dict[str, Tensor]:
        """Make random pictures, f32[batch, 3, side, side], and labels, of `rank`."""
        source = torch.Generator().manual_seed(rank)
        pixels = torch.randn(sizes.batch, 3, side, side, generator=source)
        return {
            "pixel_values": pixels,
            "labels": torch.randint(100, (sizes.batch,), generator=source),
        }

    return Workload(
        lambda: ViTForImageClassification(config), _vit_blocks, batch, sizes.batch * sizes.length
    )


def _vit_blocks(model: Any) -> Sequence[nn.Module]:
    """List the modules of the model's first `nn.ModuleList`, its layers."""
    found = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list(found[0])
