"""Predicted against actual error of low-rank approximations over training, and how stiff CQM's rank is.

What is predicted is the absolute Frobenius error of one matrix X at rank r and iteration t, for X = G, the local
gradient, and X = M, the mean over the replicas of gradient plus error feedback, which the compressor approximates
(``mean``). Predictors:

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

Stiffness: CQM keeps sigma g(r), so with the entropy changed by d nats the rank goes from r to the r' with
g(r') = exp(-d) g(r). Near r = 0 that is 2 p / (1 + sqrt(lambda))^2 ranks per nat, p the smaller side and
lambda = p / larger side; further on more, since the directions that are still to be dropped hold less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median_low
from typing import Any

import numpy as np
import pandas as pd

from edgc.control.rank_model import StageModel, next_rank
from edgc.control.rank_model import error as error_of
from edgc.control.settings import PolicyConfig
from edgc.entropy.sampler import Sampler
from edgc.measurement.spectral import MatrixSpectrum
from experiments.analyse.entropy_trend import LAYER_GROUPS, WARM_UP, group_of
from experiments.analyse.runs import Run, as_float
from experiments.analyse.statistics import quartiles
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
SHARES = (1 / 16, 1 / 8, 1 / 4)  # of the smaller side: the ranks that are looked at
LARGE = ((1024, 1024), (4096, 4096))
LARGE_RANK = 64
LOWEST = 0.25  # r_min as a share of r_max, EDGC's default
STEP = 1e-4  # nats, of the numerical derivative
POINTS = 101  # of a curve
LEAST_WINDOWS = 3

Shape = tuple[int, int]
Errors = dict[tuple[int, str, int], float]  # by stage, parameter and iteration


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table``: |ln(predicted / actual)| after t0, a row per run, X, kind of actual error, predictor, matrices and
    rank, and over all ranks ``below`` and ``above`` the one in use. ``errors``: predicted and actual error relative to
    ||X|| over training, per variant, matrices of all seeds together. ``stiffness``, ``cqm``: how far CQM moves the rank
    for a small change of entropy."""
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


def stiffness(runs: Sequence[Run], reference: float) -> list[dict[str, Any]]:
    """A row per shape of the runs' matrices and of ``LARGE``, and rank.

    ``ranks_per_nat`` is the derivative of CQM's rank, ``limit_ranks_per_nat`` its value at rank 0, ``saturates_nats``
    by how much the entropy falls until CQM asks for ``LOWEST`` of the rank. ``noise_nats`` is the standard deviation of
    the mean entropy of a window (:func:`noise`) and ``moved_nats`` how far it went over the run, both medians over
    finished runs and stages; the same in every row.
    """
    measured = [pair for run in runs if run.ok for pair in noise(run)] or [(math.nan, math.nan)]
    noise_nats, moved_nats = np.median(measured, axis=0).tolist()
    rows = []
    for shape, count in [*_shapes(runs).items(), *((shape, 0) for shape in LARGE)]:
        p, large = min(shape), max(shape)
        used = float(min(reference, p) if count else LARGE_RANK)
        for rank in sorted({p * share for share in SHARES} | ({used} if math.isfinite(used) else set())):
            rate, saturation = per_nat(shape, rank), saturates(shape, rank)
            rows.append(
                {"rows": shape[0], "columns": shape[1], "matrices": count, "rank": rank, "in_use": rank == used}
                | {"ranks_per_nat": rate, "limit_ranks_per_nat": 2 * p / (1 + math.sqrt(p / large)) ** 2}
                | {"saturates_nats": saturation, "noise_nats": noise_nats, "moved_nats": moved_nats}
                | {"noise_ranks": noise_nats * rate, "noise_over_saturation": noise_nats / saturation}
            )
    return rows


def per_nat(shape: Shape, rank: float) -> float:
    """Derivative of CQM's rank by the entropy, in ranks per nat."""
    stage = StageModel([shape])
    return (next_rank(stage, rank, 0.0, STEP) - next_rank(stage, rank, 0.0, -STEP)) / (2 * STEP)


def saturates(shape: Shape, rank: float) -> float:
    """Fall of the entropy (nats) at which CQM asks for ``LOWEST`` of ``rank``."""
    return math.log(error_of(*shape, LOWEST * rank) / error_of(*shape, rank))


def noise(run: Run) -> list[tuple[float, float]]:
    """Per stage: standard deviation of a window's mean entropy around its trend, and |last - first window|, in nats.

    The mean is the one that the controller would get from all entries at the iterations that GDS measures, over the
    windows after warm-up. Second differences of the means are free of a linear trend; for independent noise their
    mean square is six times its variance. Stages with too few windows are left out.
    """
    settings, frame = run.edgc, run.stages.dropna(subset="entropy_full")
    frame = frame[frame["iteration"].astype(int).map(Sampler(settings.entropy).measures).astype(bool)]
    frame = frame.assign(window=(frame["iteration"].astype(int) - 1) // settings.window)
    # Of a run without compression: as EDGC would have it.
    warm_up = (settings if isinstance(settings, PolicyConfig) else PolicyConfig).warmup_fraction
    first, last = warm_up * run.iterations / settings.window, run.iterations // settings.window - 1
    measured = []
    for _, stage in frame[frame["window"].between(first, last)].groupby("stage"):
        means = stage.groupby("window")["entropy_full"].mean().to_numpy()
        if len(means) >= LEAST_WINDOWS:
            bends = np.diff(means, 2)
            measured.append((math.sqrt(float((bends**2).mean()) / 6), abs(float(means[-1] - means[0]))))
    return measured


def rank_curves(runs: Sequence[Run], reference: float) -> pd.DataFrame:
    """CQM's rank against the change of entropy, for the commonest shape of the runs and the two of ``LARGE``.

    From the rank in use, or ``LARGE_RANK``; no limits and no rounding.
    """
    shapes = _shapes(runs)
    sizes = [(shape, float(LARGE_RANK)) for shape in LARGE]
    if shapes and math.isfinite(reference):
        commonest = max(shapes, key=lambda shape: (shapes[shape], shape[0] * shape[1]))
        sizes.insert(0, (commonest, min(reference, *commonest)))
    widest = 1.25 * max(saturates(shape, rank) for shape, rank in sizes)
    rows = [
        (*shape, rank, change, next_rank(StageModel([shape]), rank, 0.0, change))
        for shape, rank in sizes
        for change in np.linspace(-widest, widest, POINTS)
    ]
    return pd.DataFrame(rows, columns=["rows", "columns", "rank_start", "change_nats", "rank"])


def _shapes(runs: Sequence[Run]) -> dict[Shape, int]:
    """Shapes of the probed matrices and how many of each the model has, large ones last."""
    spectra = next((run.spectra for run in runs if not run.spectra.empty), None)
    if spectra is None:
        return {}
    counts = spectra.drop_duplicates(["stage", "parameter"]).groupby(["rows", "columns"]).size()
    return {(int(m), int(n)): int(counts[m, n]) for m, n in sorted(counts.index, key=lambda s: s[0] * s[1])}
