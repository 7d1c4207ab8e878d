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
from experiments.analyse import equivalence
from experiments.analyse.runs import Run, as_float
from experiments.analyse.statistics import LIMITS, SPREAD, interval
from experiments.common.acting import NOT_TESTED, acted
from experiments.common.equivalence import loss_margin
from experiments.common.written_tables import write_text

FLOAT_FORMAT = "%.10g"


def with_identity(run: Run, frame: pd.DataFrame, **more: Any) -> pd.DataFrame:
    """``frame`` with the run's identity, and ``more`` columns, in front."""
    about = identity(run) | more
    return frame.assign(**about)[[*about, *frame.columns]]


def together(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The rows of all frames; without any, an empty table of the identity's columns."""
    empty = pd.DataFrame(columns=["variant", "label", "seed", "status"])
    return pd.concat(frames, ignore_index=True) if frames else empty


def identity(run: Run) -> dict[str, Any]:
    """The columns that every per-run table starts with."""
    return {"variant": run.variant, "label": run.label, "seed": run.seed, "status": run.status}


def result(run: Run, baseline: Mapping[int, float] | None = None) -> dict[str, Any]:
    """Loss, bytes and rank columns of one run; ``baseline`` maps a seed to the uncompressed validation loss."""
    loss = run.number("validation_loss")
    row: dict[str, Any] = {
        "iterations": run.summary.get("iterations"),
        "validation_perplexity": run.number("validation_perplexity"),
        "validation_loss": loss,
        "train_loss": run.number("train_loss"),
    }
    if baseline is not None:
        row["gap_nats"] = loss - baseline.get(run.seed, math.nan)
    row |= {key: run.number(key) for key in ("bytes_total", "bytes_dense_total", "bytes_ratio")}
    row["bytes_ratio_bf16"] = bf16_ratio(row["bytes_ratio"])
    row["mean_rank"] = run.number("mean_rank")
    row["final_ranks"] = ranks_text(run.summary.get("final_ranks"))
    return row


def uncompressed_losses(runs: Iterable[Run]) -> dict[int, float]:
    """Validation loss of the finished uncompressed run of each seed."""
    return {run.seed: run.number("validation_loss") for run in runs if run.plain and run.ok}


def bf16_ratio(ratio: float) -> float:
    """Bytes as a share of a bf16 all-reduce of the same gradients, given the share of the fp32 one that runs send."""
    return 2 * ratio


GAP = "gap_nats"  # the one summarised column that is of differences paired by seed


def summarise(table: pd.DataFrame, columns: Sequence[str], by: Sequence[str] = ("variant", "label")) -> pd.DataFrame:
    """Mean, sd and range over the finished seeds of each variant; ``n`` counts all seeds, ``n_ok`` the finished ones.

    Of the gap to the uncompressed run of the same seed also the 95 % interval of the mean, p of being on par with it
    (:func:`experiments.analyse.equivalence.compare`) and the verdict, which is empty for uncompressed runs and ``not
    tested`` for a policy that did not act. Other columns are not paired, and have no interval: how far two variants
    differ does not follow from how far the seeds of each do.
    """
    rows, margin = [], loss_margin()
    for key, group in table.groupby(list(by), sort=False, dropna=False):
        fine = group[group["status"] == "ok"]
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        row |= {"n": len(group), "n_ok": len(fine)}
        for column in columns:
            found = interval(fine[column])
            row |= {f"{column}_{name}": found[name] for name in SPREAD}
            if column == GAP:
                tested = equivalence.compare(fine[column].tolist(), margin)
                row |= {f"{column}_{name}": found[name] for name in LIMITS}
                row |= {f"{column}_p_equal": tested["p_equal"], "verdict": said(group, tested["verdict"])}
        rows.append(row)
    return pd.DataFrame(rows)


def said(runs: pd.DataFrame, verdict: str) -> str:
    """The verdict on the gaps of a variant's runs, given what the test of them says."""
    if not runs[GAP].fillna(1).any():
        return ""  # the uncompressed runs themselves
    return NOT_TESTED if "acted" in runs and acted(runs) is False else verdict


def ranks_text(ranks: object) -> str:
    """Ranks per stage as text: ``16|12``, ``dense`` where a stage is not compressed, empty when unknown."""
    if not isinstance(ranks, (list, tuple)):
        return ""
    return "|".join("dense" if math.isnan(as_float(rank)) else f"{rank:g}" for rank in ranks)


def write_tables(out: Path, tables: Mapping[str, pd.DataFrame | Sequence[Mapping[str, Any]]]) -> list[Path]:
    """Write each table as ``<name>.csv`` to ``out``, in this order; returns their paths."""
    for name, rows in tables.items():
        write_table(out / f"{name}.csv", rows)
    return [out / f"{name}.csv" for name in tables]


def write_table(path: Path, rows: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Write a CSV whole or not at all, floats with ten significant digits; returns what was written."""
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    try:
        write_text(path, frame.to_csv(index=False, float_format=FLOAT_FORMAT, lineterminator="\n"))
    except OSError as error:
        what = f"cannot write the table: {error.strerror}"
        raise UserError(what, where=path, fix="make the folder writable") from None
    return frame
