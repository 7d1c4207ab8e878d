"""Commands that train over links of a chosen speed: ``network``, ``steps``, ``pipeline``, ``race`` and ``stages``.

All but ``stages`` need a testbed (root only): where none can be made they say why and end with exit code 0.
"""

from __future__ import annotations

from typing import Annotated

import typer

from experiments.bench import network, pipeline_steps, race, stages, steps, timeline
from experiments.bench.options import numbers
from experiments.bench.terminal import RESULTS, Results, need_testbed, place, progress, show, write
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write

Delay = Annotated[float, typer.Option(help="milliseconds later that a packet arrives, where the kernel can")]
Rates = Annotated[str, typer.Option(help="limits in Mbit/s, with commas")]


@main_guard
def time_steps(
    rates: Annotated[str, typer.Option(help="limits in Mbit/s, with commas; 0 is no limit")] = "100,1000,0",
    ranks: Annotated[str, typer.Option(help="ranks of torch's hook and ours, with commas")] = "4,32,128",
    quantised: Annotated[str, typer.Option(help="ranks of ours with int8 and int4 factors")] = "32,128",
    delay: Delay = 0.0,
    repeats: Annotated[int, typer.Option(help="rounds for each limit")] = 5,
    threads: Annotated[int, typer.Option(help="threads of each rank")] = 1,
    results: Results = RESULTS,
) -> None:
    """Time training steps of two ranks over a limited link (root only): network.csv, network_rounds.csv,
    network.json."""
    plan = network.Plan(
        rates=tuple(float(rate) or None for rate in numbers(rates, "--rates")),
        ranks=numbers(ranks, "--ranks"),
        quantised=numbers(quantised, "--quantised"),
        delay_ms=delay,
        rounds=repeats,
        threads=threads,
    )
    need_testbed(delay)
    host, folder = place(results)
    with progress(plan.turns) as advance:
        rounds = network.measure(plan, advance)
    table = network.table(plan, rounds)
    write(folder, "network", host, plan, {"network": table, "network_rounds": rounds})
    columns = ["mbit_per_s", "method", "status"]
    show(table, columns, ["seconds", "speedup_over_dense", "speedup_over_torch", "bytes"])


@main_guard
def validate_steps(
    workers: Annotated[str, typer.Option(help="numbers of data-parallel workers, with commas")] = "2,4",
    rates: Rates = "100,300,1000",
    delay: Delay = 0.0,
    repeats: Annotated[int, typer.Option(help="rounds for each limit")] = 5,
    results: Results = RESULTS,
) -> None:
    """Compare predicted with measured training steps over limited links (root only): steps.csv, steps_rounds.csv,
    steps_probes.csv, steps.json."""
    plan = steps.Plan(
        workers=numbers(workers, "--workers"),
        rates=tuple(map(float, numbers(rates, "--rates"))),
        delay_ms=delay,
        rounds=repeats,
    )
    need_testbed(delay)
    host, folder = place(results)
    with progress(plan.turns) as advance:
        found = steps.measure(plan, advance)
    table = steps.table(found)
    tables = {"steps": table, "steps_rounds": found.rounds, "steps_probes": found.probes}
    write(folder, "steps", host, plan, tables, sent=found.sent, summary=steps.summary(table))
    show(table, ["workers", "mbit_per_s", "method", "used"], ["seconds", "seconds_predicted", "error"])


@main_guard
def validate_pipeline_steps(
    rates: Rates = "20,50,200",
    micro_batches: Annotated[str, typer.Option(help="of a replica in a step, with commas")] = "2,8",
    repeats: Annotated[int, typer.Option(help="counted iterations of each run")] = 9,
    results: Results = RESULTS,
) -> None:
    """Compare predicted with measured steps of two stages with two replicas (root only): pipeline.csv,
    pipeline_rounds.csv, pipeline_probes.csv, pipeline.json."""
    plan = pipeline_steps.Plan(
        rates=tuple(map(float, numbers(rates, "--rates"))),
        micro_batches=numbers(micro_batches, "--micro-batches"),
        rounds=repeats,
    )
    need_testbed()
    host, folder = place(results)
    with progress(len(plan.configurations)) as advance:
        found = pipeline_steps.measure(plan, advance)
    table = pipeline_steps.table(plan, found)
    tables = {"pipeline": table, "pipeline_rounds": found.rounds, "pipeline_probes": found.probes}
    write(folder, "pipeline", host, plan, tables, sent=found.sent, summary=steps.summary(table))
    show(table, ["mbit_per_s", "micro_batches", "method", "used"], ["seconds", "seconds_predicted", "error"])


@main_guard
def run_race(
    rates: Rates = "50,200,1000",
    seeds: Annotated[str, typer.Option(help="seeds, with commas")] = "1,2,3",
    methods: Annotated[str, typer.Option(help="variants of race.yaml, with commas; default: all")] = "",
    iterations: Annotated[int, typer.Option(help="instead of race.yaml's, for a short run; 0: as there")] = 0,
    results: Results = RESULTS,
) -> None:
    """Train over limited links until a validation loss is reached, by the clock (root only): race.csv,
    race_summary.csv, race.json. About two hours on two cores; runs that are there are not repeated."""
    plan = race.Plan(
        rates=tuple(map(float, numbers(rates, "--rates"))),
        seeds=numbers(seeds, "--seeds"),
        methods=tuple(methods.split(",")) if methods else (),
        iterations=iterations or None,
    )
    need_testbed()
    host, folder = place(results)
    with progress(plan.turns) as advance:
        race.measure(plan, folder / "race", advance)
    table = race.table(plan, folder / "race")
    summary = race.summary(table)
    write(folder, "race", host, plan, {"race": table, "race_summary": summary})
    show(summary, ["mbit_per_s", "place", "label", "reached"], ["of_uncompressed", "seconds", "iterations"])


@main_guard
def time_stages(
    pipeline: Annotated[int, typer.Option(help="pipeline stages")] = 4,
    data: Annotated[int, typer.Option(help="replicas")] = 2,
    rank: Annotated[int, typer.Option(help="of stage 0, and of all stages without DAC")] = 8,
    megabytes: Annotated[float, typer.Option(help="injected bandwidth of every stage, MB/s")] = 1.0,
    slowdown: Annotated[float, typer.Option(help="by what factor stage 0's link is slower")] = 2.0,
    steps: Annotated[int, typer.Option(help="iterations that are counted, per variant")] = 20,
    results: Results = RESULTS,
) -> None:
    """Note when each pipeline stage finishes its reductions: stages.csv, stages_iterations.csv, stages.json.

    Links are slowed down by injected delays, stage 0's most. stages.json also holds the times that DAC has measured.
    timeline.csv has the share of every kind of work in each iteration; timeline_spans.csv and timeline_trace.json (for
    Perfetto or chrome://tracing) show what every rank did when in the iteration with the median duration.
    """
    plan = stages.Plan(pipeline=pipeline, data=data, rank=rank, megabytes=megabytes, slowdown=slowdown, steps=steps)
    host, folder = place(results)
    with progress(len(stages.VARIANTS) + 1) as advance:
        found = stages.measure(plan, advance)
    table = stages.table(found.iterations)
    timing = [made["timing"] for made in found.decisions["dac"] if made["timing"]]
    tables = {"stages": table, "stages_iterations": found.iterations}
    tables |= {"timeline": found.shares, "timeline_spans": found.spans}
    atomic_write(folder / "timeline_trace.json", timeline.chrome_trace(found.spans))
    write(folder, "stages", host, plan, tables, timing=timing)
    show(table, ["variant", "ranks"], ["spread_seconds", "of_equal", "step_seconds"])
