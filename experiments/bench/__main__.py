"""``python -m experiments.bench engine``, ``step``, ``network``, ``steps``, ``pipeline``, ``race`` and ``stages``.

All print the folder that they have written to, ``RESULTS/<machine>``, as their last line. ``keep`` copies it to where
results are committed.
"""

from __future__ import annotations

from pathlib import Path

import typer

from edgc.errors import UserError
from experiments.bench import device_commands, engine, link_commands
from experiments.bench.terminal import RESULTS, Results
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write

REFERENCE = Path("results/reference/bench")
KEPT = (
    *("engine", "engine_rounds", "engine_kernels", "network", "network_rounds"),
    *(f"{table}-{model}" for model in engine.MODELS for table in ("engine", "engine_rounds", "engine_kernels")),
    *("step_profile", "step_profile_steps", "step_profile_kernels"),
    *("stages", "stages_iterations", "timeline", "timeline_spans"),
    *("steps", "steps_rounds", "steps_probes", "pipeline", "pipeline_rounds", "pipeline_probes"),
    *("race", "race_summary"),
)

app = typer.Typer(add_completion=False, help=__doc__)
app.command("engine")(device_commands.time_engines)
app.command("step")(device_commands.profile_step)
app.command("network")(link_commands.time_steps)
app.command("steps")(link_commands.validate_steps)
app.command("pipeline")(link_commands.validate_pipeline_steps)
app.command("race")(link_commands.run_race)
app.command("stages")(link_commands.time_stages)


@app.command("keep")
@main_guard
def keep(results: Results = RESULTS, reference: Path = REFERENCE) -> None:
    """Copy the tables and figures of every machine from RESULTS to REFERENCE, where they can be committed."""
    folders = [path for path in sorted(results.glob("*")) if path.is_dir()]
    if not folders:
        raise UserError("there are no results of a benchmark", where=results, fix="run: make bench")
    for folder in folders:
        tables = (folder / f"{name}.csv" for name in KEPT)
        for path in (*tables, *folder.glob("*.json"), *folder.glob("figures/*.png")):
            if path.is_file():
                target = reference / folder.name / path.relative_to(folder)
                atomic_write(target, path.read_bytes())
                print(target)


@app.callback()
def programs() -> None:
    """Benchmarks of the compression engine."""


if __name__ == "__main__":
    app()
