"""Load and save a model of some size on a few ranks: bytes read, peak of memory, time, by rank.

    python benchmarks/weights.py --gigabytes 1 --ranks 2

Makes a Llama of that size, in bfloat16, with transformers, in a folder of its own. Then each of
`--ranks` processes loads it on meta by `autoshard.load_pretrained`, and saves it. The peak is that
of resident memory above what there was before the load: the rank's shards and a tensor.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LAYERS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of the model")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="a model there, in place of one made here")
    given = parser.parse_args()
    if "RANK" in os.environ:
        measure(given.folder)
        return
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        if given.folder is None:
            subprocess.run([sys.executable, "-c", MAKE, made, str(given.gigabytes)], check=True)
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
        command += [str(given.ranks), __file__, "--folder", str(folder)]
        subprocess.run([sys.executable, *command], check=True)


MAKE = f"""
import sys, torch, transformers
folder, bytes_wanted = sys.argv[1], float(sys.argv[2]) * 1e9
transformers.utils.logging.disable_progress_bar()
def config(width):
    return transformers.LlamaConfig(
        hidden_size=width, intermediate_size=width * 3, vocab_size=16000,
        num_hidden_layers={LAYERS}, num_attention_heads=16, num_key_value_heads=16,
    )
width = 256
while ({LAYERS} * 13 * width**2 + 2 * 16000 * width) * 2 < bytes_wanted:
    width += 64
torch.set_default_dtype(torch.bfloat16)
transformers.LlamaForCausalLM(config(width)).save_pretrained(folder, max_shard_size="300MB")
"""


def measure(folder: Path) -> None:
    """Load and save on this rank, and print what it took."""
    import torch
    import torch.distributed as dist
    import transformers

    import autoshard

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    autoshard.shard(torch.nn.Linear(8, 8))  # groups, threads
    before, read, begun = resident(), bytes_read(), time.perf_counter()
    loaded = autoshard.load_pretrained(model, folder)
    seconds, risen, read = time.perf_counter() - begun, peak() - before, bytes_read() - read
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    shards = sum(param.to_local().nbytes for param in model.parameters())
    largest = max(param.nbytes for param in model.parameters())
    print(
        f"rank {rank} of {world}, load: {loaded.num_bytes / total:.4f} of {total / 1e6:.0f} MB "
        f"read ({read / total:.4f} as the system counts), peak {risen / 1e6:.0f} MB: shards "
        f"{shards / 1e6:.0f} MB, largest tensor {largest / 1e6:.0f} MB; {seconds:.1f} s",
        flush=True,
    )
    dist.barrier()
    out = folder / "saved"
    before, begun = resident(), time.perf_counter()
    autoshard.save_pretrained(model, out)
    files = len(list(out.glob("*.safetensors")))
    print(
        f"rank {rank} of {world}, save: {files} files, peak {(peak() - before) / 1e6:.0f} MB more; "
        f"{time.perf_counter() - begun:.1f} s",
        flush=True,
    )
    dist.barrier()
    if rank == 0:
        shutil.rmtree(out)


def resident() -> int:
    """Return this process's resident memory, in bytes, and have `peak` begin from it."""
    Path("/proc/self/clear_refs").write_text("5")
    return memory("VmRSS")


def peak() -> int:
    """Return the most resident memory since `resident` was called, in bytes."""
    return memory("VmHWM")


def memory(name: str) -> int:
    """Return a figure of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def bytes_read() -> int:
    """Return the bytes that this process has read by system calls."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


if __name__ == "__main__":
    main()
