"""SparseLoCo beside its algorithm, written down once more in float64, entry by entry; and what it sends."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from edgc.compressors.bits import pack_numbers, unpack_numbers
from edgc.config import EDGCConfig
from edgc.strategies.base import Replica, finished
from edgc.strategies.sparseloco import SparseLoCo, SparseLoCoConfig
from tests.strategy_cases import Workers, follows, start

CHUNK, K, DECAY, LR = 8, 8, 0.95, 0.4


def message(owed: Tensor) -> dict[tuple[int, ...], float]:
    """Entries that are sent of a tensor, with their decoded values."""
    chunks: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    values: dict[tuple[int, ...], float] = {}
    for place in itertools.product(*map(range, owed.shape)):
        chunks[tuple(index // (CHUNK if owed.dim() > 1 else CHUNK**2) for index in place)].append(place)
    for places in chunks.values():
        places.sort(key=lambda place: -abs(float(owed[place])))
        values |= {place: float(owed[place]) for place in places[: max(1, round(K * len(places) / CHUNK**2))]}
    mean = statistics.fmean(values.values())
    width = 6 / 4 * statistics.stdev(values.values()) if len(values) > 1 else 1
    code = {place: min(3, max(0, round((x - mean) / width) + 2)) for place, x in values.items()}
    bins = {each: [x for place, x in values.items() if code[place] == each] for each in code.values()}
    return {place: statistics.fmean(bins[code[place]]) for place in values}


def reference(world: int, steps: int) -> dict[str, Tensor]:
    anchor, workers = start(), Workers(world)
    errors = [{name: torch.zeros_like(p) for name, p in start().items()} for _ in range(world)]
    for step in range(steps):
        workers.step(step)
        if (step + 1) % 5:
            continue
        for name, weight in anchor.items():
            messages = []
            for error, own in zip(errors, workers.weights, strict=True):
                error[name] = DECAY * error[name] + weight - own[name].detach()
                messages.append(message(error[name]))
                for place, value in messages[-1].items():
                    error[name][place] -= value
            norms = [math.hypot(*each.values()) for each in messages]
            scales = [min(1, statistics.median_low(norms) / norm) for norm in norms]
            mean = torch.zeros_like(weight)
            for place in set().union(*messages):
                sent = [each[place] * scale for each, scale in zip(messages, scales, strict=True) if place in each]
                mean[place] = statistics.fmean(sent)
            anchor[name] = weight - LR * mean
            workers.restart(name, anchor[name])
    return anchor


@pytest.mark.parametrize("world", [2, 4])
def test_sparseloco_is_its_algorithm(world: int) -> None:
    settings = {"name": "sparseloco", "every": 5, "k": K, "chunk": CHUNK}
    follows(settings, reference(world, 20), world=world, within=1e-9)


def test_a_whole_chunk_costs_14_bits_an_entry_that_is_sent() -> None:
    config = SparseLoCoConfig()
    chunks = config.chunks((50257, 768))
    assert chunks.count == 786 * 12 and config.kept(chunks) == 64  # a prime side costs no more than any other
    packed = pack_numbers([torch.tensor([4095, 0, 77])], 12)
    assert len(packed) == 5 and unpack_numbers(packed[None], 12, 3).tolist() == [[4095, 0, 77]]


def test_what_no_replica_has_moved_stays() -> None:
    """Rows of an embedding that nobody has looked up, in one chunk with some that somebody has."""
    replica = Replica({"table": torch.randn(6, 4)}, EDGCConfig(), 10)
    strategy = SparseLoCo(SparseLoCoConfig(k=4096), replica)
    delta = torch.zeros(6, 4)
    delta[:3] = torch.randn(3, 4)
    before = strategy.anchor["table"].clone()
    assert finished(strategy.end_round({"table": delta}))
    moved = strategy.anchor["table"] != before
    assert bool(moved[:3].any()) and not bool(moved[3:].any())
    assert bool(moved[:3].all())
