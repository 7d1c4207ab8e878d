"""Numerical safety under Megatron-Core: DP2 x PP2, one gradient of one rank not finite, one launch for all cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.integration import skip_cases
from tests.workers import run_workers

pytestmark = pytest.mark.slow

PAIRED = list(skip_cases.METHODS) + [f"{name}, overlap" for name in skip_cases.METHODS]
PAIRED.append("powersgd, overlap, distributed optimizer")


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(4, skip_cases.all_cases)


@pytest.mark.parametrize("case", PAIRED)
def test_a_step_with_a_gradient_that_is_not_finite_never_was(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        poisoned, without = rank[case]["poisoned"], rank[case]["without"]
        assert poisoned["skipped"] == len(skip_cases.POISONED)
        assert poisoned["kept"] == [True] * len(skip_cases.POISONED)
        assert without["skipped"] == 0
        assert torch.equal(poisoned["weights"], without["weights"])


def test_skips_in_a_row_are_counted(ranks: list[dict[str, Any]]) -> None:
    assert [rank["always"]["skipped_in_a_row"] for rank in ranks] == [22] * 4
    assert [rank["powersgd"]["poisoned"]["skipped_in_a_row"] for rank in ranks] == [0] * 4


def test_the_controller_does_not_see_skipped_steps(ranks: list[dict[str, Any]]) -> None:
    decisions = ranks[0]["edgc"]["decisions"]
    assert [repr(rank["edgc"]["decisions"]) for rank in ranks] == [repr(decisions)] * 4
    windows = [value for decision in decisions for value in decision["entropy"] if not math.isnan(value)]
    assert windows and all(math.isfinite(value) for value in windows)
    assert decisions[-1]["phase"] == "active"


def test_a_loss_scale_that_falls_takes_error_feedback_along(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        result = rank["fp16"]
        assert result["skipped"] >= 1 and result["skipped_in_a_row"] == 0
        assert result["scale"] < 2.0**16
    losses = [rank["fp16"]["losses"] for rank in ranks if rank["fp16"]["stage"] == 1]
    mean = torch.tensor(losses).mean(0)
    assert mean[-4:].mean() < mean[:4].mean() - 0.05
