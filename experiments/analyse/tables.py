"""Rows that studies have in common, and tables that repeat bit for bit.

Runs that diverged or failed stay in every table with their status; only their numbers may be missing (empty cells).
Gaps are in nats of validation loss against the uncompressed run of the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.errors import UserError
from experiments.analyse.runs import Run, as_float
from experiments.analyse.statistics import SMOOTHING, thin
from experiments.common.acting import NOT_TESTED, acted
from experiments.common.equivalence import LIMITS, SPREAD, compare, interval, loss_margin
from experiments.common.files import atomic_write

GAP = "gap_nats"  # the one summarised column that is of differences paired by seed
IDENTITY = ("variant", "label", "seed", "status")  # columns that every table of runs starts with


def identity(run: Run) -> dict[str, Any]:
    """The columns that every per-run table starts with."""
    return {name: getattr(run, name) for name in IDENTITY}


def with_identity(run: Run, frame: pd.DataFrame, **more: Any) -> pd.DataFrame:
    """``frame`` with the run's identity, and ``more`` columns, in front."""
    about = identity(run) | more
    return frame.assign(**about)[[*about, *frame.columns]]


def together(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all frames; without any, an empty table of the identity's columns."""
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=list(IDENTITY))


def method_columns(run: Run, settings: Iterable[str] = ()) -> dict[str, Any]:
    """Method, policy and rank of a run, and of its compression ``settings`` those that its method has."""
    about = {"method": run.method, "policy": run.policy, "rank": run.setting("rank")}
    return about | {name: getattr(run.edgc, name, None) for name in settings}


def result(run: Run, baseline: Mapping[tuple[str, int], float] | None = None) -> dict[str, Any]:
    """Loss, bytes and rank columns of one run; ``baseline`` maps its peers to the uncompressed validation loss."""
    row: dict[str, Any] = {"iterations": run.summary.get("iterations")}
    row |= {key: run.number(key) for key in ("validation_perplexity", "validation_loss", "train_loss")}
    if baseline is not None:
        row[GAP] = row["validation_loss"] - baseline.get(run.peers, math.nan)
    row |= {key: run.number(key) for key in ("bytes_total", "bytes_dense_total", "bytes_ratio")}
    ranks = {"mean_rank": run.number("mean_rank"), "final_ranks": ranks_text(run.summary.get("final_ranks"))}
    return row | {"bytes_ratio_bf16": bf16_ratio(row["bytes_ratio"])} | ranks


def uncompressed_losses(runs: Iterable[Run]) -> dict[tuple[str, int], float]:
    """Validation loss of the finished uncompressed run of each seed, in each setting."""
    return {run.peers: run.number("validation_loss") for run in runs if run.plain and run.ok}


def bf16_ratio(ratio: float) -> float:
    """Bytes as a share of a bf16 all-reduce of the same gradients, given the share of the fp32 one that runs send."""
    return 2 * ratio


def summarise(table: pd.DataFrame, columns: Sequence[str], by: Sequence[str] = ("variant", "label")) -> pd.DataFrame:
    """Mean, sd and range over the finished seeds of each variant; ``n`` counts all seeds, ``n_ok`` the finished ones.

    Of the gap to the uncompressed run of the same seed also the 95 % interval of the mean, p of being on par with it
    (:func:`experiments.common.equivalence.compare`) and the verdict, which is empty for uncompressed runs and ``not
    tested`` for a policy that did not act. Other columns are not paired, and have no interval: how far two variants
    differ does not follow from how far the seeds of each do.
    """
    rows, margin = [], loss_margin()
    for key, group in table.groupby(list(by), sort=False, dropna=False):
        fine = group[group["status"] == "ok"]
        row: dict[str, Any] = dict(zip(by, key, strict=True)) | {"n": len(group), "n_ok": len(fine)}
        for column in columns:
            spread = interval(fine[column])
            row |= {f"{column}_{name}": spread[name] for name in SPREAD}
            if column == GAP:
                tested = compare(fine[column].tolist(), margin)
                row |= {f"{column}_{name}": spread[name] for name in LIMITS}
                idle = "acted" in group and acted(group) is False
                verdict = NOT_TESTED if idle else tested["verdict"]
                uncompressed = not group[GAP].fillna(1).any()
                row |= {f"{column}_p_equal": tested["p_equal"], "verdict": "" if uncompressed else verdict}
        rows.append(row)
    return pd.DataFrame(rows)


def ranks_text(ranks: object) -> str:
    """Ranks per stage as text: ``16|12``, ``dense`` where a stage is not compressed, empty when unknown."""
    if not isinstance(ranks, (list, tuple)):
        return ""
    return "|".join("dense" if math.isnan(as_float(rank)) else f"{rank:g}" for rank in ranks)


def curves(runs: Sequence[Run]) -> pd.DataFrame:
    """The learning curves of all runs, at least one: see :func:`curve`."""
    return pd.concat([curve(run) for run in runs], ignore_index=True)


def curve(run: Run) -> pd.DataFrame:
    """Training loss (trailing mean), validation perplexity, bytes so far, and per stage the rank and the mean of the
    entropies sampled in the last window's length (nats; empty without a policy), thinned."""
    steps, stages = run.steps, run.stages
    if steps.empty:
        return pd.DataFrame(columns=[*IDENTITY, "iteration", "train_loss", "validation_perplexity", "bytes"])
    frame = pd.DataFrame({"iteration": steps["iteration"]})
    frame["train_loss"] = steps["loss"].rolling(SMOOTHING, min_periods=1).mean()
    evaluations = run.evaluations.drop_duplicates("iteration", keep="last").set_index("iteration")
    frame["validation_perplexity"] = frame["iteration"].map(evaluations["perplexity"])
    frame["bytes"] = steps["bytes"].cumsum()
    by_stage = {int(stage): rows.set_index("iteration") for stage, rows in stages.groupby("stage")}
    for stage, rows in by_stage.items():
        frame[f"rank_{stage}"] = frame["iteration"].map(rows["rank"])
    for stage, rows in by_stage.items():
        means = rows["entropy"].rolling(run.edgc.window, min_periods=1).mean()
        frame[f"entropy_{stage}"] = frame["iteration"].map(means) if run.policy else math.nan
    # Rank changes and evaluations are kept exactly, or a thinned curve would move them.
    changed = frame.filter(like="rank_").fillna(-1).diff().abs().sum(axis=1) > 0
    exact = frame.index[changed | frame["validation_perplexity"].notna()]
    return with_identity(run, frame).iloc[thin(len(frame), exact)]


def write_table(path: Path, rows: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Write a CSV whole or not at all, floats with ten significant digits; returns what was written."""
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    try:
        atomic_write(path, frame.to_csv(index=False, float_format="%.10g", lineterminator="\n"))
    except OSError as error:
        problem = f"cannot write the table: {error.strerror}"
        raise UserError(problem, where=path, fix="make the folder writable") from None
    return frame
