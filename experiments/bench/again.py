"""Predict measured steps again, by the model as it is now: nothing is timed, only a benchmark's folder is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.errors import UserError
from experiments.bench import pipeline_steps, steps
from experiments.bench.terminal import write_table
from experiments.common.files import atomic_write

PROGRAMS = ("steps", "pipeline")


def predict_again(folder: Path) -> list[Path]:
    """Write the tables and summaries of :data:`PROGRAMS` in ``folder`` anew from its rounds and timed messages.

    Raises:
        UserError: the folder has neither.
    """
    written: list[Path] = []
    for name in PROGRAMS:
        described = folder / f"{name}.json"
        if not described.is_file():
            continue
        record = json.loads(described.read_text(encoding="utf-8"))
        table = predicted(name, folder, record)
        write_table(folder / f"{name}.csv", table, record["machine"])
        atomic_write(described, json.dumps(record | {"summary": steps.summary(table)}, indent=1) + "\n")
        written += [folder / f"{name}.csv", described]
    if not written:
        raise UserError("no measured steps", where=folder, fix="measure them: make bench-steps (root only)")
    return written


def predicted(name: str, folder: Path, record: dict[str, Any]) -> pd.DataFrame:
    """The table of one of :data:`PROGRAMS`, from what lies in ``folder`` and from its record there."""
    rounds, probes = (pd.read_csv(folder / f"{name}_{part}.csv") for part in ("rounds", "probes"))
    if name == "steps":
        sent = {int(workers): methods for workers, methods in record["sent"].items()}
        return steps.table(steps.Measured(rounds.fillna({"complete": ""}), probes, sent))
    settings: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in record["settings"].items()
    }
    found = pipeline_steps.Measured(rounds, probes, record["sent"])
    return pipeline_steps.table(pipeline_steps.Plan(**settings), found)
