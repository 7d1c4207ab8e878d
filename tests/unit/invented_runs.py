"""Runs in memory, with effects planted, for tests of the analysis where no kept run has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.analyse.runs import Run


def edgc(window: int = 40, **more: Any) -> dict[str, Any]:
    """Settings of EDGC with the paper's sampling."""
    return {"method": "edgc", "policy": "cqm", "window": window, "entropy": {"iteration_rate": 0.1}, **more}


def run(
    variant: str,
    seed: int = 1,
    *,
    status: str = "ok",
    loss: float | None = 5.0,
    bytes_total: int = 1_000,
    compression: dict[str, Any] | None = None,
    events: dict[str, list[dict[str, Any]]] | None = None,
    **config: Any,
) -> Run:
    """A run of 200 iterations with this validation loss (nats) and these events by kind."""
    settings = {"variant": variant, "seed": seed, "compression": compression or {"method": "none"}}
    settings |= {"train": {"iterations": 200, "lr": 1e-3}, "model": {"hidden": 96, "layers": 4, "sequence_length": 64}}
    summary = {"validation_loss": loss, "bytes_total": bytes_total, "bytes_dense_total": 4_000, "iterations": 200}
    result = Run(Path(f"{variant}-s{seed}"), status, settings | config, summary)
    result.__dict__["events"] = events or {}
    return result


def decisions(
    ranks: Sequence[int | Sequence[int | None] | None], window: int = 40, **more: Any
) -> dict[str, list[dict[str, Any]]]:
    """Events of a policy that decides these ranks (of one stage, or of several), at the ends of windows."""
    rows = [row if isinstance(row, list) else [row] for row in ranks]
    about = {"phase": "active", "r_min": 4, "r_max": 64, **more}
    return {"decision": [{"iteration": window * k, "ranks": row, **about} for k, row in enumerate(rows, start=1)]}


def steps(full: np.ndarray, sampled: np.ndarray, **stage: Any) -> dict[str, list[dict[str, Any]]]:
    """Events of steps with one stage of these entropies (nats; both of shape (iterations,)) and settings."""
    rows = [{"stage": 0, "rank": 8, "bytes": 100, "entropy_full": a, "entropy": b, **stage}
            for a, b in zip(full, sampled, strict=True)]  # fmt: skip
    return {"step": [{"iteration": t, "stages": [row]} for t, row in enumerate(rows, start=1)]}
