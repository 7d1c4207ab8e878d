"""The activation formula against published values and hand computation."""

from __future__ import annotations

from typing import Any

import pytest

from experiments.simulation.activation_memory import layer_bytes, stage_bytes
from experiments.spec.settings import RunConfig


def run(*, model: dict[str, Any] | None = None, parallel: dict[str, Any] | None = None, **train: Any) -> RunConfig:
    return RunConfig(
        scale="test", study="test", variant="none", label="none", seed=1,
        model={"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 32, "dropout": 0.1} | (model or {}),
        parallel=parallel or {},
        train={"iterations": 1, "micro_batch": 2, "global_batch": 2, "lr": 1.0, "lr_warmup_fraction": 0.0,
               "eval_interval": 1, "eval_batches": 1} | train,
    )  # fmt: skip


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_half_precision_is_the_published_equation(tensor: int) -> None:
    s, b, h, a = 32, 2, 64, 4
    ours = layer_bytes(run(parallel={"tensor": tensor}, precision="bf16"))
    assert ours == pytest.approx(s * b * h * (10 + 24 / tensor + 5 * a * s / (h * tensor)), rel=1e-12)


def test_the_175b_model_of_the_paper() -> None:
    # Section 4.1: 96 heads, hidden 12288, sequence 2048: scores and masks are 80 s b h, beside 34 s b h.
    big = {"layers": 1, "hidden": 12288, "heads": 96, "sequence_length": 2048}
    whole = layer_bytes(run(model=big, precision="bf16"))
    without = layer_bytes(run(model=big, precision="bf16"), keeps_scores=False)
    unit = 2 * 2048 * 12288
    assert without / unit == pytest.approx(34.0)
    assert (whole - without) / unit == pytest.approx(80.0)


def test_fp32_without_dropout_by_hand() -> None:
    # 4 tensors of s b h whole; Q K V, projection's input, GeLU in and out: 4 + 8; one matrix of scores a head
    s, b, h, a = 32, 2, 64, 4
    ours = layer_bytes(run(model={"dropout": 0.0}))
    assert ours == 4 * (s * b * h * (4 + 4 + 8) + b * a * s * s)


def test_end_stages_hold_more() -> None:
    split = run(parallel={"tensor": 2, "pipeline": 2})
    s, b, h, v = 32, 2, 64, 512
    middle = 2 * layer_bytes(split)
    assert stage_bytes(split, 0, v) - middle == s * b * h
    assert stage_bytes(split, 1, v) - middle == 2 * 4 * s * b * h + 4 * s * b * v / 2
