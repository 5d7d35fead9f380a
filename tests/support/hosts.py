"""Ranks as a launcher starts them, for the libraries that train: they go by the environment."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

WORDS, LENGTH, BATCH = 64, 16, 2


@contextmanager
def launched(rank: int) -> Iterator[list[int]]:
    """Environment of torchrun, for what is called inside; Accelerate's state is new, and ends.

    Gives a list that gets, for each step of an optimizer, the bytes of this rank's gradients.
    """
    from accelerate.state import AcceleratorState

    world = str(dist.get_world_size())
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",  # there is a process group already
        "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    AcceleratorState._reset_state(True)
    torch._dynamo.reset()
    seed()
    gradients: list[int] = []

    def count(optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        gradients.append(num_bytes(param.grad for param in params))

    counting = register_optimizer_step_pre_hook(count)
    with mock.patch.dict(os.environ, environment):
        try:
            yield gradients
        finally:
            counting.remove()
            AcceleratorState._reset_state(True)


def seed() -> None:
    """Seed all generators that hosts use."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def llama(**settings: Any) -> nn.Module:
    """Make a small Llama; its values are always the same."""
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
        **settings,
    )
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(config)
    return model


def texts(number: int) -> list[Tensor]:
    """Make random texts of `LENGTH` words, each by its own seed."""
    generators = (torch.Generator().manual_seed(each) for each in range(number))
    return [torch.randint(0, WORDS, (LENGTH,), generator=each) for each in generators]


def loader(number: int) -> DataLoader[Tensor]:
    """Make a loader of `texts`, in order."""
    # The ignore: a list does for a dataset, which the type doesn't say.
    return DataLoader(texts(number), batch_size=BATCH)  # type: ignore[arg-type]


_NAMES = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(WORDS - 3))]


def tokenizer() -> Any:
    """Make a tokenizer of transformers whose words are "w0", "w1" and so on."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = {name: number for number, name in enumerate(_NAMES)}
    made = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def lines(number: int) -> Any:
    """Make a dataset of random lines of 6 to 14 words, always the same."""
    from datasets import Dataset

    chosen = random.Random(0)
    rows = (chosen.choices(_NAMES[3:], k=chosen.randint(6, 14)) for _ in range(number))
    return Dataset.from_list([{"text": " ".join(row)} for row in rows])


def num_bytes(tensors: Any) -> int:
    """Bytes of this rank's parts of `tensors`; those that are no tensors are left out."""
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.nbytes for each in local if isinstance(each, Tensor))


def lasting_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank keeps between steps: parameters and optimizer states."""
    states = [value for state in optimizer.state.values() for value in state.values()]
    return num_bytes([*model.parameters(), *states])


def training_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, gradients: list[int]) -> int:
    """Bytes of this rank's parameters, optimizer states and gradients, these where most."""
    assert max(gradients) > 0
    return lasting_bytes(model, optimizer) + max(gradients)
