"""A run's log, and the summary that a resumed run makes of it."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from edgc.compressors import Statistics
from edgc.monitor import Iteration
from edgc.runtime.channel import Stopwatch
from experiments.spec.settings import DataConfig, RunConfig
from experiments.training import metrics
from experiments.training.metrics import SECONDS, History, Step
from experiments.training.outputs import read_events
from experiments.training.run_log import RunLog

STEPS = 5


def _run() -> RunConfig:
    return RunConfig(
        scale="ci",
        study="methods",
        variant="none",
        label="none",
        seed=1,
        data=DataConfig(source="folder", vocab_size=300, path="words"),
        model={"layers": 1, "hidden": 8, "heads": 1, "sequence_length": 8},
        train={
            "iterations": STEPS,
            "micro_batch": 1,
            "global_batch": 1,
            "lr": 1e-3,
            "lr_warmup_fraction": 0.0,
            "eval_interval": 1,
            "eval_batches": 1,
        },
        compression={"method": "none"},
    )


def _step(index: int, loss: float, norm: float, skipped: bool) -> Step:
    stages = [
        {"stage": stage, "rank": None if index == 0 else 4 + index + stage, "pipeline_bytes": None}
        | dict.fromkeys(("entropy", "worker_error", "mean_error"), math.nan)
        | {f"seconds_{part}": 0.1 * (index + stage + place) for place, part in enumerate(SECONDS)}
        for stage in range(2)
    ]
    return Step(loss, norm, 100 + index, stages, skipped)


def test_replayed_log_gives_the_summary_of_the_steps(tmp_path: Path) -> None:
    """A skipped step, whose loss and norm are no numbers, counts after a resume as it counted before."""
    steps = [_step(index, 3.0 - index, 1.0, False) for index in range(STEPS)]
    steps[2] = _step(2, math.nan, math.nan, True)
    steps[3] = _step(3, 2.5, math.inf, True)
    added = History()
    with RunLog(_run(), tmp_path, speaks=True) as log:
        for index, step in enumerate(steps):
            added.add(step, 0.5 + index, tokens=64)
            log.step(index + 1, step, lr=1e-3, seconds=0.5 + index, tokens=64)
    replayed = History()
    events = read_events(tmp_path / "metrics.jsonl")
    assert [event["tokens_per_second"] for event in events] == [128.0, 42.6667, 25.6, 18.2857, 14.2222]
    replayed.replay(events)
    expected = added.summary(200, 9.0)
    assert replayed.summary(200, 9.0) == expected
    assert expected["skipped_steps"] == 2
    assert expected["train_loss"] == (3.0 + 2.0 + 2.5 - 1.0) / 4  # the mean of those that are numbers


def test_times_of_a_step_have_six_digits_and_everything_else_all(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Iteration(1, 4, Statistics(compress=Stopwatch(0.012345678912)), entropy=-7.123456789012)
    mine = metrics.rank_step(0, 0, 4.123456789012, 1.0, done, None, None)
    monkeypatch.setattr(metrics, "gather_numbers", lambda values, device: [list(values)])
    step = metrics.gather_step(mine, torch.device("cpu"))
    [stage] = step.stages
    assert stage["seconds_compress"] == 0.0123457
    assert stage["seconds_communicate"] == 0 and math.isnan(stage["seconds_exposed"])
    assert (step.loss, stage["entropy"]) == (4.123456789012, -7.123456789012)
