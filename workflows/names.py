"""Steps of the workflow in words, and how far those that are running have come."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from edgc.errors import UserError
from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from workflows.durations import Step

TAIL_BYTES = 4096
WORDS = {
    "tables": "tables of {study}",
    "data": "prepare the text {name}",
    "cluster_model": "simulate {study}",
    "scenarios": "simulate {study}",
    "tasks": "make the tasks of {study}",
    "standard_tasks": "check the data of the standard tasks",
    "export": "export the models of {study}",
    "evaluate": "evaluate the models of {study}",
    "figure": "draw {name}",
    "benchmark_figure": "draw benchmark {name}",
    "benchmark_table": "copy benchmark {name}",
    "claims": "judge the claims",
    "regression": "compare with the committed results",
    "runs": "list the runs",
    "report_html": "write the report",
    "snakemake_report": "write Snakemake's report",
}


class Names:
    """Steps in words, and how far those that are running have come."""

    def __init__(self, scale: str, folder: Path) -> None:
        self.scale, self.folder = scale, folder
        self.known: dict[Step, str] = {}
        self.runs: dict[str, list[RunConfig]] = {}

    def words(self, step: Step) -> str:
        if step not in self.known:
            self.known[step] = self._training(step) if step.rule == "train" else self._other(step)
        return self.known[step]

    def _other(self, step: Step) -> str:
        return WORDS.get(step.rule, " ".join(filter(None, ("{rule}", "{study}", "{name}")))).format(
            rule=step.rule, study=step.study, name=step.name
        )

    def _training(self, step: Step) -> str:
        runs = self._runs(step.study)
        run = next((run for run in runs if run.name == step.name), None)
        if run is None:
            return f"train {step.study}/{step.name}"
        seeds = [other.seed for other in runs if other.variant == run.variant]
        which = f", seed {seeds.index(run.seed) + 1} of {len(seeds)}" if len(seeds) > 1 else ""
        return f"train {run.label}{which} ({step.study})"

    def _runs(self, study: str) -> list[RunConfig]:
        if study not in self.runs:
            self.runs[study] = []
            with contextlib.suppress(UserError):  # its file was changed meanwhile
                self.runs[study] = matrix.runs(study, self.scale)
        return self.runs[study]

    def inside(self, step: Step) -> str:
        """How far a step has come, as it says itself; "" where it says nothing."""
        if step.rule == "train":
            line = last_line(self.folder / step.study / step.name / ".attempt" / "metrics.jsonl", '"iteration"')
            totals = {run.name: run.train.iterations for run in self._runs(step.study)}
            with contextlib.suppress(ValueError, KeyError, TypeError):
                return f"iteration {json.loads(line)['iteration']} of {totals[step.name]}"
        if step.rule == "evaluate":
            return last_line(self.folder / "logs" / "evaluate" / f"{step.study}.log", "documents")
        return ""


def last_line(path: Path, needed: str) -> str:
    """The last whole line of a file that is being written and has ``needed`` in it."""
    try:
        with path.open("rb") as handle:
            handle.seek(max(os.fstat(handle.fileno()).st_size - TAIL_BYTES, 0))
            lines = handle.read().decode(errors="replace").split("\n")[:-1]
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if needed in line), "")
