"""A mixture of experts: entropies of the experts' gradients, and what compressing the experts costs.

A matrix is one expert's fc1 or fc2 of one layer, or a matrix that all ranks hold (``expert`` is then empty). Entropies
are the histogram estimates of the probes of uncompressed runs, averaged over windows of ``WINDOW`` iterations.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from edgc.control.rank_model import StageModel, next_rank
from experiments.analyse import methods
from experiments.analyse.acting import acting
from experiments.analyse.entropy_trend import LAYER_GROUPS, MODEL, WARM_UP, group_of
from experiments.analyse.runs import Run
from experiments.analyse.statistics import pearson
from experiments.analyse.tables import (
    identity,
    result,
    summarise,
    together,
    uncompressed_losses,
    with_identity,
    write_tables,
)

RESULTS = ("table.csv", "summary.csv", "experts.csv", "spread.csv", "fit.csv")
DETAILS = ("curves.csv",)
WINDOW = 20  # iterations, that of EDGC at ci scale
RANK = 16  # at the reference
PLACE = re.compile(r"layers\.(\d+)\.(?:.*\.local_experts\.(\d+)\.)?")
VALUES = ("entropy", "log_sigma", "gradient_norm", "tokens")
SUMMARISED = ("validation_perplexity", "gap_nats", "bytes_ratio", "bytes_ratio_bf16", "expert_share", "mean_rank")


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write the tables of the study.

    ``table.csv``: a row per run, ``summary.csv``: per variant. ``experts.csv``: entropy, log sigma, gradient norm and
    tokens per matrix and window. ``spread.csv``: how far matrices of one kind lie apart, per window. ``fit.csv``: per
    matrix, how its entropy follows the stage's, and which rank CQM would give it. ``curves.csv``: the learning curves.
    """
    baseline = uncompressed_losses(runs)
    table = pd.DataFrame([row(run, baseline) for run in runs])
    summary = summarise(table, SUMMARISED, ("variant", "label", "compress_experts"))
    frames: dict[str, list[pd.DataFrame]] = {"experts": [], "spread": [], "fit": []}
    for run in runs:
        probes = placed(run.tensors)
        if probes.empty:
            continue
        found = windows(probes)
        for name, frame in (("experts", found), ("spread", spread(found)), ("fit", fit(probes, run))):
            frames[name].append(with_identity(run, frame))
    tables = {"table": table, "summary": summary, "curves": methods.curves(runs)}
    return write_tables(out, tables | {name: together(of) for name, of in frames.items()})


def row(run: Run, baseline: dict[int, float]) -> dict[str, Any]:
    """One run; ``expert_share`` is the experts' part of the bytes that were sent."""
    experts = float(run.stages["expert_bytes"].sum(skipna=False))
    sent = {
        "expert_bytes_total": experts if run.events.get("step") else np.nan,
        "expert_share": experts / run.number("bytes_total") if experts else np.nan,
        "error": run.summary.get("error"),
    }
    return (
        identity(run)
        | {"method": run.method, "policy": run.policy, "rank": run.setting("rank")}
        | {name: getattr(run.edgc, name, None) for name in ("factor_dtype", "one_sided", "compress_experts")}
        | result(run, baseline)
        | acting(run)
        | sent
    )


def placed(tensors: pd.DataFrame) -> pd.DataFrame:
    """The probes of the matrices of layers with ``layer``, ``expert`` (nan: none), ``kind`` and ``matrix``."""
    if tensors.empty:
        return tensors
    frame = tensors[tensors["parameter"] != MODEL].rename(columns={"entropy_histogram": "entropy"})
    found = [PLACE.search(str(name)) for name in frame["parameter"]]
    frame = frame.assign(
        tokens=frame.get("tokens", np.nan),
        layer=[int(place[1]) if place else -1 for place in found],
        expert=[float(place[2]) if place and place[2] else np.nan for place in found],
        kind=[group_of(str(name)) for name in frame["parameter"]],
    )
    return frame.sort_values(["stage", "parameter", "iteration"], ignore_index=True)


def windows(probes: pd.DataFrame) -> pd.DataFrame:
    """Means of each matrix over each window; ``window`` is the window's last iteration."""
    layers = probes[probes["kind"].isin(LAYER_GROUPS)]
    window = -(-layers["iteration"] // WINDOW) * WINDOW
    keys = ["stage", "layer", "kind", "expert", "window"]
    means = layers.assign(window=window).groupby(keys, dropna=False)[list(VALUES)].mean()
    return means.reset_index()


def spread(found: pd.DataFrame) -> pd.DataFrame:
    """Standard deviation of the entropy (nats) and the ratio of largest to smallest sigma, per window and kind.

    ``between``: ``experts`` of one layer (mean over the layers), or ``layers`` (of the mean over a layer's experts).
    """
    rows: list[dict[str, Any]] = []
    for (window, kind), frame in found.groupby(["window", "kind"]):
        by_layer = frame.groupby(["stage", "layer"])
        sets: dict[str, list[pd.DataFrame]] = {"layers": [by_layer[["entropy", "log_sigma"]].mean()]}
        if frame["expert"].notna().any():
            sets["experts"] = [part for _, part in by_layer]
        for between, parts in sorted(sets.items()):
            spreads = [part["entropy"].std(ddof=1) for part in parts]
            ranges = [float(np.exp(np.ptp(part["log_sigma"]))) for part in parts]
            about = {"window": window, "kind": kind, "between": between, "matrices": len(parts[0])}
            rows.append(about | {"sd_nats": float(np.mean(spreads)), "sigma_ratio": float(np.mean(ranges))})
    return pd.DataFrame(rows)


def fit(probes: pd.DataFrame, run: Run) -> pd.DataFrame:
    """Per matrix: correlation of its entropy with its stage's (the mean weighted by size) after the reference, the
    changes of both from the reference to the last window, and the rank that CQM gives for each.

    The rank at the reference is ``RANK``; no limits and no rounding, so that differences show.
    """
    hidden = int(run.config["model"]["hidden"])
    rows = []
    for stage, whole in probes.groupby("stage"):
        entropy = whole.pivot(index="iteration", columns="parameter", values="entropy")
        size = whole.groupby("parameter")["numel"].first()
        start = WARM_UP * run.iterations
        entropy = entropy[entropy.index > start]
        overall = (entropy * size).sum(axis=1) / size.sum()
        shapes = {str(name): (hidden, int(n) // hidden) for name, n in size.items()}
        stage_rank = asked(overall, list(shapes.values()))
        about = whole.groupby("parameter")[["layer", "expert", "kind"]].first()
        for name in (str(n) for n in about.index if about.loc[n, "kind"] in LAYER_GROUPS):
            own = entropy[name]
            row = {"stage": stage, **about.loc[name].to_dict(), "correlation_stage": pearson(own, overall)}
            row |= {"change_nats": moved(own), "stage_change_nats": moved(overall)}
            row |= {"offset_nats": float((own - overall).mean())}
            rows.append(row | {"cqm_rank": asked(own, [shapes[name]]), "stage_cqm_rank": stage_rank})
    return pd.DataFrame(rows).sort_values(["stage", "kind", "layer", "expert"], ignore_index=True)


def ends(entropy: pd.Series) -> tuple[float, float]:
    """Means of the first and of the last window."""
    at = entropy.index.to_numpy()
    first, last = entropy[at < at[0] + WINDOW], entropy[at > at[-1] - WINDOW]
    return float(first.mean()), float(last.mean())


def moved(entropy: pd.Series) -> float:
    """From the first window to the last."""
    first, last = ends(entropy)
    return last - first


def asked(entropy: pd.Series, shapes: Sequence[tuple[int, int]]) -> float:
    """The real rank that CQM gives matrices of ``shapes`` in the last window."""
    return next_rank(StageModel(shapes), RANK, *ends(entropy))
