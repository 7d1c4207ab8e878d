"""Bytes that every method and strategy sends, against the number of replicas W.

``make bytes`` counts what replicas in one process send at W = 2, 4
and 8 (:class:`edgc.runtime.local.Room`) for a small model, compares that with the formulas, and writes a table of what
these say of GPT-2 124M up to W = 256. Formulas and settings are the examples of the methods' own files, in two points
made more general:

* :attr:`edgc.config.Example.sent` is of two replicas. What goes by all-reduce, or by all-to-all and all-gather of
  shares, is 2(W-1)/W of that among W; what goes by all-gather of whole messages W-1 times as much. How much of a method
  goes which way, and whether vectors do as well, is counted at W = 2.
* Examples of local updates have short rounds. Here rounds have the default length, and send as much as short ones.

A method is in its first compressed step: what has a warm-up, or takes turns, may send another number of bytes later.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer
from torch import Tensor, nn

from edgc.compressors import Gradient
from edgc.compressors.base import compressible
from edgc.config import EDGCConfig, Example, methods
from edgc.errors import UserError
from edgc.rehearsal import Rehearsal
from edgc.runtime.local import Room
from edgc.strategies import StrategyConfig, strategies
from edgc.strategies.base import StrategyExample, dense_bytes
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.common.written_tables import csv_text
from experiments.simulation.placement import GPTShape, ParameterTensor, build

COUNTED = (2, 4, 8)
WORLDS = (*COUNTED, 16, 32, 64, 128, 256)
Tensors = Sequence[ParameterTensor]


class Small(nn.Module):
    """The model whose bytes are counted: rows, columns and entries of its matrices fill whole blocks of messages of up
    to 8 replicas, so that no error of a formula hides behind what messages are filled up with."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.down = nn.Embedding(128, 384), nn.Linear(384, 128)
        self.layers = nn.ModuleList(nn.Linear(128, 384) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        """A number that depends on all parameters."""
        x = self.down(self.embedding(tokens))
        return torch.stack([layer(x).square().mean() for layer in self.layers]).sum()


def small() -> list[ParameterTensor]:
    """Parameters of :class:`Small`."""
    return [ParameterTensor(name, tuple(p.shape)) for name, p in Small().named_parameters()]


def gpt2() -> Tensors:
    """Parameters of GPT-2 124M as Megatron lays them out, with a vocabulary of 50 304."""
    [stage] = build(GPTShape(layers=12, hidden=768, heads=12, sequence_length=1024, vocab_size=50257))
    return stage.tensors


def count_method(config: EDGCConfig, tensors: Tensors, world: int) -> Counter[str]:
    """Bytes of one reduction, which each replica sends, by kind of collective."""
    room = Room(world)

    def reduce(rank: int) -> None:
        numbers = torch.Generator().manual_seed(rank)
        gradients = [Gradient(t.name, torch.randn(t.shape, generator=numbers)) for t in tensors]
        # To a method without ranks the number says only that it is to compress.
        config.build().reduce(gradients, room.opener(rank)(), getattr(config, "rank", 1))

    room.run(reduce)
    return _same(room)


class Way(NamedTuple):
    """How a method's bytes go, as counted among two replicas.

    Attributes:
        gathered: share of them that goes by all-gather alone; the rest goes as in a ring.
        vectors: whether what is no matrix, or a small one, is compressed, too.
    """

    gathered: float
    vectors: bool


def way_of(config: EDGCConfig, example: Example, tensors: Tensors) -> Way:
    """Way of a method, from the bytes of ``tensors``, and of a vector alone."""
    vector = ParameterTensor("vector", (512,))
    vectors = sum(count_method(config, [vector], 2).values()) != dense_bytes([vector.shape], 2)
    sent = count_method(config, tensors, 2)
    own = sum(sent.values()) - dense_bytes(_parts(config, example, tensors, vectors)[1], 2)
    # Behind every all-to-all comes the all-gather of the shares, of as many bytes.
    return Way((sent["all_gather"] - sent["all_to_all"]) / own, vectors)


def method_bytes(config: EDGCConfig, example: Example, tensors: Tensors, world: int, way: Way) -> float:
    """The formula: bytes that each of ``world`` replicas sends in a reduction."""
    own, rest = _parts(config, example, tensors, way.vectors)
    return own * ((1 - way.gathered) * 2 * (world - 1) / world + way.gathered * (world - 1)) + dense_bytes(rest, world)


def _parts(config: EDGCConfig, example: Example, tensors: Tensors, vectors: bool) -> tuple[float, list[Any]]:
    """Bytes among two replicas of what is compressed, and the shapes of the rest."""
    lossy = [vectors or compressible(t.shape, config.min_compression_elements) for t in tensors]
    shapes = [t.shape for t in tensors]
    own = sum(example.sent(shape[0], math.prod(shape[1:])) for shape, each in zip(shapes, lossy, strict=True) if each)
    return own, [shape for shape, each in zip(shapes, lossy, strict=True) if not each]


def default_rounds(kind: type[StrategyConfig], example: StrategyExample) -> StrategyConfig:
    """Settings of an example, its rounds of the default length."""
    settings = kind.from_dict(example.settings)
    if settings.period == 1:
        return settings
    return kind.from_dict({key: value for key, value in example.settings.items() if key != "every"})


def count_strategy(settings: StrategyConfig, example: StrategyExample, world: int) -> float:
    """Bytes a step that each replica of :class:`Small` sends, on average over two rounds."""
    torch.manual_seed(0)
    model = Small()
    trained = Rehearsal(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        config=EDGCConfig.from_dict(example.compression),
        strategy=settings,
        replicas=world,
        iterations=2 * settings.period,
    )
    for _ in range(2 * settings.period):
        trained.step([torch.tensor([replica, 127 - replica]) for replica in range(world)])
    return sum(_same(trained.room).values()) / trained.taken


def strategy_bytes(settings: StrategyConfig, example: StrategyExample, tensors: Tensors, world: int) -> float:
    """The formula: bytes a step that each of ``world`` replicas sends, on average."""
    in_full = example.embeddings_in_full
    shapes = [(math.prod(t.shape),) if in_full and "embedding" in t.name else t.shape for t in tensors]
    rounds = type(settings).from_dict(example.settings).period / settings.period
    return example.sent(shapes, world) * rounds


def _same(room: Room) -> Counter[str]:
    """What every replica has sent; all have sent the same."""
    first, *others = room.sent
    assert all(other == first for other in others), room.sent
    return first


def rows(worlds: Sequence[int] = WORLDS) -> Iterator[dict[str, Any]]:
    """Rows of the table: of every example, at every number of replicas.

    Raises:
        UserError: what was counted is not what a formula says.
    """
    few, many = small(), gpt2()
    dense = {world: dense_bytes([t.shape for t in many], world) for world in worlds}

    def row(name: str, said: str, world: int, counted: float, formula: float, sent: float) -> dict[str, Any]:
        if counted != formula and not math.isclose(counted, formula, rel_tol=1e-12) and not math.isnan(counted):
            what = f"{name} sends {counted:.12g} bytes among {world} replicas, and its formula says {formula:.12g}"
            raise UserError(what, fix="correct `examples` in its file")
        small_bytes = {"counted": "" if math.isnan(counted) else counted, "small": formula}
        return {"example": name, "settings": said, "replicas": world} | small_bytes | {
            "bytes": sent, "share": sent / dense[world]
        }  # fmt: skip

    for kind in methods():
        for name, example in kind.examples.items():
            policy = {"policy": kind.policy} if hasattr(kind, "policy") else {}
            config = EDGCConfig.from_dict({"method": kind.method, **policy, **example.settings})
            way, about = way_of(config, example, few), {"what": "method", "name": kind.method}
            for world in worlds:
                counted = sum(count_method(config, few, world).values()) if world in COUNTED else math.nan
                formula, sent = (method_bytes(config, example, each, world, way) for each in (few, many))
                yield about | row(name, _words(kind, example.settings), world, counted, formula, sent)
    for strategy in strategies():
        for name, example_ in strategy.examples.items():
            settings, about = default_rounds(strategy, example_), {"what": "strategy", "name": strategy.name}
            rounds = f"every={settings.period} " if settings.period > 1 else ""
            said = rounds + _words(strategy, {**settings.to_dict(), **example_.compression})
            for world in worlds:
                counted = count_strategy(settings, example_, world) if world in COUNTED else math.nan
                formula, sent = (strategy_bytes(settings, example_, each, world) for each in (few, many))
                yield about | row(name, said, world, counted, formula, sent)


def _words(kind: type[Any], settings: Mapping[str, Any]) -> str:
    """Settings that are not the defaults of their type."""
    usual = {field.name: field.default for field in fields(kind)} | {"name": kind.__dict__.get("name")}
    return " ".join(f"{key}={value}" for key, value in settings.items() if value != usual.get(key, MISSING))


@main_guard
def main(out: Annotated[Path, typer.Option(help="the table")]) -> None:
    """Count, compare, and write the table."""
    atomic_write(out, csv_text(list(rows())))
    print(out)


if __name__ == "__main__":
    typer.run(main)
