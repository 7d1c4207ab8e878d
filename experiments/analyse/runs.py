"""Loading run folders. What a run that failed never wrote reads as empty; a damaged file is refused
(:mod:`experiments.training.outputs`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.strategies.base import StrategyConfig
from experiments.common.yaml_settings import load_yaml
from experiments.spec.settings import EVERY_STEP
from experiments.training import outputs

FILES = (*outputs.NAMES, "tensors.parquet", "spectra.parquet", "sampling.parquet")  # what the analysis reads
STEP = ("iteration", "loss", "grad_norm", "grad_norm_clipped", "bytes", "seconds")
STAGE = (
    "iteration", "stage", "rank", "entropy", "entropy_full", "bytes", "worker_error", "mean_error",
    "error_feedback_ratio", "seconds_compress", "seconds_communicate", "seconds_decompress", "seconds_entropy",
)  # fmt: skip


@dataclass
class Run:
    """One run folder; what the run never wrote reads as empty."""

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
    def peers(self) -> tuple[str, int]:
        """Setting and seed: what runs have in common that are compared with each other."""
        return str(self.config.get("setting", "")), self.seed

    @property
    def label(self) -> str:
        return str(self.config.get("label") or self.variant)

    @property
    def compression(self) -> dict[str, Any]:
        return dict(self.config.get("compression") or {})

    @property
    def iterations(self) -> int:
        """Number of iterations wanted."""
        return int(self.config["train"]["iterations"])

    @cached_property
    def edgc(self) -> EDGCConfig:
        """The compression settings, defaults filled in."""
        return EDGCConfig.from_dict(self.compression, where=self.path / "run.yaml", prefix="compression.")

    @cached_property
    def strategy(self) -> StrategyConfig:
        """Settings of what replicas exchange, and when, defaults filled in."""
        values = self.config.get("strategy") or EVERY_STEP
        return StrategyConfig.from_dict(values, where=self.path / "run.yaml", prefix="strategy.")

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
        """Training as without EDGC: nothing compressed between replicas or stages, all reduced as usual."""
        other = self.setting("pipeline.rank") is not None or self.setting("fused_embedding", False)
        return self.method == "none" and not other and self.strategy.name == EVERY_STEP

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def rank(self) -> float:
        """The fixed rank; nan without one, and for the uncompressed run."""
        value = self.setting("rank")
        return float(value) if value is not None and self.method != "none" else math.nan

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
        """Events of ``metrics.jsonl`` by kind; ``UserError`` where the log is damaged."""
        events: dict[str, list[dict[str, Any]]] = {}
        for event in outputs.read_log(self.path, self.status):
            events.setdefault(str(event["event"]), []).append(event)
        return events

    @cached_property
    def steps(self) -> pd.DataFrame:
        """One row per training step, without the stages."""
        return _numbers(self.events.get("step", []), STEP)

    @cached_property
    def stages(self) -> pd.DataFrame:
        """One row per step and pipeline stage; ``rank`` is nan where the stage was sent uncompressed, ``mean_error``
        except at window ends."""
        rows = [
            {"iteration": event.get("iteration")} | stage
            for event in self.events.get("step", [])
            for stage in event.get("stages") or []
        ]
        return _numbers(rows, STAGE)

    @property
    def first_compressed(self) -> float:
        """First iteration that sent any stage compressed; nan when none did."""
        return float(self.stages.loc[self.stages["rank"].notna(), "iteration"].min())

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """Iteration, loss and perplexity of every evaluation on validation text."""
        return _numbers(self.events.get("eval", []), ("iteration", "loss", "perplexity"))

    @property
    def decisions(self) -> list[dict[str, Any]]:
        return self.events.get("decision", [])

    @cached_property
    def tensors(self) -> pd.DataFrame:
        """The probe's rows, empty when the run recorded none."""
        return self._probed("tensors.parquet")

    @cached_property
    def spectra(self) -> pd.DataFrame:
        """Singular values (:mod:`experiments.training.probes`), empty when the run recorded none."""
        return self._probed("spectra.parquet")

    @cached_property
    def samplings(self) -> pd.DataFrame:
        """Entropies by rule (:mod:`experiments.training.probes`), empty when the run recorded none."""
        return self._probed("sampling.parquet")

    def _probed(self, name: str) -> pd.DataFrame:
        path = self.path / name
        try:
            return pd.read_parquet(path) if path.is_file() else pd.DataFrame()
        except (OSError, ValueError):  # of pyarrow's errors all are one of these
            raise outputs.damaged(path, "is cut short or altered") from None


def _numbers(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame([{key: as_float(row.get(key)) for key in columns} for row in rows], columns=list(columns))


def as_float(value: object) -> float:
    """A finite float, or nan for None, text and infinities."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def load_run(path: Path) -> Run:
    """One run folder; ``UserError`` where a file of it is missing or damaged."""
    status = outputs.read_status(path)
    if status != outputs.UNFINISHED:
        outputs.check(path, FILES)
    return Run(path, status, load_yaml(path / outputs.SETTINGS), outputs.read_summary(path, status))


def load_runs(folder: Path, names: Sequence[str] | None = None) -> list[Run]:
    """Load the runs of a study in the order of ``names`` (the study's matrix), or every run folder sorted by name.

    Raises:
        UserError: when the folder or one of the named runs is missing, or there is no run at all.
    """
    fix = f"train it first: snakemake -c2 {folder.name}"
    if not folder.is_dir():
        raise UserError(f"study {folder.name} has no results", where=folder, fix=fix)
    if names is None:
        names = sorted({path.parent.name for name in outputs.NAMES for path in folder.glob(f"*/{name}")})
    missing = [name for name in names if not (folder / name).is_dir()]
    if missing or not names:
        problem = f"{len(missing)} of {len(names)} runs missing, first {missing[0]}" if missing else "no run folder"
        raise UserError(problem, where=folder, fix=fix)
    return [load_run(folder / name) for name in names]
