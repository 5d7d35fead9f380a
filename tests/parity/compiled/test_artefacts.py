"""Artefacts: what one process has compiled for all ranks gives the bits of what they compile."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from support import artefacts
from support.ranks import on_ranks
from support.selection import IS_FULL, part_of
from support.training import assert_same

import autoshard

EAGERLY = {"lowering": "eager"}
MODELS = ["small", *part_of(artefacts.FAMILIES, 5)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Function that makes an artefact, once for a model and options, and returns its folder."""
    known: dict[str, str] = {}

    def make(name: str, *more: str, **given: Any) -> str:
        key = json.dumps([name, more, given])
        if key not in known:
            folder = tmp_path_factory.mktemp("artefact")
            artefacts.made(name, folder, *more, **given)
            known[key] = str(folder)
        return known[key]

    return make


def build(name: str) -> Any:
    return getattr(artefacts, name)()


def compiled_here(options: dict[str, Any] = EAGERLY) -> Any:
    """The small model, compiled by each rank."""
    model = artefacts.small()
    model.compile(backend="autoshard", options=options)
    return model


def frames() -> dict[str, Any]:
    """What Dynamo has counted; nothing if it traced no frame."""
    return {key: dict(value) for key, value in torch._dynamo.utils.counters.items() if value}


@on_ranks(2)
def in_ranks(
    rank: int,
    folder: str,
    name: str,
    options: dict[str, Any],
    accumulate: int = 1,
    shards: int | None = None,
) -> None:
    """Train twice, with the artefact and compiled here: losses, parameters and buffers."""
    compiled = build(name)
    if shards is not None:
        options = {**options, "mesh": autoshard.hybrid_mesh(shards)}
    compiled.compile(backend="autoshard", options={"strict": True, **options})
    torch.manual_seed(rank)
    wanted = artefacts.train(compiled, name, rank, accumulate=accumulate)
    wanted.append(artefacts.evaluate(compiled, name, rank))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(name)
    assert autoshard.load_compiled(model, folder) is model
    torch.manual_seed(rank)
    losses = artefacts.train(model, name, rank, accumulate=accumulate)
    losses.append(artefacts.evaluate(model, name, rank))
    assert "frames" not in frames()
    assert "stats" not in frames()
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
    assert_same(model, compiled)
    for (at, buffer), (_, other) in zip(
        model.named_buffers(), compiled.named_buffers(), strict=True
    ):
        assert torch.equal(buffer, other), at


@pytest.mark.parametrize("name", MODELS)
def test_equals_what_ranks_compile(made: Callable[..., str], name: str) -> None:
    options = EAGERLY
    folder = made(name, "--accumulate", "--evaluate", options=json.dumps(options))
    for accumulate in (1, 3) if IS_FULL or name == "small" else (3,):
        in_ranks(folder=folder, name=name, accumulate=accumulate, options=options)


def test_with_inductor(made: Callable[..., str]) -> None:
    """Its kernels are those that ranks compile, so that numbers are the same bits."""
    settings = {"inductor": {"cpp.simdlen": 1}}  # as of ranks in tests
    folder = made("small", "--evaluate", options=json.dumps(settings))
    in_ranks(folder=folder, name="small", options=settings)


def test_replicas(made: Callable[..., str]) -> None:
    options = {"lowering": "eager", "strategy": "hybrid_shard"}
    folder = made("small", "--mesh", "2x1", "--evaluate", options=json.dumps(options))
    in_ranks(folder=folder, name="small", options=options, shards=1)


@on_ranks(2)
def in_autocast(rank: int, folder: str) -> None:
    wanted = compiled_here()
    model: Any = autoshard.load_compiled(artefacts.small(), folder)
    batch = artefacts.small_batch(rank, 0)
    for each in (wanted, model):
        torch.manual_seed(rank)
        with torch.autocast("cpu", torch.bfloat16):
            artefacts.loss_of(each(**batch)).backward()
    for got, want in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(got.grad.to_local(), want.grad.to_local())
    with pytest.raises(autoshard.ArtefactError, match=r"autocast was torch.bfloat16 and is False"):
        model(**batch)


def test_autocast(made: Callable[..., str]) -> None:
    in_autocast(folder=made("small", "--amp", "bf16", options=json.dumps(EAGERLY)))


@on_ranks(2)
def after_refusals(rank: int, folder: str, options: dict[str, Any]) -> None:
    """Calls that are refused leave nothing: training goes on as if they had not been."""
    model: Any = autoshard.load_compiled(artefacts.small(), folder)
    batch = artefacts.small_batch(rank, 0)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({**batch, "x": batch["x"][:4]}, r"tensor 0 is float32 \[4, 13\]"),
        ({**batch, "x": batch["x"].bfloat16()}, "bfloat16"),
        ({"x": batch["x"]}, "called with .x=a tensor, y=None., and was made"),
    ]
    for given, message in wrong:
        with pytest.raises(autoshard.ArtefactError, match=message):
            model(**given)
    model.layers[1].eval()
    with pytest.raises(autoshard.ArtefactError, match="a Normed is in eval mode"):
        model(**batch)
    model.layers[1].train()
    model.layers[1].scale = 3.0
    with pytest.raises(autoshard.ArtefactError, match=r"scale of a .*Normed is 3.0, and was 1.5"):
        model(**batch)
    model.layers[1].scale = 1.5
    handle = model.head.register_forward_hook(lambda *given: None)
    with pytest.raises(autoshard.ArtefactError, match=r"other hooks"):
        model(**batch)
    handle.remove()
    with pytest.raises(autoshard.ArtefactError, match="gradients are off"), torch.no_grad():
        model(**batch)
    wanted = compiled_here(options)
    torch.manual_seed(rank)
    artefacts.train(model, "small", rank)
    torch.manual_seed(rank)
    artefacts.train(wanted, "small", rank)
    assert_same(model, wanted)


def test_refused_calls_leave_nothing(made: Callable[..., str]) -> None:
    after_refusals(folder=made("small", options=json.dumps(EAGERLY)), options=EAGERLY)


@on_ranks(2)
def one_rank_differs(rank: int, folder: str, other: str, spoiled: str) -> None:
    """All ranks raise, whichever differs."""
    with pytest.raises(autoshard.ArtefactError, match="ranks have different ones"):
        autoshard.load_compiled(artefacts.small(), [folder, other][rank])
    with pytest.raises(autoshard.ArtefactError, match=r"on rank 1, .*train.forward.txt is spoiled"):
        autoshard.load_compiled(artefacts.small(), [folder, spoiled][rank])
    model: Any = artefacts.small()
    if rank == 1:
        model.layers[0].scale = 9.0
    here = "scale was 0.5 and is 9.0" if rank == 1 else "differs on another rank"
    with pytest.raises(autoshard.ArtefactError, match=here):
        autoshard.load_compiled(model, folder)


def test_one_rank_differs(made: Callable[..., str], tmp_path: Path) -> None:
    folder = made("small", options=json.dumps(EAGERLY))
    other = made("small", "--amp", "bf16", options=json.dumps(EAGERLY))
    shutil.copytree(folder, tmp_path / "spoiled")
    with (tmp_path / "spoiled" / "train.forward.txt").open("a") as file:
        file.write("\n")
    one_rank_differs(folder=folder, other=other, spoiled=str(tmp_path / "spoiled"))


@on_ranks(2)
def compiled_instead(rank: int, folder: str) -> None:
    models: list[Any] = [artefacts.small() for _ in range(2)]
    for model in models:
        model.layers[0].scale = 0.25
    wanted = models[0]
    wanted.compile(backend="autoshard", options=EAGERLY)
    with pytest.warns(RuntimeWarning, match=r"scale was 0.5 and is 0.25.*The model is compiled"):
        model = autoshard.load_compiled(models[1], folder, stale="compile")
    for each in (model, wanted):
        torch.manual_seed(rank)
        artefacts.train(each, "small", rank)
    assert_same(model, wanted)


def test_a_stale_one_is_compiled_if_asked_for(made: Callable[..., str]) -> None:
    compiled_instead(folder=made("small", options=json.dumps(EAGERLY)))


@on_ranks(2)
def sharded_before(rank: int, folder: str) -> None:
    """A model that is sharded already, as the artefact's was, and one that is otherwise."""
    wanted = artefacts.small()
    autoshard.shard(wanted)
    model = artefacts.small()
    autoshard.shard(model)
    autoshard.load_compiled(model, folder)
    for each in (model, wanted):
        torch.manual_seed(rank)
        artefacts.train(each, "small", rank)
    assert_same(model, wanted)
    other = artefacts.small()
    autoshard.shard(other, strategy="shard_grad_op")
    with pytest.raises(autoshard.ArtefactError, match=r"unit .*reshard_after_forward"):
        autoshard.load_compiled(other, folder)


def test_a_model_that_is_sharded(made: Callable[..., str]) -> None:
    sharded_before(folder=made("small", options=json.dumps(EAGERLY)))


@on_ranks(2)
def saved_and_loaded(rank: int, folder: str, checkpoints: Path) -> None:
    """A checkpoint of one form is loaded by the other, and training goes on with the same bits."""
    forms = {
        "loaded": lambda: autoshard.load_compiled(artefacts.small(), folder),
        "compiled": compiled_here,
    }
    for name, other in (("loaded", "compiled"), ("compiled", "loaded")):
        first: Any = forms[name]()
        torch.manual_seed(rank)
        artefacts.train(first, "small", rank)
        autoshard.save_checkpoint(checkpoints / name, first, step=1)
        second: Any = forms[other]()
        artefacts.loss_of(second(**artefacts.small_batch(rank, 0)))  # it is sharded now
        assert autoshard.load_checkpoint(checkpoints / name, second) == 1
        for each in (first, second):
            torch.manual_seed(rank)
            artefacts.train(each, "small", rank)
        assert_same(first, second)


def test_checkpoints_between_forms(made: Callable[..., str], tmp_path: Path) -> None:
    saved_and_loaded(folder=made("small", options=json.dumps(EAGERLY)), checkpoints=tmp_path)
