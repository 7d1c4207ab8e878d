"""Code that made each run: ``python -m experiments.verdicts.run_code --scale ci`` writes ``results/ci/runs.csv``.

A run is made again when the code of training changes (:func:`experiments.common.source.training_code`), unless it is
kept on purpose; then this table says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.analyse.tables import write_table
from experiments.common.cli import main_guard
from experiments.common.source import training_code
from experiments.common.yaml_settings import load_yaml
from experiments.spec import matrix
from experiments.training.outputs import SETTINGS, STATUS

TODAY = ("no", "unknown", "yes")  # whether the run's code is today's, in the order of the rows


def table(folder: Path, scale: str) -> list[dict[str, Any]]:
    """A row for each run in ``folder``, the results of a scale; those of other code than today's first."""
    today, rows = training_code(), []
    for study in matrix.studies():
        for path in (folder / study / run.name for run in matrix.runs(study, scale)):
            if (path / STATUS).is_file():
                provenance = load_yaml(path / SETTINGS).get("provenance") or {}
                code = provenance.get("code")
                status = (path / STATUS).read_text(encoding="utf-8").strip()
                current = "unknown" if code is None else "yes" if code == today else "no"
                about = {"study": study, "run": path.name, "status": status, "today": current, "code": code}
                commit = (provenance.get("git") or {}).get("commit")
                rows.append(about | {"commit": commit, "started": provenance.get("started")})
    return sorted(rows, key=lambda row: TODAY.index(row["today"]))


@main_guard
def main(
    scale: Annotated[str, typer.Option(help="name of a file in experiments/scales")] = "ci",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results"),
) -> None:
    """Write results/<scale>/runs.csv."""
    rows = table(results / scale, scale)
    write_table(results / scale / "runs.csv", rows)
    counts = {kind: sum(row["today"] == kind for row in rows) for kind in TODAY}
    print(f"{len(rows)} runs; made by today's code: " + ", ".join(f"{kind} {n}" for kind, n in counts.items()))


if __name__ == "__main__":
    typer.run(main)
