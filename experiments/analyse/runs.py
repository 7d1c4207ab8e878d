"""Loading run folders, tolerant of what training leaves behind: what is missing or broken reads as empty."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from edgc.config import EDGCConfig
from edgc.errors import UserError


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
    def edgc(self) -> EDGCConfig:
        """The compression settings, defaults filled in."""
        return EDGCConfig.from_record(self.compression, where=self.path / "run.yaml", prefix="compression.")

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
        """One row per step and pipeline stage; ``rank`` is nan where the stage was sent uncompressed, ``mean_error``
        except at window ends."""
        columns = [
            "stage",
            "rank",
            "entropy",
            "entropy_full",
            "bytes",
            "worker_error",
            "mean_error",
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
                # What runs before that name said was the worker's.
                values["worker_error"] = as_float(stage.get("worker_error", stage.get("relative_error")))
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
