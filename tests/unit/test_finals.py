"""Estimates of the loss at the end of a run: of the weights as they are, and of their mean over evaluations."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.errors import UserError
from experiments.spec import matrix
from experiments.spec.settings import FinalConfig, RunConfig, resolve
from experiments.training.checkpoint import Progress
from experiments.training.loop import Training
from experiments.training.outputs import read_events
from experiments.training.run_log import SECONDS, Step

FINAL = {"evaluations": 3, "every": 2, "batches": 5}
TOKENS = 8 * 64  # of a global batch


def changed(**train: Any) -> RunConfig:
    values = matrix.runs("methods", "ci")[0].model_dump(mode="json")
    train = {**values["train"], "iterations": 10, "eval_interval": 10, "eval_batches": 2, **train}
    return resolve({**values, "compression": {"method": "none"}, "train": train}, "test")


class Checkpoints:
    """The state after iteration 7, if there is one, which is resumed from."""

    def __init__(self, last: Progress | None = None) -> None:
        self.last = last

    def resume(self) -> Progress | None:
        return self.last

    def branch(self) -> None:
        return None

    def due(self, iteration: int) -> bool:
        return iteration == 7

    def save(self, progress: Progress, name: str) -> None:
        self.last = replace(progress, metrics=progress.metrics.with_suffix(".saved"))
        shutil.copyfile(progress.metrics, self.last.metrics)


class Stand(Training):
    """One weight, after every iteration as large as this was; its loss over ``k`` batches is ``k`` times its square."""

    engine = None
    lr = 0.1
    skipped_in_a_row = 0

    def __init__(self, run: RunConfig, attempt: Path, checkpoints: Checkpoints) -> None:
        super().__init__(run, 512, attempt, checkpoints, speaks=True)  # type: ignore[arg-type]
        self.weight = torch.nn.Parameter(torch.zeros(1))

    @property
    def weights(self) -> list[Tensor]:
        return [self.weight]

    def start_batches(self, first: int) -> None:
        pass

    def train_step(self, iteration: int) -> Step:
        with torch.no_grad():
            self.weight.fill_(float(iteration))
        return Step(1.0, 1.0, 100, [{"rank": None, **{f"seconds_{part}": 0.0 for part in SECONDS}}])

    def evaluate(self, batches: Sequence[int]) -> list[float]:
        return [float(self.weight.detach() ** 2) * count for count in batches]

    def add_loss(self, loss: float) -> None:
        pass

    def dense_bytes(self) -> int:
        return 100

    def finish(self, *, weights: bool) -> None:
        pass


def finals(folder: Path) -> list[tuple[int, str, int, float]]:
    events = read_events(folder / "metrics.jsonl", "final")
    return [(event["iteration"], event["weights"], event["tokens"], event["loss"]) for event in events]


@pytest.mark.parametrize("killed", [False, True])
def test_losses_of_the_last_weights_and_of_their_mean_at_both_numbers_of_tokens(tmp_path: Path, killed: bool) -> None:
    run, checkpoints = changed(final=FINAL), Checkpoints()
    if killed:  # when one of three weights was noted
        (tmp_path / "killed").mkdir()
        Stand(run, tmp_path / "killed", checkpoints).train()
    last = Stand(run, tmp_path, checkpoints)
    last.train()
    expected = [(at, "last", count * TOKENS, count * at**2) for at in (6, 8, 10) for count in (2, 5)]
    assert finals(tmp_path) == expected + [(10, "mean", count * TOKENS, count * 8.0**2) for count in (2, 5)]
    assert float(last.weight.detach()) == 10, "the weights at the end are the last ones"
    [evaluation] = read_events(tmp_path / "metrics.jsonl", "eval")
    assert evaluation["loss"] == 2 * 10**2, "what a run reports is as without"


def test_a_run_without_them_has_no_such_record(tmp_path: Path) -> None:
    run = changed()
    Stand(run, tmp_path, Checkpoints()).train()
    assert finals(tmp_path) == [] and "final" not in run.model_dump()["train"]


def test_more_evaluations_than_the_run_is_long_are_refused() -> None:
    with pytest.raises(UserError, match=r"5 evaluations, 3 iterations apart, are longer than iterations = 10"):
        changed(final={"evaluations": 5, "every": 3, "batches": 5})
    assert not FinalConfig(**FINAL).due(4, 10) and FinalConfig(**FINAL).due(6, 10)
