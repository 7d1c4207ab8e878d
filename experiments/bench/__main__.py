"""``python -m experiments.bench engine``, ``step``, ``rehearsal``, ``network``, ``steps`` and ``race``.

All print the folder that they have written to, ``RESULTS/<machine>``, as their last line. ``keep`` copies it to where
results are committed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgc.errors import UserError
from experiments.bench import engine, network, pipeline, race, rehearsal, step_profile, steps, terminal
from experiments.common.cli import main_guard

REFERENCE = Path("results/reference/bench")
BENCHMARKS = {
    "engine": engine,
    "step": step_profile,
    "rehearsal": rehearsal,
    "network": network,
    "steps": steps,
    "race": race,
}

app = typer.Typer(add_completion=False, help=__doc__)
for name, benchmark in BENCHMARKS.items():
    terminal.register(app, name, benchmark)


@app.command("predict")
@main_guard
def predict_again(folder: Annotated[Path, typer.Argument(help="RESULTS/<machine>")]) -> None:
    """Predict the measured steps in FOLDER again, also those of pipelines, by the model as it is now."""
    paths = {module: folder / f"{name}.json" for name, module in (("steps", steps), ("pipeline", pipeline))}
    paths = {module: path for module, path in paths.items() if path.is_file()}
    if not paths:
        raise UserError("no measured steps", where=folder, fix="measure them: make bench-steps (root only)")
    for module, path in paths.items():
        record = json.loads(path.read_text(encoding="utf-8"))
        plan, data = module.Plan(**record["settings"]), steps.read(path, record)
        terminal.write(module, plan, data, folder, record)
        print(path.with_suffix(".csv"), path, sep="\n")


@app.command("keep")
@main_guard
def keep(results: terminal.Results = terminal.RESULTS, reference: Path = REFERENCE) -> None:
    """Copy the tables and figures of every machine from RESULTS to REFERENCE, where they can be committed."""
    for path in terminal.keep(results, reference):
        print(path)


if __name__ == "__main__":
    app()
