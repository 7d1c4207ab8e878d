"""A run's log, and the summary that is made of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from edgc.compressors import Statistics
from edgc.monitor import Iteration
from edgc.runtime.channel import Stopwatch
from experiments.spec import matrix
from experiments.spec.settings import resolve
from experiments.training import run_log
from experiments.training.outputs import read_events
from experiments.training.run_log import SECONDS, RunLog, Step


def _step(index: int, loss: float, norm: float, skipped: bool) -> Step:
    stages = [
        {"stage": stage, "rank": None if index == 0 else 4 + index + stage, "pipeline_bytes": None}
        | dict.fromkeys(("entropy", "worker_error", "mean_error"), math.nan)
        | {f"seconds_{part}": 0.1 * (index + stage + place) for place, part in enumerate(SECONDS)}
        for stage in range(2)
    ]
    return Step(loss, norm, 100 + index, stages, skipped)


def test_summary_of_a_log_whose_skipped_steps_have_no_loss(tmp_path: Path) -> None:
    steps = [_step(index, 3.0 - index, 1.0, False) for index in range(5)]
    steps[2] = _step(2, math.nan, math.nan, True)
    steps[3] = _step(3, 2.5, math.inf, True)
    run = matrix.runs("methods", "ci")[0]
    with RunLog(run, tmp_path, speaks=True) as log:
        for index, step in enumerate(steps):
            log.step(index + 1, step, lr=1e-3, seconds=0.5 + index)
    events = read_events(tmp_path / "metrics.jsonl")
    found = run_log.summary(events, 64, 200, 9.0)
    assert found["train_loss"] == (3.0 + 2.0 + 2.5 - 1.0) / 4  # the mean of those that are numbers
    assert (found["skipped_steps"], found["bytes_total"], found["bytes_ratio"]) == (2, 510, 0.51)
    assert (found["mean_rank"], found["final_ranks"]) == (7.0, [8, 9])
    assert (found["seconds_per_step_median"], found["tokens_per_second_median"]) == (2.5, 25.6)
    assert found["seconds_exposed_per_step"] == pytest.approx(0.1 * (2 + 1 + 4)), "of the slowest stage"


def test_times_of_a_step_have_six_digits_and_everything_else_all(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Iteration(1, 4, Statistics(compress=Stopwatch(0.012345678912)), entropy=-7.123456789012)
    numbers = run_log.rank_step(0, 0, 4.123456789012, 1.0, done, None)
    monkeypatch.setattr(run_log, "gather_numbers", lambda values, device: [list(values)])
    step = run_log.gather_step(numbers, torch.device("cpu"))
    [stage] = step.stages
    assert stage["seconds_compress"] == 0.0123457
    assert stage["seconds_communicate"] == 0 and math.isnan(stage["seconds_exposed"])
    assert (step.loss, stage["entropy"]) == (4.123456789012, -7.123456789012)


def test_a_loss_diverges_that_was_well_above_its_best_for_two_windows() -> None:
    falling = [5.0 - 0.01 * index + 0.1 * (index % 2) for index in range(40)]
    assert run_log.left_best(falling, 8) is None
    one = falling + [math.nan] + [6.0] * 7  # skipped steps have no loss
    assert run_log.left_best(one, 8) is None
    loss, best = run_log.left_best([*one, *[6.5] * 8], 8) or (0, 0)
    assert loss == 6.5 and best == pytest.approx(4.7, abs=0.05)
    assert run_log.left_best([*one, *[4.9] * 8], 8) is None, "it came back"


@pytest.mark.parametrize(("sent", "skipped", "named"), [(100, False, False), (20, False, True), (20, True, False)])
def test_a_run_whose_method_has_no_ranks_diverges_even_if_it_went_dense_again(
    tmp_path: Path, sent: int, skipped: bool, named: bool
) -> None:
    values = matrix.runs("methods", "ci")[0].model_dump(mode="json")
    run = resolve({**values, "compression": {"method": "sign"}}, "test")
    stages: list[dict[str, Any]] = [{"stage": 0, "rank": None}]
    with RunLog(run, tmp_path, speaks=True) as log:
        log.write("start", bytes_dense=100)
        for iteration in range(1, 5 * log.window + 1):
            compressed = iteration == 2 * log.window  # in one step, long before the loss rises
            step = Step(
                3.0 + (iteration > 3 * log.window), 1.0, sent if compressed else 100, stages, skipped and compressed
            )
            log.step(iteration, step, lr=1e-3, seconds=0.5)
    events = read_events(tmp_path / "metrics.jsonl", "signature")
    assert [event["iteration"] for event in events] == ([5 * log.window] if named else [])
