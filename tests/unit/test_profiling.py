"""The parts of a reduction in a profiler's trace, on two gloo ranks."""

from __future__ import annotations

import collections
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from edgc import EDGCConfig
from edgc.compressors import Channel, Gradient
from tests.workers import run_workers

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "powersgd": {"method": "powersgd", "rank": 4},
    "int4 factors": {"method": "powersgd", "rank": 4, "factor_dtype": "int4"},
    "topk": {"method": "topk", "density": 0.1},
    "quantize": {"method": "quantize"},
}
# Collectives of a matrix alone: how often each kind is started.
COLLECTIVES: dict[str, dict[str, int]] = {
    "none": {"all_reduce": 1},
    "powersgd": {"all_reduce": 2},
    "int4 factors": {"all_to_all": 2, "all_gather": 2},
    "topk": {"all_gather": 1},
    "quantize": {"all_to_all": 1, "all_gather": 1},
}
Event = tuple[str, float, float]


def trace(name: str, *, scattered: bool = False) -> list[Event]:
    """Name, start and end of our ranges in the second reduction of a matrix, in the order of their starts."""
    compressor = EDGCConfig(**METHODS[name], min_compression_elements=64).build()
    for profiled in (False, True):
        flat = torch.randn(64 * 48, generator=torch.Generator().manual_seed(1))
        gradients = [Gradient("a", flat.view(64, 48))]
        channel = Channel(None, [flat] if scattered else [])
        rank = None if scattered else 4
        if not profiled:
            compressor.reduce(gradients, channel, rank)
            continue
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            compressor.reduce(gradients, channel, rank)
    found = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.name.startswith("edgc::")
    ]
    return sorted(found, key=lambda event: event[1:])


def traces() -> dict[str, list[Event]]:
    return {name: trace(name) for name in METHODS} | {"scattered": trace("topk", scattered=True)}


@pytest.fixture(scope="module")
def seen() -> list[dict[str, list[Event]]]:
    return run_workers(2, traces)


@pytest.mark.parametrize("name", METHODS)
def test_every_part_of_a_reduction_has_a_name(name: str, seen: list[dict[str, list[Event]]]) -> None:
    waits = EDGCConfig(**METHODS[name]).build().waits(4)
    for rank in seen:
        counts = collections.Counter(event for event, _, _ in rank[name])
        expected = {f"edgc::{kind}": count for kind, count in COLLECTIVES[name].items()}
        assert counts == {"edgc::compress": waits, "edgc::wait": waits, "edgc::decompress": 1, **expected}
        # Collectives are started within a part, waits lie between parts.
        outer = [event for event in rank[name] if event[0].rpartition(":")[2] in ("compress", "wait", "decompress")]
        assert [event for event, _, _ in outer] == ["edgc::compress", "edgc::wait"] * waits + ["edgc::decompress"]
        assert all(end <= start for (_, _, end), (_, start, _) in pairwise(outer))
        for event, start, end in rank[name]:
            if event in expected:
                assert any(o == "edgc::compress" and s <= start and end <= e for o, s, e in outer)
        # A mean whose shares stay where they are.
        events = [event for event, _, _ in rank["scattered"]]
        assert events == ["edgc::compress", "edgc::reduce_scatter", "edgc::wait", "edgc::decompress"]
