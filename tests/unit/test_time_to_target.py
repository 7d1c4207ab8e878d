"""Time to a loss over a modelled network, on runs whose times and losses are known by hand."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from experiments.analyse import methods
from experiments.analyse.runs import Run
from tests.unit.invented_runs import run

STEPS = 100


def made(variant: str, method: str, losses: list[float], stage_bytes: tuple[int, int], work: float) -> Run:
    """Losses after every 20 steps; compute takes 0.1 s a step, an uncompressed reduction 0.05 s of stage 1."""
    rows = [
        {"iteration": float(t), "stage": float(stage), "bytes": float(stage_bytes[stage])}
        | {"seconds_compress": work * (1 + stage), "seconds_communicate": 0.02 + 0.03 * stage}
        | {"seconds_decompress": 0.0}
        for t in range(1, STEPS + 1)
        for stage in range(2)
    ]
    at, found = [20.0 * (k + 1) for k in range(len(losses))], run(variant, compression={"method": method})
    found.__dict__["stages"] = pd.DataFrame(rows)
    found.__dict__["steps"] = pd.DataFrame({"iteration": np.arange(1.0, STEPS + 1), "seconds": 0.15})
    found.__dict__["evaluations"] = pd.DataFrame({"iteration": at, "loss": losses, "perplexity": losses})
    return found


PLAIN = made("none", "none", [5.0, 4.0, 3.5, 3.2, 3.0], (1_000_000, 2_000_000), 0.0)
HALF = made("half", "powersgd", [5.0, 4.1, 3.6, 3.3, 3.05], (500_000, 1_000_000), 0.01)
NEVER = made("never", "sign", [5.0, 4.9, 4.8, 4.7, 4.6], (1_000, 1_000), 0.0)


def test_times_are_those_computed_by_hand() -> None:
    found = methods.times_to_target([PLAIN, HALF, NEVER]).set_index(["variant", "megabits"])
    # 90 of 100 iterations: half-way between 3.2 and 3.0.
    assert found.loc[("none", 10.0), "target_loss"] == pytest.approx(3.1)
    assert found.loc[("none", 10.0), "iterations"] == pytest.approx(90)
    # Stage 1 is the slower one: 2 MB at 10 Mbit/s take 1.6 s.
    assert found.loc[("none", 10.0), "seconds"] == pytest.approx(90 * (0.1 + 1.6))
    assert found.loc[("half", 10.0), "iterations"] == pytest.approx(96)
    assert found.loc[("half", 10.0), "seconds"] == pytest.approx(96 * (0.1 + 0.02 + 0.8))
    assert found.loc[("half", 10.0), "of_uncompressed"] == pytest.approx(96 * 0.92 / (90 * 1.7))
    # A fast network: its work costs more than its bytes save.
    assert found.loc[("half", 10000.0), "of_uncompressed"] > 1
    assert math.isnan(found.loc[("never", 10.0), "seconds"])
    assert set(found["kind"]) == {"modelled network"}
    assert methods.times_to_target([HALF]).empty, "without an uncompressed run there is no target"
    assert (methods.reached(PLAIN, 3.75), methods.reached(PLAIN, 6.0)) == (pytest.approx(50), 20)
    assert methods.seconds(PLAIN, 0.1, 2.5, 1e9) == pytest.approx(0.25, rel=1e-3)
