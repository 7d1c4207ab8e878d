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
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.statistics import pearson
from experiments.analyse.tables import identity
from experiments.common.equivalence import interval

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
    best: dict[int, Run] = {}
    for run in runs:
        if run.ok and run.policy is not None and run.stages["entropy_full"].notna().any():
            chosen = best.setdefault(run.seed, run)
            if run.edgc.entropy.iteration_rate > chosen.edgc.entropy.iteration_rate:
                best[run.seed] = run
    return pd.DataFrame([row for seed in sorted(best) for row in _run_rows(best[seed])], columns=COLUMNS)


def _run_rows(run: Run) -> Iterator[dict[str, Any]]:
    entropy = run.edgc.entropy
    every = entropy.iteration_rate == 1
    about = identity(run) | {"beta": float(entropy.entry_rate) if every else 1.0}
    for stage, frame in run.stages.sort_values("iteration").groupby("stage"):
        frame = frame.dropna(subset=["entropy_full", "entropy"] if every else ["entropy_full"])
        for span in SPANS:
            part = frame[frame["iteration"] >= (run.first_compressed if span == SPANS[0] else 0)]
            full, samples = part["entropy_full"], part["entropy" if every else "entropy_full"]
            for row in cells(full.to_numpy(), samples.to_numpy()):
                yield about | {"stage": int(stage), "span": span} | row


def cells(full: np.ndarray, samples: np.ndarray, alphas: Sequence[float] = ALPHAS) -> list[dict[str, Any]]:
    """Every window and alpha that this course of entropies (nats; both of shape (iterations,)) has enough windows for,
    and at the paper's alpha the extrapolation from the longest window of which there are enough for s and V.

    ``spread_nats`` is sqrt(V), ``error_nats`` sqrt(E) of the row's own window; ``cc_model`` what they give.
    """
    rows, base = list[dict[str, Any]](), None
    for alpha in alphas:
        step = round(1 / alpha)
        for window in WINDOWS:
            count = len(full) // window
            if count < LEAST_WINDOWS or window % step:
                continue
            cc, spread, error = measure(full, samples, window, step)
            about = {"window": window, "alpha": alpha, "samples": round(window * alpha), "kind": MEASURED}
            rows.append(about | {"windows": count, "from_window": window, "cc": cc} | _model(spread, error))
            if alpha == PAPER_ALPHA and count >= BASE_WINDOWS:
                base = rows[-1]
    if base is not None:
        rows += [extrapolate(base, count) for count in EXTRAPOLATED if count > base["samples"]]
    return rows


def _model(spread: float, error: float) -> dict[str, float]:
    """CC by the model of this module's head from V and E (nats squared), and these as standard deviations."""
    cc = math.sqrt(spread / (spread + error)) if spread + error > 0 else math.nan
    return {"cc_model": cc, "spread_nats": math.sqrt(spread), "error_nats": math.sqrt(error)}


def measure(full: np.ndarray, samples: np.ndarray, window: int, step: int) -> tuple[float, float, float]:
    """CC of the windows when every ``step``-th iteration is sampled, V, and E, in nats squared."""
    count = len(full) // window
    means = full[: count * window].reshape(count, window).mean(axis=1)
    starts = samples[: count * window].reshape(count, window // step, step).mean(axis=1)  # a column per start
    cc = combined(pearson(starts[:, start], means) for start in range(step))["mean"]
    error = (starts - means[:, None]).var(axis=0, ddof=1).mean()
    return cc, float(means.var(ddof=1)), float(error)


def extrapolate(base: dict[str, Any], samples: int) -> dict[str, Any]:
    """The row of a window of ``samples`` samples by the model of this module's head, from the row of a measured one."""
    alpha, spread, error = base["alpha"], base["spread_nats"] ** 2, base["error_nats"] ** 2
    noise = alpha / (1 - alpha)  # of E, in the mean of all iterations of the window
    smaller = error * base["samples"] / samples
    model = _model(max(spread - noise * error, 0.0) + noise * smaller, smaller)
    about = {"window": round(samples / alpha), "alpha": alpha, "samples": samples, "kind": EXTRAPOLATION}
    return base | about | {"cc": model["cc_model"]} | model


def combined(values: Iterable[float]) -> dict[str, float]:
    """n, mean and the 95 % t interval (``low``, ``high``) of correlations, taken over Fisher's z."""
    limit = 1 - 1e-12  # equal series have z = infinity
    over = interval([math.atanh(min(max(cc, -limit), limit)) for cc in values])
    return {"n": over["n"]} | {key: math.tanh(over[key]) for key in ("mean", "low", "high")}


def summary(rows: pd.DataFrame, more: Sequence[str] = ()) -> pd.DataFrame:
    """Per cell, and per value of the columns ``more``, the mean of CC over seeds and its interval."""
    by, means = [*more, *CELL], []
    for key, group in rows.groupby(by, sort=False):
        over = combined(group["cc"])
        about = dict(zip(by, key, strict=True)) | {"n": over["n"], "windows": int(group["windows"].min())}
        about |= {f"cc_{name}": over[name] for name in ("mean", "low", "high")}
        means.append(about | {"cc_model_mean": combined(group["cc_model"])["mean"]})
    return pd.DataFrame(means, columns=[*by, "n", "windows", "cc_mean", "cc_low", "cc_high", "cc_model_mean"])
