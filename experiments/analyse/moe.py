"""A mixture of experts: entropies of the experts' gradients, and what compressing the experts costs.

A matrix is one expert's fc1 or fc2 of one layer, or a matrix that all ranks hold (``expert`` is then empty). Entropies
are the histogram estimates of the probes of uncompressed runs, averaged over windows of ``WINDOW`` iterations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from edgc.control.rank_model import StageModel, next_rank
from experiments.analyse.acting import acting
from experiments.analyse.entropy_trend import LAYER_GROUPS, MODEL, WARM_UP, group_of
from experiments.analyse.runs import Run
from experiments.analyse.statistics import pearson
from experiments.analyse.tables import (
    identity,
    method_columns,
    result,
    summarise,
    together,
    uncompressed_losses,
    with_identity,
)

RESULTS = ("table.csv", "summary.csv", "experts.csv", "spread.csv", "fit.csv")
DETAILS = ("curves.csv",)
WINDOW = 20  # iterations, that of EDGC at ci scale
RANK = 16  # at the reference
PLACE = re.compile(r"layers\.(\d+)\.(?:.*\.local_experts\.(\d+)\.)?")
SUMMARISED = ("validation_perplexity", "gap_nats", "bytes_ratio", "bytes_ratio_bf16", "expert_share", "mean_rank")


def tables(runs: list[Run]) -> dict[str, Any]:
    """``table``: a row per run, ``summary``: per variant. ``experts``: entropy, log sigma, gradient norm and tokens per
    matrix and window. ``spread``: how far matrices of one kind lie apart, per window. ``fit``: per matrix, how its
    entropy follows the stage's, and which rank CQM would give it."""
    baseline = uncompressed_losses(runs)
    table = pd.DataFrame([_row(run, baseline) for run in runs])
    frames: dict[str, list[pd.DataFrame]] = {"experts": [], "spread": [], "fit": []}
    for run in runs:
        probes = placed(run.tensors)
        if not probes.empty:
            experts = windows(probes)
            for name, frame in (("experts", experts), ("spread", spread(experts)), ("fit", fit(probes, run))):
                frames[name].append(with_identity(run, frame))
    summary = summarise(table, SUMMARISED, ("variant", "label", "compress_experts"))
    return {"table": table, "summary": summary} | {name: together(parts) for name, parts in frames.items()}


def _row(run: Run, baseline: dict[int, float]) -> dict[str, Any]:
    """One run; ``expert_share`` is the experts' part of the bytes that were sent."""
    experts = float(run.stages["expert_bytes"].sum(skipna=False))
    row = identity(run) | method_columns(run, ("factor_dtype", "one_sided", "compress_experts"))
    row |= result(run, baseline) | acting(run)
    row["expert_bytes_total"] = experts if run.events.get("step") else np.nan
    row["expert_share"] = experts / run.number("bytes_total") if experts else np.nan
    return row | {"error": run.summary.get("error")}


def placed(tensors: pd.DataFrame) -> pd.DataFrame:
    """The probes of the matrices of layers with ``layer``, ``expert`` (nan: none), ``kind`` and ``matrix``."""
    if tensors.empty:
        return tensors
    frame = tensors[tensors["parameter"] != MODEL].rename(columns={"entropy_histogram": "entropy"})
    places = [PLACE.search(str(name)) for name in frame["parameter"]]
    frame = frame.assign(
        tokens=frame.get("tokens", np.nan),
        layer=[int(place[1]) if place else -1 for place in places],
        expert=[float(place[2]) if place and place[2] else np.nan for place in places],
        kind=[group_of(str(name)) for name in frame["parameter"]],
    )
    return frame.sort_values(["stage", "parameter", "iteration"], ignore_index=True)


def windows(probes: pd.DataFrame) -> pd.DataFrame:
    """Means of each matrix over each window; ``window`` is the window's last iteration."""
    layers = probes[probes["kind"].isin(LAYER_GROUPS)]
    layers = layers.assign(window=-(-layers["iteration"] // WINDOW) * WINDOW)
    means = layers.groupby(["stage", "layer", "kind", "expert", "window"], dropna=False)
    return means[["entropy", "log_sigma", "gradient_norm", "tokens"]].mean().reset_index()


def spread(experts: pd.DataFrame) -> pd.DataFrame:
    """Standard deviation of the entropy (nats) and the ratio of largest to smallest sigma, per window and kind.

    ``between``: ``experts`` of one layer (mean over the layers), or ``layers`` (of the mean over a layer's experts).
    """
    rows: list[dict[str, Any]] = []
    for (window, kind), frame in experts.groupby(["window", "kind"]):
        by_layer = frame.groupby(["stage", "layer"])
        sets = {"layers": [by_layer[["entropy", "log_sigma"]].mean()]}
        if frame["expert"].notna().any():
            sets["experts"] = [part for _, part in by_layer]
        for between, parts in sorted(sets.items()):
            deviations = [part["entropy"].std(ddof=1) for part in parts]
            ratios = [float(np.exp(np.ptp(part["log_sigma"]))) for part in parts]
            about = {"window": window, "kind": kind, "between": between, "matrices": len(parts[0])}
            rows.append(about | {"sd_nats": float(np.mean(deviations)), "sigma_ratio": float(np.mean(ratios))})
    return pd.DataFrame(rows)


def fit(probes: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Per matrix: correlation of its entropy with its stage's (the mean weighted by size) after the reference, the
    changes of both from the reference to the last window, and the rank that CQM gives for each.

    The rank at the reference is ``RANK``; no limits and no rounding, so that differences show.
    """
    hidden, rows = int(run.config["model"]["hidden"]), []
    for stage, stage_probes in probes.groupby("stage"):
        entropy = stage_probes.pivot(index="iteration", columns="parameter", values="entropy")
        entropy = entropy[entropy.index > WARM_UP * run.iterations]
        size = stage_probes.groupby("parameter")["numel"].first()
        overall = (entropy * size).sum(axis=1) / size.sum()
        shapes = {str(name): (hidden, int(n) // hidden) for name, n in size.items()}
        change, rank = _by_cqm(overall, list(shapes.values()))
        about = stage_probes.groupby("parameter")[["layer", "expert", "kind"]].first()
        for name, place in about[about["kind"].isin(LAYER_GROUPS)].iterrows():
            matrix_change, matrix_rank = _by_cqm(entropy[name], [shapes[str(name)]])
            rows.append(
                {"stage": stage, **place.to_dict(), "correlation_stage": pearson(entropy[name], overall)}
                | {"change_nats": matrix_change, "stage_change_nats": change}
                | {"offset_nats": float((entropy[name] - overall).mean())}
                | {"cqm_rank": matrix_rank, "stage_cqm_rank": rank}
            )
    return pd.DataFrame(rows).sort_values(["stage", "kind", "layer", "expert"], ignore_index=True)


def _by_cqm(entropy: pd.Series, shapes: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Change of the entropy from the first window to the last, nats, and the real rank that CQM gives for it."""
    at = entropy.index.to_numpy()
    first, last = entropy[at < at[0] + WINDOW].mean(), entropy[at > at[-1] - WINDOW].mean()
    return float(last - first), next_rank(StageModel(shapes), RANK, float(first), float(last))
