"""Lazy tensors: a part of what functions of torch make of them is what they make of plain ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autoshard.runtime.weights import lazy
from autoshard.runtime.weights.files import Counter, Stored
from autoshard.runtime.weights.lazy import Box, LazyTensor, Node, node_of, read_box, sources_of


class Noted(Node):
    """Source that counts the elements that are read of it."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.shape, tensor.dtype)
        self.tensor, self.num_read = tensor, 0

    def read(self, box: Box) -> Tensor:
        part = self.tensor[tuple(slice(*each) for each in box)] if box else self.tensor
        self.num_read += part.numel()
        return part


def numbered(*size: int) -> Tensor:
    return torch.arange(math.prod(size), dtype=torch.float32).view(size)


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows joined": lambda x, y: torch.cat([x, y]),
    "columns joined": lambda x, y: torch.cat([x, y], dim=1),
    "stacked": lambda x, y: torch.stack([x, y, x]),
    "stacked inside": lambda x, y: torch.stack([x, y], dim=1),
    "experts": lambda x, y: torch.cat([torch.stack([x, y]), torch.stack([y, x])], dim=1),
    "chunk": lambda x, y: torch.chunk(x, 2)[1],
    "split": lambda x, y: torch.split(x, [1, 3], dim=0)[1].contiguous(),
    "transposed": lambda x, y: x.T.contiguous(),
    "transposed and flat": lambda x, y: x.transpose(0, 1).reshape(-1),
    "interleaved": lambda x, y: x.reshape(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "rotary": lambda x, y: x.view(2, 2, 1, 6).transpose(1, 2).reshape(4, 6),
    "selected": lambda x, y: torch.stack([x, y])[1, 1:, 2],
    "unbound": lambda x, y: torch.stack(x.unbind(1), dim=0),
    "squeezed": lambda x, y: x[:1].squeeze(0),
    "strided": lambda x, y: x[::2],
    "computed": lambda x, y: torch.flip(x, [0]) + y,
    "cast": lambda x, y: torch.cat([x.to(torch.bfloat16), y.to(torch.bfloat16)]),
    "promoted": lambda x, y: torch.cat([x.to(torch.bfloat16), y]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_a_part_is_the_part_of_the_whole(name: str, data: st.DataObject) -> None:
    x, y = numbered(4, 6), 100 + numbered(4, 6)
    want = FUNCTIONS[name](x, y)
    got = FUNCTIONS[name](LazyTensor.of(Noted(x)), LazyTensor.of(Noted(y)))
    assert isinstance(got, LazyTensor)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    ends = [sorted(data.draw(st.tuples(*[st.integers(0, of)] * 2))) for of in want.shape]
    box = tuple((start, stop) for start, stop in ends)
    part = read_box(got, box)
    assert torch.equal(part, want[tuple(slice(*each) for each in box)])


def test_only_the_part_is_read() -> None:
    """A rank's row of stacked and joined experts is read of its own experts."""
    up, gate = ([Noted(numbered(4, 6)) for _ in range(3)] for _ in range(2))
    stacks = [torch.stack([LazyTensor.of(each) for each in kind]) for kind in (up, gate)]
    joined = torch.cat(stacks, dim=1)
    assert read_box(joined, ((1, 2), (0, 8), (0, 6))).shape == (1, 8, 6)
    assert [each.num_read for each in (*up, *gate)] == [0, 24, 0, 0, 24, 0]
    assert sources_of(joined) == [*up, *gate]


def test_a_write_is_refused() -> None:
    tensor = LazyTensor.of(Noted(numbered(2, 2)))
    with pytest.raises(NotImplementedError, match="writes to a tensor that is not read yet"):
        tensor.add_(1.0)
    with pytest.raises(NotImplementedError, match="asks for the values"):
        tensor.sum().item()


def test_many_runs_are_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that lie apart in too many places: all is read, and cut."""
    monkeypatch.setattr(lazy, "MOST_RUNS", 2)
    source = Noted(numbered(6, 4))
    part = read_box(LazyTensor.of(source).view(4, 6), ((0, 4), (1, 3)))
    assert torch.equal(part, source.tensor.view(4, 6)[:, 1:3])
    assert source.num_read == 24


@pytest.mark.parametrize("size", [(5,), (4, 3), (3, 4, 5), (2, 3, 2, 3)])
@pytest.mark.parametrize("least", [1, 1 << 20])
def test_parts_of_files(
    size: tuple[int, ...], least: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row, or with what lies between; one row at a time where rows are long."""
    monkeypatch.setattr("autoshard.runtime.weights.files.LEAST_PIECE", least)
    monkeypatch.setattr("autoshard.runtime.weights.files.STAGED_BYTES", 100)
    whole = numbered(*size)
    path = tmp_path / "file"
    path.write_bytes(b"before" + whole.numpy().tobytes())
    counter = Counter()
    stored = Stored(path, "it", size, torch.float32, 6, counter)
    ends = [[(0, of), (1, of), (0, 1), (1, 1)] for of in size]
    for box in itertools.product(*ends):
        assert torch.equal(stored.read(box), whole[tuple(slice(*each) for each in box)])
    counter.num_bytes = 0
    stored.read(node_of(LazyTensor.of(stored)).all_of_it)
    assert counter.num_bytes == whole.nbytes
