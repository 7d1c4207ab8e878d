"""Gradient statistics through training: does entropy fall, and do gradients centre on zero (paper, observations).

Everything is read from the probes (``tensors.parquet``) of GPT and BERT runs, before clipping. Three views:
one parameter group (query-key-value, embedding, ...), ``<all>`` and ``<layers>`` (mean over all parameters,
or over the matrices of the transformer layers, weighted by size; the controller follows such a mean per
stage), and ``<model>`` (all entries pooled into one distribution). A trajectory is described by rules fixed before any
run: does it fall, where, does it rise again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from experiments.analyse.runs import Run
from experiments.analyse.statistics import finite, pearson, slope, thin
from experiments.analyse.tables import summarise, together, with_identity

RESULTS = ("table.csv", "summary.csv", "moments.csv", "moments_summary.csv")
DETAILS = ("trend.csv", "parameters.csv", "norms.csv", "curves.csv")
MODEL = "<model>"
ALL = "<all>"
LAYERS = "<layers>"  # the matrices of the transformer layers alone, without embeddings and head
LAYER_GROUPS = ("qkv", "projection", "fc1", "fc2")
# First match wins; Megatron-Core parameter names.
GROUPS = {
    "linear_qkv": "qkv",
    "linear_proj": "projection",
    "linear_fc1": "fc1",
    "linear_fc2": "fc2",
    "word_embeddings": "embedding",
    "position_embeddings": "position",
    "output_layer": "head",
    "lm_head": "head",
    "norm": "norm",
}
NORMAL = 0.5 * np.log(2 * np.pi * np.e)  # entropy of a normal distribution minus log sigma, nats
WARM_UP = 0.1  # share of the run after which EDGC may compress: CQM takes its reference there
SHAPE_COLUMNS = ("sigma", "log_sigma", "skewness", "excess_kurtosis", "zero_fraction", "near_zero",
                 "correlation_previous", "correlation_layers", "gradient_norm")  # fmt: skip
IDENTITY = ("variant", "label", "architecture")
TREND_COLUMNS = ("start", "minimum", "iteration_minimum", "end")  # summarised over seeds
MOMENT_COLUMNS = ("near_zero_start", "near_zero_end", "excess_kurtosis_min", "excess_kurtosis_max",
                  "excess_kurtosis_start", "excess_kurtosis_end", "correlation_layers_early",
                  "correlation_layers_late", "correlation_previous_early", "correlation_previous_late")  # fmt: skip
ESTIMATORS = ("histogram", "gaussian", "vasicek", "released")
TOLERANCE = 0.05  # nats; smaller changes count as none
STEEP_SHARE = 0.9  # the steep phase ends where this share of the fall to the minimum is done
DESCRIPTION = ("start", "minimum", "iteration_minimum", "end", "steep_end",
               "slope_first_per_100", "slope_after_per_100", "noise")  # fmt: skip
SMOOTH = 3  # probes in the centred mean that minimum and end are read from
LINK = ("form_offset_start", "form_offset_end", "link_error_early", "link_error_late")


def tables(runs: list[Run]) -> dict[str, pd.DataFrame]:
    """``table``: entropy per run, group and estimator. ``moments``: the rest per run and group. ``summary`` and
    ``moments_summary``: the same over seeds. ``trend``: everything per probe and group. ``parameters``: log sigma per
    probe and parameter. ``norms``: gradient norm per step."""
    names = ("moments", "trend", "parameters", "norms", "table")
    frames: dict[str, list[pd.DataFrame]] = {name: [] for name in names}
    for run in runs:
        probes, norms = grouped(run.tensors), run.steps[["iteration", "grad_norm", "grad_norm_clipped"]]
        rows = {"norms": norms.iloc[thin(len(norms))]}
        if probes.empty:  # a run without probes keeps its row, so that a failure shows
            rows["table"] = pd.DataFrame([{"estimator": "", "group": ALL, "verdict": "no probes"}])
            rows["moments"] = pd.DataFrame([{"group": ALL}])
        else:
            trend, parameters = trajectories(probes), probes[probes["group"] != MODEL]
            columns = ["iteration", "stage", "parameter", "group", "numel", "log_sigma"]
            rows |= {"trend": trend, "parameters": parameters[columns]}
            rows |= {"table": entropies(trend, parameters), "moments": moments(trend, run)}
        for name, frame in rows.items():
            frames[name].append(with_identity(run, frame, architecture=run.architecture))
    found = {name: together(parts) for name, parts in frames.items()}
    found["summary"] = over_seeds(found["table"], ("estimator", "group"), TREND_COLUMNS, "verdict")
    found["moments_summary"] = over_seeds(found["moments"], ("group",), MOMENT_COLUMNS, "centring")
    return found


def over_seeds(table: pd.DataFrame, keys: Sequence[str], columns: Sequence[str], word: str) -> pd.DataFrame:
    """Per variant and ``keys`` the mean and range of ``columns``, and what ``word`` says in how many of the seeds."""
    by = [*IDENTITY, *keys]
    known = table.reindex(columns=[*by, "status", *columns, word])
    verdicts = known.groupby(by, sort=False, dropna=False)[word].agg(words)
    return summarise(known, columns, by).merge(verdicts.reset_index(), on=by)


def words(verdicts: pd.Series) -> str:
    """``falls (2), rises (1)``; one word alone where all agree."""
    counts = Counter(verdicts.dropna())
    return next(iter(counts), "") if len(counts) < 2 else "; ".join(f"{word} ({n})" for word, n in counts.items())


def group_of(parameter: str) -> str:
    """The group of a Megatron parameter name."""
    return MODEL if parameter == MODEL else next((g for word, g in GROUPS.items() if word in parameter), "other")


def grouped(tensors: pd.DataFrame) -> pd.DataFrame:
    """Probe rows with their group; every column that any table uses exists (nan where not recorded)."""
    if tensors.empty:
        return tensors
    columns = [f"{kind}_{name}" for name in ESTIMATORS for kind in ("entropy", "sampled")] + list(SHAPE_COLUMNS)
    frame = tensors.assign(**{name: np.nan for name in columns if name not in tensors})
    frame["group"] = [group_of(str(name)) for name in frame["parameter"]]
    return frame.sort_values(["iteration", "stage", "parameter"], ignore_index=True)


def trajectories(probes: pd.DataFrame) -> pd.DataFrame:
    """One row per probe and group: size-weighted means over the parameters, missing values left out of the mean."""
    values = [name for name in probes.columns if name.startswith(("entropy_", "sampled_"))]
    values += [name for name in SHAPE_COLUMNS if name not in values]
    overall, layers = probes["group"] != MODEL, probes["group"].isin(LAYER_GROUPS)
    frames = []
    for part in (probes, probes[overall].assign(group=ALL), probes[layers].assign(group=LAYERS)):
        keys = [part["iteration"], part["group"]]
        columns = {"parameters": part.groupby(keys)["parameter"].nunique()}
        for value in values:
            number = pd.to_numeric(part[value], errors="coerce").replace([np.inf, -np.inf], np.nan)
            weight = part["numel"].where(number.notna()).astype(float)
            total = weight.groupby(keys).sum()
            columns[value] = (number * weight).groupby(keys).sum() / total.where(total > 0)
        frames.append(pd.DataFrame(columns).reset_index())
    return pd.concat(frames, ignore_index=True).sort_values(["group", "iteration"], ignore_index=True)


def entropies(trend: pd.DataFrame, parameters: pd.DataFrame) -> pd.DataFrame:
    """One row per estimator and group: the trend's description, verdict, and sampled against full."""
    overall = trend[trend["group"] == ALL]
    end_of_steep = steep_end(overall["iteration"], overall["log_sigma"])
    shares, rows = fallen(parameters, end_of_steep), []
    for estimator in ESTIMATORS:
        for group, frame in trend.groupby("group", sort=True):
            full, sampled = frame[f"entropy_{estimator}"], frame[f"sampled_{estimator}"]
            if full.notna().any():
                difference = (sampled - full).dropna()
                rows.append(
                    {"estimator": estimator, "group": group, "parameters": int(frame["parameters"].max())}
                    | describe(frame["iteration"], full)
                    | {"correlation_log_sigma": pearson(full, frame["log_sigma"]), "sampled_cc": pearson(sampled, full)}
                    | {"sampled_bias_nats": float(difference.mean())}
                    | {"sampled_mean_abs_difference_nats": float(difference.abs().mean())}
                    | {"steep_end_log_sigma": end_of_steep}
                    | {"share_log_sigma_fell_after": shares.get(str(group), np.nan)}
                )
    return pd.DataFrame(rows)


def fallen(parameters: pd.DataFrame, start: float) -> dict[str, float]:
    """Per group (and ``<all>``): share of the parameters whose log sigma is lower at the end (mean of the last three
    probes) than when the steep phase ends (of the three probes from ``start`` on)."""
    verdicts: dict[str, list[bool]] = {}
    for (_, _, group), frame in parameters.groupby(["stage", "parameter", "group"]):
        frame = frame.sort_values("iteration")
        after = frame.loc[frame["iteration"] >= start, "log_sigma"].dropna()
        if len(after) >= 2:
            k = min(3, len(after) // 2)
            fell = bool(after.iloc[-k:].mean() < after.iloc[:k].mean())
            for name in (str(group), ALL, MODEL, *([LAYERS] if group in LAYER_GROUPS else [])):
                verdicts.setdefault(name, []).append(fell)
    return {name: sum(falls) / len(falls) for name, falls in verdicts.items()}


def moments(trend: pd.DataFrame, run: Run) -> pd.DataFrame:
    """One row per group: zero-centring, shape of the distribution, correlations between matrices, clipping."""
    steps = run.steps
    clipped = steps["grad_norm_clipped"] < steps["grad_norm"] * (1 - 1e-6)
    clipping = {f"{name}_median": float(steps[name].median()) for name in ("grad_norm", "grad_norm_clipped")}
    clipping["share_of_steps_clipped"] = float(clipped.mean()) if len(steps) else np.nan
    rows = []
    for group, frame in trend.groupby("group", sort=True):
        third, near = max(1, len(frame) // 3), frame["near_zero"]
        start, end = near.iloc[0], near.iloc[-3:].mean()
        row: dict[str, Any] = {"group": group, "probes": len(frame), "near_zero_start": start, "near_zero_end": end}
        row["near_zero_slope_per_100"] = 100 * slope(frame["iteration"], near)
        row["centring"] = centring(start, end)
        for name in ("skewness", "excess_kurtosis"):
            row |= {f"{name}_min": frame[name].min(), f"{name}_max": frame[name].max()}
            row |= {f"{name}_start": frame[name].iloc[0], f"{name}_end": frame[name].iloc[-1]}
        for name in ("correlation_layers", "correlation_previous"):
            row |= {f"{name}_early": frame[name].iloc[:third].mean(), f"{name}_late": frame[name].iloc[-third:].mean()}
        rows.append(row | link(frame["iteration"], frame["entropy_histogram"] - frame["log_sigma"]) | clipping)
    return pd.DataFrame(rows)


def link(iterations: pd.Series, form: pd.Series) -> dict[str, float]:
    """Error of the Gaussian link between entropy and sigma, in nats.

    CQM takes exp(H - H0) for sigma / sigma0, which holds where ``form``, H - log sigma, does not change: the
    distribution may have any form as long as it keeps it. ``form_offset`` is its distance from that of a normal
    distribution; ``link_error_*`` the largest change of it against the reference at the end of warm-up (a tenth of the
    run), before the reference and after it.
    """
    known = form.set_axis(iterations).dropna()
    if known.empty:
        return dict.fromkeys(LINK, np.nan)
    early = known.index < WARM_UP * known.index.max()
    change, offset = (known - known[~early].iloc[0]).abs(), known - NORMAL
    values = offset.iloc[0], offset.iloc[-1], change[early].max(), change[~early].max()
    return dict(zip(LINK, map(float, values), strict=True))


def centring(start: float, end: float) -> str:
    """Verdict on the share of entries near zero: changes below a tenth, or below 0.001, count as none."""
    if not (np.isfinite(start) and np.isfinite(end)):
        return ""
    if abs(end - start) <= max(0.001, 0.1 * start):
        return "unchanged"
    return "more near zero" if end > start else "fewer near zero"


def _sorted(iterations: Iterable[float], values: Iterable[float]) -> tuple[np.ndarray, np.ndarray]:
    x, y = finite(list(iterations), list(values))
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def smoothed(y: np.ndarray) -> np.ndarray:
    """Centred mean over three points.

    The first point stays as it is, because the fall there is the steepest; the last gets the mean of the last
    three, which is also what ``end`` is, so that a steady fall has its minimum at the end.
    """
    if y.size < SMOOTH:
        return y.copy()
    inner = np.convolve(y, np.ones(SMOOTH) / SMOOTH, mode="valid")
    return np.concatenate([y[:1], inner, inner[-1:]])


def steep_end(iterations: Iterable[float], values: Iterable[float]) -> float:
    """Iteration at which 90 % of the fall from the first point to the (smoothed) minimum is done.

    The first iteration when the trajectory does not fall by more than the tolerance; nan without points.
    """
    x, y = _sorted(iterations, values)
    if x.size == 0:
        return math.nan
    s = smoothed(y)
    fall = s[0] - s.min()
    return float(x[0] if fall <= TOLERANCE else x[int(np.argmax(s <= s[0] - STEEP_SHARE * fall))])


def describe(iterations: Iterable[float], values: Iterable[float]) -> dict[str, Any]:
    """Start, minimum, end, slopes per 100 iterations, noise and verdict of a trajectory in nats.

    ``noise`` is the standard deviation of successive differences after the steep phase over sqrt 2.
    ``falls``: the end (mean of the last three points) is below the start by more than the tolerance;
    ``rises_again``: the end is above the smoothed minimum by more than the larger of tolerance and noise.
    Verdicts: falls; falls, then rises; rises; flat; too few probes (< 4).
    """
    x, y = _sorted(iterations, values)
    if x.size < 4:
        empty = {"falls": "", "rises_again": "", "verdict": "too few probes"}
        return dict.fromkeys(DESCRIPTION, math.nan) | {"probes": int(x.size)} | empty
    s, turn = smoothed(y), steep_end(x, y)
    first, after = x <= turn, x >= turn
    steps = np.diff(y[after])
    noise = float(steps.std(ddof=1) / math.sqrt(2)) if steps.size > 1 else math.nan
    end, lowest = float(y[-SMOOTH:].mean()), int(np.argmin(s))
    limit = max(TOLERANCE, noise) if math.isfinite(noise) else TOLERANCE
    falls, dips = s[0] - end > TOLERANCE, s[0] - s[lowest] > TOLERANCE
    rises_again = dips and end - s[lowest] > limit
    if dips:
        verdict = "falls, then rises" if rises_again else "falls"
    else:
        verdict = "rises" if end - s[0] > limit else "flat"
    slopes = [100 * slope(x[part], y[part]) for part in (first, after)]
    numbers = (float(y[0]), float(s[lowest]), float(x[lowest]), end, turn, *slopes, noise)
    answers = {"falls": "yes" if falls else "no", "rises_again": "yes" if rises_again else "no", "verdict": verdict}
    return dict(zip(DESCRIPTION, numbers, strict=True)) | {"probes": int(x.size)} | answers
