"""Predicted against actual error of low-rank approximations over training, and how stiff CQM's rank is.

What is predicted is the absolute Frobenius error of one matrix X at rank r and iteration t, for X = G, the local
gradient, and X = M, the mean over the replicas of gradient plus error feedback, which the compressor approximates
(``mean``; in runs from before that was recorded M is one replica's own, ``compressed``). Predictors:

* ``iid``: sigma_t g(r), as if the entries of X were independent;
* ``anchored``: actual(r0, t0) exp(H_t - H_t0) g(r) / g(r0), CQM's statement: t0 is the first probed iteration after
  ``WARM_UP`` of the run, r0 the rank in use, H the entropy of X in the probed iteration alone (CQM takes means over
  windows, and over the matrices of a stage);
* ``anchored_gradient`` (for M): the same with the entropy of G, which is the one that EDGC measures;
* ``spectral`` (for M): :mod:`edgc.measurement.spectral`, from the singular values that PowerSGD has at iteration t;
* ``tail`` (for M): the same from as many exact singular values, which tells the tail's error from PowerSGD's.

Actual is the error of the ``best`` approximation of rank r, from a singular value decomposition; for M also what
``powersgd`` leaves: at the rank in use in this run, at another rank r in the run of the same seed that has this rank,
where it is taken relative to ||M|| since G and E differ there. ``anchored`` is anchored on the same kind of error. What
is exact by construction is no prediction and has no row: ``spectral`` of ``powersgd`` at the rank in use, and ``tail``
up to it. In runs without compression the rank in use is the middle one of the study (the lower of two).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np
import pandas as pd

from edgc.control.rank_model import error as error_of
from edgc.measurement.spectral import MatrixSpectrum
from experiments.analyse.entropy_trend import LAYER_GROUPS, WARM_UP, group_of
from experiments.analyse.runs import Run, as_float
from experiments.analyse.statistics import quartiles
from experiments.analyse.stiffness import rank_curves, stiffness
from experiments.analyse.tables import identity, result

RESULTS = ("table.csv", "errors.csv", "stiffness.csv", "cqm.csv")
DETAILS = ("curves.csv",)
MULTIPLES = (0.25, 0.5, 1, 2, 3)  # of the rank in use: the ranks that are predicted, up to half the full rank
WINDOWS = 10  # equal parts of a run in `errors.csv`
LAYERS = "<layers>"  # the matrices of the transformer layers together
OTHER = "other"  # embeddings and head
COLUMNS = ("iteration", "kind", "of", "actual", "predictor", "rank", "in_use", "norm", "value", "predicted")
PLACE = ["stage", "parameter", "iteration"]
KEYS = ["of", "actual", "predictor", "matrices"]  # of `table.csv`
ERRORS = ["variant", "window", "of", "actual", "predictor", "kind", "ranks", "rank"]  # keys of `errors.csv`

Errors = dict[tuple[int, str, int], float]  # by stage, parameter and iteration


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table``: |ln(predicted / actual)| after t0, a row per run, X, kind of actual error, predictor, matrices and
    rank, and over all ranks ``below`` and ``above`` the one in use. ``errors``: predicted and actual error relative to
    ||X|| over training, per variant, matrices of all seeds together. ``stiffness``, ``cqm``: see
    :mod:`experiments.analyse.stiffness`."""
    ranks = {int(run.setting("rank")) for run in runs if run.setting("rank")}
    reference = float(median_low(ranks)) if ranks else math.nan
    remaining = {(run.seed, run.setting("rank")): left_by_powersgd(run) for run in runs if run.ok}
    predicted = [(run, predictions(run, reference, remaining)) for run in runs]
    return {
        "table": [row for run, rows in predicted for row in accuracy(run, rows)],
        "errors": over_training(predicted),
        "stiffness": stiffness(runs, reference),
        "cqm": rank_curves(runs, reference),
    }


def reference_iteration(run: Run) -> int:
    """t0; beyond the run where nothing was probed after warm-up."""
    late = run.spectra.loc[run.spectra["iteration"] > WARM_UP * run.iterations, "iteration"]
    return int(late.min()) if len(late) else run.iterations + 1


def left_by_powersgd(run: Run) -> Errors:
    """Relative error that PowerSGD made, by stage, parameter and iteration."""
    if run.spectra.empty:
        return {}
    known = run.spectra.dropna(subset=["powersgd_error"]).set_index(PLACE)
    return dict(known["powersgd_error"].astype(float).items())


def predictions(run: Run, reference: float, remaining: Mapping[tuple[int, Any], Errors]) -> pd.DataFrame:
    """Every prediction of a run: ``COLUMNS``, with ``value`` the actual error, both absolute.

    Args:
        reference: the rank in use where nothing is compressed.
        remaining: :func:`left_by_powersgd` of all runs by seed and rank.
    """
    spectra, rows = run.spectra, list[dict[str, Any]]()
    if not spectra.empty:
        start = reference_iteration(run)
        gradients = spectra[spectra["of"] == "gradient"].set_index(PLACE)["entropy"].sort_index()
        others = {int(rank): errors for (seed, rank), errors in remaining.items() if rank and seed == run.seed}
        others.pop(int(run.setting("rank", 0)), None)
        for (stage, parameter, subject), frame in spectra.groupby(["stage", "parameter", "of"]):
            kind = group_of(str(parameter))
            about = {"kind": kind if kind in LAYER_GROUPS else OTHER, "of": subject}
            entropies = {"anchored": frame.set_index("iteration")["entropy"]}
            if subject != "gradient":
                entropies["anchored_gradient"] = gradients.loc[(stage, parameter)]
            rows += [about | row for row in _of_matrix(frame, entropies, start, reference, others)]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _of_matrix(
    frame: pd.DataFrame, entropies: dict[str, pd.Series], start: int, reference: float, others: Mapping[int, Errors]
) -> Iterator[dict[str, Any]]:
    """The predictions for one matrix through a run; those that are anchored from ``start`` on."""
    anchors, at = dict[str, float](), 0
    for row in frame.sort_values("iteration").itertuples():
        shape = (int(row.rows), int(row.columns))
        in_use = int(row.rank) if as_float(row.rank) > 0 else int(min(reference, *shape))
        known = exact = None
        if row.singular_sq is not None:
            known = MatrixSpectrum(shape, list(row.singular_sq), float(row.input_sq))
            exact = MatrixSpectrum(shape, list(row.best_sq), float(row.norm) ** 2)
        errors = _actual(row, in_use, others)
        if row.iteration == start:
            anchors, at = {actual: value for rank, actual, value in errors if rank == in_use}, in_use
        for rank, actual, value in errors:
            predicted = {"iid": row.sigma * error_of(*shape, rank)}
            if actual in anchors:
                share = error_of(*shape, rank) / error_of(*shape, at)
                for name, entropy in entropies.items():
                    predicted[name] = anchors[actual] * math.exp(entropy[row.iteration] - entropy[start]) * share
            if known is not None and (actual == "best" or rank != in_use):
                predicted["spectral"] = math.sqrt(known.errors_sq([rank])[0])
            if exact is not None and actual == "best" and rank > in_use:
                predicted["tail"] = math.sqrt(exact.errors_sq([rank])[0])
            for name, guess in predicted.items():
                if value > 0 and guess > 0:
                    about = {"iteration": row.iteration, "actual": actual, "predictor": name, "rank": rank}
                    yield about | {"in_use": in_use, "norm": row.norm, "value": value, "predicted": guess}


def _actual(row: Any, in_use: int, others: Mapping[int, Errors]) -> list[tuple[int, str, float]]:
    """(rank, kind, absolute error) at the ranks that are predicted."""
    half = min(row.rows, row.columns) / 2
    best = dict(zip(map(int, row.ranks), row.errors, strict=True))
    ranks = {rank for rank in (round(m * in_use) for m in MULTIPLES) if rank <= half or rank == in_use}
    errors = [(rank, "best", row.norm * best[rank]) for rank in sorted(ranks & best.keys())]
    if as_float(row.powersgd_error) > 0:
        place = (row.stage, row.parameter, row.iteration)
        errors.append((in_use, "powersgd", row.norm * row.powersgd_error))
        errors += [(rank, "powersgd", row.norm * left[place]) for rank, left in others.items() if place in left]
    return errors


def accuracy(run: Run, predicted: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows of ``table.csv`` of one run; ``early`` and ``late`` are the halves of what follows t0."""
    about = identity(run) | {"rank_in_use": run.setting("rank")} | result(run)
    after = predicted[predicted["iteration"] > reference_iteration(run)] if len(predicted) else predicted
    if after.empty:
        return [about]
    after = after.assign(log=np.log(after["predicted"] / after["value"]))
    after["matrices"] = np.where(after["kind"] == OTHER, OTHER, LAYERS)
    middle, rows = (reference_iteration(run) + run.iterations) / 2, []
    for key, group in after.groupby(KEYS):
        parts = [(name, math.nan, part) for name, part in group.groupby(side(group)) if name != "in use"]
        parts += [("one", float(rank), part) for rank, part in group.groupby("rank")]
        for ranks, rank, part in parts:
            size, early = part["log"].abs(), part["iteration"] <= middle
            rows.append(
                about
                | dict(zip(KEYS, key, strict=True))
                | {"ranks": ranks, "rank": rank, "predictions": len(part)}
                | {f"abs_log_{name}": value for name, value in quartiles(size).items()}
                | {"abs_log_p90": float(np.percentile(size, 90))}
                | {"abs_log_early": float(size[early].median()), "abs_log_late": float(size[~early].median())}
                | {"log_median": float(part["log"].median())}
            )
    return rows


def side(frame: pd.DataFrame) -> np.ndarray:
    """Place of each prediction's rank: ``below``, ``in use`` or ``above``."""
    difference = frame["rank"].to_numpy(dtype=float) - frame["in_use"].to_numpy(dtype=float)
    return np.select([difference < 0, difference > 0], ["below", "above"], "in use")


def over_training(predicted: Sequence[tuple[Run, pd.DataFrame]]) -> pd.DataFrame:
    """``errors.csv``: medians over matrices and probes in ``WINDOWS`` parts of the finished runs of each variant.

    ``window`` is the part's last iteration; ``ratio`` is predicted / actual, with quartiles. For all kinds of matrices
    in the layers together there are also rows of one rank each (``ranks`` is then ``one``).
    """
    values = ["actual_median", "predicted_median", "ratio_median", "ratio_q1", "ratio_q3"]
    frames = []
    for run, frame in predicted:
        if run.ok and len(frame):
            part = np.ceil(WINDOWS * frame["iteration"].astype(float) / run.iterations)
            about = {"variant": run.variant, "seed": run.seed, "ranks": side(frame)}
            frames.append(frame.assign(window=part * run.iterations / WINDOWS, **about))
    if not frames:
        return pd.DataFrame(columns=[*ERRORS, "n", "predictions", *values])
    every = pd.concat(frames, ignore_index=True)
    layers = every[every["kind"] != OTHER].assign(kind=LAYERS)
    pooled = pd.concat([every, layers], ignore_index=True).assign(rank=math.nan)
    rows = []
    for key, group in pd.concat([pooled, layers.assign(ranks="one")], ignore_index=True).groupby(
        ERRORS, sort=True, dropna=False
    ):
        row = dict(zip(ERRORS, key, strict=True)) | {"n": group["seed"].nunique(), "predictions": len(group)}
        for name, column in (("actual", "value"), ("predicted", "predicted")):
            row[f"{name}_median"] = float((group[column] / group["norm"]).median())
        ratio = quartiles(group["predicted"] / group["value"])
        rows.append(row | {f"ratio_{name}": value for name, value in ratio.items()})
    return pd.DataFrame(rows)
