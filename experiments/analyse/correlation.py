"""CC against the number of samples in a window: measured where runs are long enough, extrapolated to the paper's.

CC is the Pearson correlation, over windows of w iterations, between the mean of k = alpha w sampled entropies and the
mean F of the full entropy at all w iterations (paper, window study: CC >= 0.94 at w = 1000, alpha = 0.1, so k = 100). A
run that recorded both at every iteration gives it for any w and alpha: every (1/alpha)-th iteration is taken, from each
of the 1/alpha possible starts, and CC is the mean over the starts, as Fisher's z = artanh(CC).

Model: the mean of a window's samples is F plus an error of variance E = s^2 / k, uncorrelated with F, so with V the
variance of F over windows CC = sqrt(V / (V + E)). It holds where samples do not depend on each other. F itself has
alpha / (1 - alpha) E of the same noise in it, which shrinks as windows grow; what is left of V, the variance of the
underlying course, is taken to be that of longer windows too. In a run of the paper's length it is if anything larger:
its window is 1/230 of the run, ours are longer shares, and averaging over a longer share removes variance. s and V are
those of the run at hand: the extrapolation says what more samples do to this course, nothing of another model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.statistics import interval, pearson
from experiments.analyse.tables import identity
from experiments.analyse.windows import first_compressed

ALPHAS = (0.5, 0.25, 0.1, 0.05)  # whole numbers of iterations between samples
PAPER_ALPHA, PAPER_SAMPLES = 0.1, 100
WINDOWS = (10, 20, 50, 100, 200, 500, 1000, 2500)
EXTRAPOLATED = (5, 10, 20, 50, PAPER_SAMPLES, 200, 500)  # samples of a window
LEAST_WINDOWS = 5  # of which a CC is given
BASE_WINDOWS = 10  # of which s and V are taken
SPANS = ("after warm-up", "whole run")
MEASURED, EXTRAPOLATION = "measured", "extrapolated"
CELL = ["stage", "span", "window", "alpha", "samples", "kind"]
COLUMNS = ["variant", "label", "seed", "status", "beta", *CELL]
COLUMNS += ["windows", "from_window", "cc", "cc_model", "spread_nats", "error_nats"]


def table(runs: Iterable[Run]) -> pd.DataFrame:
    """A row per seed, stage, span, window and alpha, of one run per seed.

    The seed's runs share their data and nearly their entropies, so more of them are no more evidence: the run that
    sampled at the most iterations is taken, and of several the first. ``beta`` is the share of the entries in each
    sample, 1 where the run did not sample at every iteration and full entropies stand for the samples.
    """
    rows = [row for run in one_per_seed(runs) for row in of_run(run)]
    return pd.DataFrame(rows, columns=COLUMNS)


def one_per_seed(runs: Iterable[Run]) -> list[Run]:
    """Finished runs with the full entropy, the one that sampled at the most iterations of each seed."""
    best: dict[int, Run] = {}
    for run in runs:
        if not run.ok or run.policy is None or run.stages["entropy_full"].isna().all():
            continue
        held = best.get(run.seed)
        if held is None or run.edgc.entropy.iteration_rate > held.edgc.entropy.iteration_rate:
            best[run.seed] = run
    return [best[seed] for seed in sorted(best)]


def of_run(run: Run) -> list[dict[str, Any]]:
    entropy, rows = run.edgc.entropy, []
    every = entropy.iteration_rate == 1
    about = identity(run) | {"beta": float(entropy.entry_rate) if every else 1.0}
    for stage, frame in run.stages.sort_values("iteration").groupby("stage"):
        frame = frame.dropna(subset=["entropy_full", "entropy"] if every else ["entropy_full"])
        full, sampled = frame["entropy_full"], frame["entropy" if every else "entropy_full"]
        for span in SPANS:
            part = frame["iteration"] >= (first_compressed(run) if span == SPANS[0] else 0)
            found = cells(full[part].to_numpy(), sampled[part].to_numpy())
            rows += [about | {"stage": int(stage), "span": span} | row for row in found]
    return rows


def cells(full: np.ndarray, sampled: np.ndarray, alphas: Sequence[float] = ALPHAS) -> list[dict[str, Any]]:
    """Every window and alpha that this course of entropies (nats; both of shape (iterations,)) has enough windows for,
    and at the paper's alpha the extrapolation from the longest window of which there are enough for s and V.

    ``spread_nats`` is sqrt(V), ``error_nats`` sqrt(E) of the row's own window; ``cc_model`` what they give.
    """
    rows, base = [], None
    for alpha in alphas:
        for window in WINDOWS:
            count = len(full) // window
            if count < LEAST_WINDOWS or window % round(1 / alpha):
                continue
            cc, spread, error = measure(full, sampled, window, round(1 / alpha))
            row = cell(window, alpha, round(window * alpha), count, MEASURED, cc, window, spread, error)
            rows.append(row)
            if alpha == PAPER_ALPHA and count >= BASE_WINDOWS:
                base = row
    if base is not None:
        rows += [extrapolate(base, samples) for samples in EXTRAPOLATED if samples > base["samples"]]
    return rows


def cell(
    window: int, alpha: float, samples: int, windows: int, kind: str, cc: float, of: int, spread: float, error: float
) -> dict[str, Any]:
    """One row; variances in nats squared, written as standard deviations."""
    model = math.sqrt(spread / (spread + error)) if spread + error > 0 else math.nan
    return {
        "window": window, "alpha": alpha, "samples": samples, "kind": kind,
        "windows": windows, "from_window": of, "cc": cc, "cc_model": model,
        "spread_nats": math.sqrt(spread), "error_nats": math.sqrt(error),
    }  # fmt: skip


def measure(full: np.ndarray, sampled: np.ndarray, window: int, step: int) -> tuple[float, float, float]:
    """CC of the windows when every ``step``-th iteration is sampled, V, and E, in nats squared."""
    count = len(full) // window
    means = full[: count * window].reshape(count, window).mean(axis=1)
    starts = sampled[: count * window].reshape(count, window // step, step).mean(axis=1)  # a column per start
    cc = fisher_mean([pearson(starts[:, start], means) for start in range(step)])
    error = (starts - means[:, None]).var(axis=0, ddof=1).mean()
    return cc, float(means.var(ddof=1)), float(error)


def extrapolate(base: dict[str, Any], samples: int) -> dict[str, Any]:
    """The row of a window of ``samples`` samples by the model of this module's head, from the row of a measured one."""
    alpha, spread, error = base["alpha"], base["spread_nats"] ** 2, base["error_nats"] ** 2
    noise = alpha / (1 - alpha)  # of E, in the mean of all iterations of the window
    there = error * base["samples"] / samples
    course = max(spread - noise * error, 0.0) + noise * there
    row = cell(
        round(samples / alpha), alpha, samples, base["windows"], EXTRAPOLATION, math.nan, base["window"], course, there
    )
    return row | {"cc": row["cc_model"]}


def fisher_mean(values: Sequence[float]) -> float:
    return combined(values)["mean"]


def combined(values: Iterable[float]) -> dict[str, float]:
    """n, mean and the 95 % t interval (``low``, ``high``) of correlations, taken over Fisher's z."""
    limit = 1 - 1e-12  # equal series have z = infinity
    found = interval([math.atanh(min(max(cc, -limit), limit)) for cc in values])
    return {"n": found["n"]} | {key: math.tanh(found[key]) for key in ("mean", "low", "high")}


def summary(rows: pd.DataFrame, more: Sequence[str] = ()) -> pd.DataFrame:
    """Per cell, and per value of the columns ``more``, the mean of CC over seeds and its interval."""
    by = [*more, *CELL]
    found = []
    for key, group in rows.groupby(by, sort=False):
        over = combined(group["cc"])
        about = dict(zip(by, key, strict=True)) | {"n": over["n"], "windows": int(group["windows"].min())}
        model = combined(group["cc_model"])["mean"]
        found.append(about | {f"cc_{name}": over[name] for name in ("mean", "low", "high")} | {"cc_model_mean": model})
    return pd.DataFrame(found, columns=[*by, "n", "windows", "cc_mean", "cc_low", "cc_high", "cc_model_mean"])
