"""Pretrain a small Llama on a text, with checkpoints: stopped at any time, it goes on where it was.

    pip install autoshard transformers
    torchrun --standalone --nproc-per-node 2 examples/pretrain_llama.py --text README.md

Run it again to resume; with --steps larger, to train on. On GPUs it is the same command, with as
many processes as there are GPUs. The model is saved as `from_pretrained` loads it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard


class Windows:
    """Windows of a text at random places, as bytes; its state is that of its generator."""

    def __init__(self, text: bytes, length: int, batch: int, seed: int) -> None:
        self.data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.length, self.batch = length, batch
        self.generator = torch.Generator().manual_seed(seed)

    def next(self) -> Tensor:
        last = len(self.data) - self.length
        starts = torch.randint(0, last + 1, (self.batch, 1), generator=self.generator)
        return self.data[starts + torch.arange(self.length)]

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.generator.set_state(state["generator"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("pretrained"))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    autoshard.shard(model)  # the process group is made here, too, and the model moved to the GPU
    model.compile(backend="autoshard")
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=10)
    rank, device = dist.get_rank(), next(model.parameters()).device
    windows = Windows(options.text.read_bytes(), length=128, batch=4, seed=rank)

    checkpoints, states = options.out / "checkpoints", {"windows": windows, "schedule": schedule}
    first = autoshard.load_checkpoint(checkpoints, model, optimizer, states=states) or 0
    for step in range(first + 1, options.steps + 1):
        ids = windows.next().to(device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if rank == 0 and (step % 10 == 0 or step == first + 1):
            print(f"step {step}: loss {loss.item():.4f}, norm {float(norm):.2f}", flush=True)
        stops = autoshard.preempted()
        if stops or step % options.save_every == 0 or step == options.steps:
            autoshard.save_checkpoint(checkpoints, model, optimizer, step=step, states=states)
        if stops:
            return
    autoshard.save_pretrained(model, options.out / "model")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
