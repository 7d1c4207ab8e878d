"""The benchmark of the stages' finish times: its rows from known times, its runs, the injected delay."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from edgc.compressors import Channel
from experiments.bench import stages
from experiments.bench.collectives import Link
from experiments.spec.settings import RunConfig
from tests.workers import run_workers


def answers(*, spread: float, ranks: tuple[int | None, int | None]) -> list[dict[str, Any]]:
    """Two stages of two replicas: stage 0 is over ``spread`` after stage 1, of which one replica is 1 s earlier."""
    found = []
    for stage in (0, 1):
        for replica in (0, 1):
            iterations = [
                {
                    "iteration": index,
                    "rank": ranks[stage],
                    "steady": index > 2,
                    "finished": 100.0 * index + (spread * index if stage == 0 else 0.0) - replica,
                    "seconds": 2.0 + stage,
                }
                for index in range(1, 6)
            ]
            found.append({"stage": stage, "replica": replica, "iterations": iterations})
    return found


def test_a_stage_is_over_with_its_last_replica_and_only_steady_iterations_count() -> None:
    rows = stages.rows("equal", answers(spread=0.2, ranks=(8, 8)))
    assert list(rows["iteration"].unique()) == [3, 4, 5]
    assert rows[rows["stage"] == 0]["finish_seconds"].tolist() == pytest.approx([0.6, 0.8, 1.0])
    assert rows[rows["stage"] == 1]["finish_seconds"].tolist() == [0.0, 0.0, 0.0]


def test_settings_of_every_variant_are_valid() -> None:
    plan = stages.Plan(pipeline=3, slowdown=4.0, megabytes=2.0)
    assert plan.bandwidths == [0.5e6, 2e6, 2e6]
    runs = {name: RunConfig(**stages.settings(plan, name)) for name in stages.VARIANTS}
    assert all(run.micro_batches == plan.micro_batches for run in runs.values())
    assert [run.edgc.to_dict().get("alignment") for run in runs.values()] == [None, "off", "measured"]
    # Beside alignment, equal ranks and DAC differ in nothing but what is timed and how long warm-up takes.
    equal, dac = runs["equal"].edgc.to_dict(), runs["dac"].edgc.to_dict()
    assert {key for key in equal if equal[key] != dac[key]} == {"alignment", "search_start"}


def delayed() -> dict[str, Any]:
    """Seconds and results of an all-reduce of 40 kB: as it is, at 1 MB/s, and with the limit taken away again."""
    link, found = Link(), []
    for bandwidth in (None, 1e6, None):
        link.bandwidth = bandwidth
        channel, tensor = link(None), torch.ones(10_000)
        started = time.perf_counter()
        channel.mean_(tensor)
        channel.finish()
        channel.finish()  # nothing is left to wait for
        found.append((time.perf_counter() - started, channel.waited.seconds, bool((tensor == 1).all())))
    return {"times": found, "bytes": channel.bytes, "is_channel": isinstance(channel, Channel)}


def test_an_injected_delay_is_waited_for_and_counted() -> None:
    for result in run_workers(2, delayed):
        assert result["bytes"] == 40_000 and result["is_channel"]
        assert all(equal for _, _, equal in result["times"])
        seconds, waited, _ = result["times"][1]
        assert seconds >= waited >= 0.04
