"""Copies what benchmarks have measured to where it can be committed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from edgc.errors import UserError
from experiments.bench import engine
from experiments.common.files import atomic_write

TABLES = (
    *("engine", "engine_rounds", "engine_kernels", "network", "network_rounds"),
    *(f"{table}-{model}" for model in engine.MODELS for table in ("engine", "engine_rounds", "engine_kernels")),
    *("step_profile", "step_profile_steps", "step_profile_kernels"),
    *("stages", "stages_iterations", "timeline", "timeline_spans"),
    *("steps", "steps_rounds", "steps_probes", "pipeline", "pipeline_rounds", "pipeline_probes"),
    *("race", "race_summary"),
)


def keep(results: Path, reference: Path) -> Iterator[Path]:
    """Copy tables, settings and figures of every machine, a folder each, from ``results`` to ``reference``; yields what
    was written. Raises ``UserError`` where there is nothing."""
    folders = [path for path in sorted(results.glob("*")) if path.is_dir()]
    if not folders:
        raise UserError("there are no results of a benchmark", where=results, fix="run: make bench")
    for folder in folders:
        tables = (folder / f"{name}.csv" for name in TABLES)
        for path in (*tables, *folder.glob("*.json"), *folder.glob("figures/*.png")):
            if path.is_file():
                target = reference / folder.name / path.relative_to(folder)
                atomic_write(target, path.read_bytes())
                yield target
