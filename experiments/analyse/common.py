"""Loading run folders, tolerant of what training leaves behind, and writing tables that repeat bit for bit.

Runs that diverged or failed stay in every table with their status; only their numbers may be missing (empty
cells). Definitions used by all studies: gaps are in nats of validation loss against the uncompressed run of
the same seed, standard deviations have n - 1 in the denominator, intervals are 95 % Student t intervals of
the mean over seeds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy import stats

from edgc.errors import UserError
from experiments.run_folder import atomic_write

FLOAT_FORMAT = "%.10g"
SMOOTHING = 10  # steps in the trailing mean of the training loss
CURVE_POINTS = 500  # a curve is thinned to about this many steps


@dataclass
class Run:
    """One run folder; what is missing or broken reads as empty."""

    path: Path
    status: str
    config: dict[str, Any]
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def variant(self) -> str:
        return str(self.config.get("variant", self.path.name.rpartition("-s")[0]))

    @property
    def seed(self) -> int:
        return int(self.config.get("seed", -1))

    @property
    def label(self) -> str:
        return str(self.config.get("label") or self.variant)

    @property
    def compression(self) -> dict[str, Any]:
        return dict(self.config.get("compression") or {})

    @property
    def method(self) -> str:
        return str(self.compression.get("method", "none"))

    @property
    def policy(self) -> str | None:
        """Policy of the controller; None for every method that has none."""
        return str(self.compression.get("policy", "cqm")) if self.method == "edgc" else None

    @property
    def architecture(self) -> str:
        return str((self.config.get("model") or {}).get("architecture", "gpt"))

    @property
    def plain(self) -> bool:
        """Whether it trains as without EDGC: nothing compressed between replicas or stages, all reduced as usual."""
        other = self.setting("pipeline.rank") is not None or self.setting("fused_embedding", False)
        return self.method == "none" and not other

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def setting(self, name: str, default: Any = None) -> Any:
        """A compression setting by dotted name, e.g. ``entropy.iteration_rate``."""
        value: Any = self.compression
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return default if value is None else value

    def number(self, key: str) -> float:
        """A number of the summary; nan where it is absent or not finite."""
        return as_float(self.summary.get(key))

    @cached_property
    def events(self) -> dict[str, list[dict[str, Any]]]:
        """Events of ``metrics.jsonl`` by kind; a torn last line (a killed run) is ignored."""
        found: dict[str, list[dict[str, Any]]] = {}
        path = self.path / "metrics.jsonl"
        if path.is_file():
            for line in path.read_text(encoding="utf-8").splitlines():
                try:
                    event = json.loads(line)
                except json.JSONDecodeError:
                    continue
                if isinstance(event, dict):
                    found.setdefault(str(event.get("event")), []).append(event)
        return found

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per training step, without the stages."""
        columns = [
            "iteration",
            "loss",
            "perplexity",
            "lr",
            "grad_norm",
            "grad_norm_clipped",
            "bytes",
            "seconds",
        ]
        rows = [{key: as_float(event.get(key)) for key in columns} for event in self.events.get("step", [])]
        return pd.DataFrame(rows, columns=columns)

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per step and pipeline stage; ``rank`` is nan where the stage was sent uncompressed."""
        columns = [
            "stage",
            "rank",
            "entropy",
            "entropy_full",
            "bytes",
            "relative_error",
            "error_feedback_ratio",
            "expert_bytes",
            "pipeline_bytes",
            "pipeline_bytes_dense",
            "pipeline_relative_error",
        ]
        columns += [f"seconds_{kind}" for kind in ("compress", "communicate", "decompress", "entropy")]
        rows = []
        for event in self.events.get("step", []):
            for stage in event.get("stages") or []:
                values = {key: as_float(stage.get(key)) for key in columns}
                rows.append({"iteration": as_float(event.get("iteration")), **values})
        return pd.DataFrame(rows, columns=["iteration", *columns])

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        columns = ["iteration", "loss", "perplexity"]
        rows = [
            {key: as_float(event.get(key)) for key in columns}
            for event in self.events.get("eval", [])
            if event.get("split", "validation") == "validation"
        ]
        return pd.DataFrame(rows, columns=columns)

    @property
    def decisions(self) -> list[dict[str, Any]]:
        return self.events.get("decision", [])

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """The probe's rows, empty when the run recorded none."""
        return self._probed("tensors.parquet")

    @cached_property
    def spectra(self) -> pd.DataFrame:
        """Singular values (:mod:`experiments.spectra_probe`), empty when the run recorded none."""
        return self._probed("spectra.parquet")

    @cached_property
    def samplings(self) -> pd.DataFrame:
        """Entropies by rule (:mod:`experiments.sampling_probe`), empty when the run recorded none."""
        return self._probed("sampling.parquet")

    def _probed(self, name: str) -> pd.DataFrame:
        path = self.path / name
        return pd.read_parquet(path) if path.is_file() else pd.DataFrame()


def as_float(value: object) -> float:
    """A finite float, or nan for None, text and infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def load_run(path: Path) -> Run:
    """One run folder.

    Raises:
        UserError: when it holds no readable ``run.yaml``.
    """
    fix = "run the study again, or remove the folder"
    try:
        config = yaml.safe_load((path / "run.yaml").read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        raise UserError("run folder holds no readable run.yaml", where=path, fix=fix) from None
    if not isinstance(config, dict):
        raise UserError("run.yaml is not a mapping", where=path, fix=fix)
    status_file = path / "status"
    status = status_file.read_text(encoding="utf-8").strip() if status_file.is_file() else "unfinished"
    summary: dict[str, Any] = {}
    if (path / "summary.json").is_file():
        try:
            summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            raise UserError("summary.json is not valid JSON", where=path, fix=fix) from None
    return Run(path, status, {**config, **(config.get("config") or {})}, summary)


def load_runs(folder: Path, names: Sequence[str] | None = None) -> list[Run]:
    """All runs of a study in the order of ``names`` (the study's matrix), or every run folder sorted by name.

    Raises:
        UserError: when the folder or one of the named runs is missing, or there is no run at all.
    """
    fix = f"train it first: snakemake -c2 {folder.name}"
    if not folder.is_dir():
        raise UserError(f"study {folder.name} has no results", where=folder, fix=fix)
    if names is None:
        names = sorted(path.parent.name for path in folder.glob("*/run.yaml"))
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing or not names:
        what = (
            f"{len(missing)} of {len(names)} runs missing, first {missing[0]}" if missing else "no run folder"
        )
        raise UserError(what, where=folder, fix=fix)
    return [load_run(folder / name) for name in names]


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
    row |= {key: run.number(key) for key in ("bytes_total", "bytes_dense_total", "bytes_ratio", "mean_rank")}
    row["final_ranks"] = ranks_text(run.summary.get("final_ranks"))
    return row


def uncompressed_losses(runs: Iterable[Run]) -> dict[int, float]:
    """Validation loss of the finished uncompressed run of each seed."""
    return {run.seed: run.number("validation_loss") for run in runs if run.plain and run.ok}


def ranks_text(ranks: object) -> str:
    """Ranks per stage as text: ``16|12``, ``dense`` where a stage is not compressed, empty when unknown."""
    if not isinstance(ranks, (list, tuple)):
        return ""
    return "|".join(
        "dense" if rank is None or as_float(rank) != as_float(rank) else f"{rank:g}" for rank in ranks
    )


def pearson(first: object, second: object, least: int = 3) -> float:
    """Pearson correlation over the pairs without nan; nan with fewer than ``least`` pairs or a constant side."""
    a, b = np.asarray(first, dtype=float), np.asarray(second, dtype=float)
    keep = np.isfinite(a) & np.isfinite(b)
    a, b = a[keep], b[keep]
    if a.size < least or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def slope(x: object, y: object) -> float:
    """Least-squares slope of y over x; nan with fewer than two distinct points."""
    a, b = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    keep = np.isfinite(a) & np.isfinite(b)
    a, b = a[keep], b[keep]
    if a.size < 2 or np.ptp(a) == 0:
        return math.nan
    a = a - a.mean()
    return float(np.dot(a, b - b.mean()) / np.dot(a, a))


def interval(values: Iterable[float]) -> dict[str, float]:
    """n, mean, sd, min, max and the 95 % t interval of the mean, over the finite values."""
    x = np.array([v for v in values if math.isfinite(v)], dtype=float)
    if x.size == 0:
        return dict.fromkeys(("mean", "sd", "min", "max", "low", "high"), math.nan) | {"n": 0}
    sd = float(x.std(ddof=1)) if x.size > 1 else math.nan
    half = float(stats.t.ppf(0.975, x.size - 1)) * sd / math.sqrt(x.size) if x.size > 1 else math.nan
    mean = float(x.mean())
    return {
        "n": int(x.size), "mean": mean, "sd": sd, "min": float(x.min()), "max": float(x.max()),
        "low": mean - half, "high": mean + half,
    }  # fmt: skip


def summarise(
    table: pd.DataFrame, columns: Sequence[str], by: Sequence[str] = ("variant", "label")
) -> pd.DataFrame:
    """Mean, sd, range and interval over the finished seeds of each variant; ``n`` counts all runs."""
    rows = []
    for key, group in table.groupby(list(by), sort=False, dropna=False):
        fine = group[group["status"] == "ok"]
        row: dict[str, Any] = dict(zip(by, key, strict=True))
        row |= {"n": len(group), "n_ok": len(fine)}
        for column in columns:
            found = interval(fine[column])
            row |= {f"{column}_{name}": found[name] for name in ("mean", "sd", "min", "max", "low", "high")}
        rows.append(row)
    return pd.DataFrame(rows)


def thin(count: int, keep: Iterable[int] = ()) -> list[int]:
    """Row numbers of an evenly thinned series of ``count`` rows, first, last and ``keep`` included."""
    if count == 0:
        return []
    step = max(1, count // CURVE_POINTS)
    return sorted({*range(0, count, step), count - 1, *keep})


def quartiles(values: pd.Series) -> dict[str, float]:
    """Median and quartiles of the finite values."""
    x = values.dropna()
    if x.empty:
        return {"median": math.nan, "q1": math.nan, "q3": math.nan}
    low, mid, high = np.percentile(x, (25, 50, 75))
    return {"median": float(mid), "q1": float(low), "q3": float(high)}


def write_table(path: Path, rows: pd.DataFrame | Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Write a CSV whole or not at all, floats with ten significant digits; returns what was written."""
    frame = rows if isinstance(rows, pd.DataFrame) else pd.DataFrame(list(rows))
    try:
        atomic_write(path, frame.to_csv(index=False, float_format=FLOAT_FORMAT, lineterminator="\n"))
    except OSError as error:
        fix = "make the folder writable"
        raise UserError(f"cannot write the table: {error.strerror}", where=path, fix=fix) from None
    return frame
