"""``python -m experiments.bench engine``, ``step``, ``network``, ``steps``, ``pipeline``, ``race`` and ``stages``.

All print the folder that they have written to, ``RESULTS/<machine>``, as their last line. ``keep`` copies it to where
results are committed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from edgc.errors import UserError
from experiments.bench import engine, network, pipeline, race, stages, step_profile, steps, terminal
from experiments.bench.terminal import RESULTS, Results, command, measuring, need_testbed, save, show
from experiments.bench.timeline import chrome_trace
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write

REFERENCE = Path("results/reference/bench")

app = typer.Typer(add_completion=False, help=__doc__)


@command(app, "engine", engine.Plan)
def time_engines(plan: engine.Plan, results: Path) -> None:
    """Time one step of every engine on the same gradients: engine.csv, engine_rounds.csv, engine.json, and with kernels
    engine_kernels.csv; of a model all with -MODEL in their names."""
    with measuring(results, plan.rounds, plan.device) as (host, folder, advance):
        data = engine.measure(plan, advance)
    name = f"engine-{plan.model}" if plan.model else "engine"
    tables = {name.replace("engine", key, 1): table for key, table in engine.tables(plan, data).items()}
    save(folder, name, host, plan, tables)
    columns = "network allocator threads rank engine factor_dtype"
    values = "cpu_ms wall_ms kernel_ms relative_error speedup_cpu speedup_wall ratio_to_floor"
    show(folder, tables[name][tables[name]["status"] == "ok"], columns, values)


@command(app, "step", step_profile.Plan)
def profile_step(plan: step_profile.Plan, results: Path) -> None:
    """Profile a training step on one device, with and without a hook: step_profile.csv,
    step_profile_steps.csv, step_profile_kernels.csv, step_profile.json, and step_trace_*.json.gz for Perfetto.

    Nothing is sent: see experiments/bench/step_profile.py for what this does and does not measure.
    """
    with measuring(results, len(plan.variants), plan.device) as (host, folder, advance):

        def after(variant: str, data: step_profile.Measurements) -> None:
            # After every variant: who ends it early keeps those that were run.
            save(folder, "step_profile", host, plan, step_profile.tables(plan, data))
            advance(variant)

        data = step_profile.measure(plan, folder, after)
    table = step_profile.table(plan, data)
    values = "step_ms host_ms kernel_ms compress_ms decompress_ms peak_memory_mib over_ddp_step_ms"
    show(folder, table, "variant status", values)
    if (table["status"] != "ok").any():
        raise SystemExit(1)


@command(app, "network", network.Plan)
def time_steps(plan: network.Plan, results: Path) -> None:
    """Time training steps of two ranks over a limited link (root only): network.csv, network_rounds.csv,
    network.json."""
    need_testbed(plan.delay_ms)
    with measuring(results, plan.turns) as (host, folder, advance):
        rounds = network.measure(plan, advance)
    table = network.table(plan, rounds)
    save(folder, "network", host, plan, {"network": table, "network_rounds": rounds})
    show(folder, table, "mbit_per_s method status", "seconds speedup_over_dense speedup_over_torch bytes")


@command(app, "steps", steps.Plan)
def validate_steps(plan: steps.Plan, results: Path) -> None:
    """Compare predicted with measured training steps over limited links (root only): steps.csv, steps_rounds.csv,
    steps_probes.csv, steps.json."""
    need_testbed(plan.delay_ms)
    with measuring(results, plan.turns) as (host, folder, advance):
        data = steps.measure(plan, advance)
    table = steps.table(data)
    tables = {"steps": table, "steps_rounds": data.rounds, "steps_probes": data.probes}
    save(folder, "steps", host, plan, tables, sent=data.sent, summary=steps.summary(table))
    show(folder, table, "workers mbit_per_s method used", "seconds seconds_predicted error")


@command(app, "pipeline", pipeline.Plan)
def validate_pipeline_steps(plan: pipeline.Plan, results: Path) -> None:
    """Compare predicted with measured steps of two stages with two replicas (root only): pipeline.csv,
    pipeline_rounds.csv, pipeline_probes.csv, pipeline.json."""
    need_testbed()
    with measuring(results, len(plan.configurations)) as (host, folder, advance):
        data = pipeline.measure(plan, advance)
    table = pipeline.table(plan, data)
    tables = {"pipeline": table, "pipeline_rounds": data.rounds, "pipeline_probes": data.probes}
    save(folder, "pipeline", host, plan, tables, sent=data.sent, summary=steps.summary(table))
    show(folder, table, "mbit_per_s micro_batches method used", "seconds seconds_predicted error")


@app.command("predict")
@main_guard
def predict_again(folder: Annotated[Path, typer.Argument(help="RESULTS/<machine>")]) -> None:
    """Predict the steps that `steps` and `pipeline` have measured in FOLDER again, by the model as it is now."""
    tables = {
        "steps": lambda record: steps.table(steps.read(folder, record)),
        "pipeline": lambda record: pipeline.table(pipeline.Plan(**record["settings"]), pipeline.read(folder, record)),
    }
    paths = {name: folder / f"{name}.json" for name in tables if (folder / f"{name}.json").is_file()}
    if not paths:
        raise UserError("no measured steps", where=folder, fix="measure them: make bench-steps (root only)")
    for name, path in paths.items():
        record = json.loads(path.read_text(encoding="utf-8"))
        table = tables[name](record)
        terminal.write_table(folder / f"{name}.csv", table, record["machine"])
        atomic_write(path, json.dumps(record | {"summary": steps.summary(table)}, indent=1) + "\n")
        print(folder / f"{name}.csv", path, sep="\n")


@command(app, "race", race.Plan)
def run_race(plan: race.Plan, results: Path) -> None:
    """Train over limited links until a validation loss is reached, by the clock (root only): race.csv,
    race_summary.csv, race.json. About two hours on two cores; runs that are there are not repeated."""
    need_testbed()
    with measuring(results, plan.turns) as (host, folder, advance):
        race.measure(plan, folder / "race", advance)
    table = race.table(plan, folder / "race")
    summary = race.summary(table)
    save(folder, "race", host, plan, {"race": table, "race_summary": summary})
    show(folder, summary, "mbit_per_s place label reached", "of_uncompressed seconds iterations")


@command(app, "stages", stages.Plan)
def time_stages(plan: stages.Plan, results: Path) -> None:
    """Note when each pipeline stage finishes its reductions: stages.csv, stages_iterations.csv, stages.json.

    Links are slowed down by injected delays, stage 0's most. stages.json also holds the times that DAC has measured.
    timeline.csv has the share of every kind of work in each iteration; timeline_spans.csv and timeline_trace.json (for
    Perfetto or chrome://tracing) show what every rank did when in the iteration with the median duration.
    """
    with measuring(results, len(stages.VARIANTS) + 1) as (host, folder, advance):
        data = stages.measure(plan, advance)
    table = stages.table(data.iterations)
    timing = [decision["timing"] for decision in data.decisions["dac"] if decision["timing"]]
    tables = {"stages": table, "stages_iterations": data.iterations}
    tables |= {"timeline": data.shares, "timeline_spans": data.spans}
    atomic_write(folder / "timeline_trace.json", chrome_trace(data.spans))
    save(folder, "stages", host, plan, tables, timing=timing)
    show(folder, table, "variant ranks", "spread_seconds of_equal step_seconds")


@app.command("keep")
@main_guard
def keep(results: Results = RESULTS, reference: Path = REFERENCE) -> None:
    """Copy the tables and figures of every machine from RESULTS to REFERENCE, where they can be committed."""
    for path in terminal.keep(results, reference):
        print(path)


if __name__ == "__main__":
    app()
