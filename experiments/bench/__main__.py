"""``python -m experiments.bench engine``, ``step``, ``network``, ``steps``, ``pipeline``, ``race`` and ``stages``.

All print the folder that they have written to, ``RESULTS/<machine>``, as their last line. ``keep`` copies it to where
results are committed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from experiments.bench import (
    again,
    engine,
    engine_table,
    keeping,
    machine,
    network,
    pipeline_steps,
    race,
    stages,
    step_profile,
    steps,
)
from experiments.bench.gpt import Size
from experiments.bench.options import device_of, numbers, words
from experiments.bench.terminal import RESULTS, Results, measuring, need_testbed, save, show, write
from experiments.bench.timeline import chrome_trace
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write

REFERENCE = Path("results/reference/bench")

app = typer.Typer(add_completion=False, help=__doc__)
LAYERS = "transformer layers whose gradients are reduced (default: 3, or the model's)"
Delay = Annotated[float, typer.Option(help="milliseconds later that a packet arrives, where the kernel can")]
Rates = Annotated[str, typer.Option(help="limits in Mbit/s, with commas")]
Repeats = Annotated[int, typer.Option(help="rounds for each limit")]


@app.command("engine")
@main_guard
def time_engines(
    layers: Annotated[int | None, typer.Option(help=LAYERS)] = None,
    hidden: Annotated[int, typer.Option(help="hidden size; GPT-2 medium has 1024")] = 1024,
    model: Annotated[str, typer.Option(help=f"shapes of {' or '.join(engine.MODELS)} instead")] = "",
    ranks: Annotated[str, typer.Option(help="ranks, with commas")] = "8,32,64,128",
    threads: Annotated[str, typer.Option(help="threads, with commas; ignored on a GPU")] = "1,2",
    repeats: Annotated[int, typer.Option(help="rounds; medians are taken over them")] = 7,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    dtypes: Annotated[str, typer.Option(help="of the gradients: fp32, bf16 (default: both on a GPU)")] = "",
    allocators: Annotated[str, typer.Option(help="default, thp, kept; ignored on a GPU")] = "default,thp,kept",
    gloo: Annotated[bool, typer.Option(help="also time two ranks with gloo; ignored on a GPU")] = True,
    kernels: Annotated[bool | None, typer.Option(help="also the time of every kernel (default: on a GPU)")] = None,
    quick: Annotated[bool, typer.Option(help="two ranks, fp32 gradients, three rounds: a minute on a GPU")] = False,
    results: Results = RESULTS,
) -> None:
    """Time one step of every engine on the same gradients: engine.csv, engine_rounds.csv, engine.json, and with kernels
    engine_kernels.csv; of a model all with -MODEL in their names."""
    chosen = device_of(device)
    gpu = chosen == "cuda"
    if quick:
        ranks, dtypes, repeats = "32,128", "fp32", 3
    names = words(allocators, "--allocators", engine.ALLOCATORS)
    sizes: dict[str, Any] = {"layers": 3 if layers is None else layers, "hidden": hidden}
    if model:
        words(model, "--model", engine.MODELS)
        free = torch.cuda.mem_get_info()[0] if gpu else machine.free_memory()
        sizes = engine.MODELS[model] | {"layers": layers or engine.layers_that_fit(model, free)}
    plan = engine.Plan(
        **sizes,
        ranks=numbers(ranks, "--ranks"),
        threads=(1,) if gpu else numbers(threads, "--threads"),
        repeats=repeats,
        device=chosen,
        dtypes=words(dtypes or ("fp32,bf16" if gpu else "fp32"), "--dtypes", ("fp32", "bf16")),
        allocators=("default",) if gpu else names,
        gloo=gloo and not gpu,
        kernels=gpu if kernels is None else kernels,
        model=model,
    )
    with measuring(results, plan.rounds, plan.device) as (host, folder, advance):
        found = engine.measure(plan, advance)
    table = engine_table.table(plan, found)
    of_model = f"-{model}" if model else ""
    tables = {"engine": table, "engine_rounds": engine_table.rounds_table(found)}
    if plan.kernels:
        tables["engine_kernels"] = engine_table.kernels_table(found)
    write(folder, f"engine{of_model}", host, plan, {f"{key}{of_model}": of for key, of in tables.items()})
    columns = "network allocator threads rank engine factor_dtype"
    values = "cpu_ms wall_ms kernel_ms relative_error speedup_cpu speedup_wall ratio_to_floor"
    show(table[table["status"] == "ok"], columns.split(), values.split())


@app.command("step")
@main_guard
def profile_step(
    layers: Annotated[int, typer.Option(help="transformer layers; the defaults are GPT-2 with 124M parameters")] = 12,
    hidden: Annotated[int, typer.Option(help="hidden size")] = 768,
    heads: Annotated[int, typer.Option(help="attention heads")] = 12,
    vocabulary: Annotated[int, typer.Option(help="tokens that there are")] = 50257,
    sequence: Annotated[int, typer.Option(help="tokens of a sequence")] = 1024,
    batch: Annotated[int, typer.Option(help="sequences of a step")] = 8,
    rank: Annotated[int, typer.Option(help="of low-rank methods")] = 32,
    steps: Annotated[int, typer.Option(help="steps that are timed, of each variant")] = 20,
    variants: Annotated[str, typer.Option(help=f"with commas: {', '.join(step_profile.VARIANTS)}; default: all")] = "",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    trace: Annotated[bool, typer.Option(help="also write a trace of one step of each variant")] = True,
    quick: Annotated[bool, typer.Option(help="ten variants, ten steps: four minutes on a GPU")] = False,
    results: Results = RESULTS,
) -> None:
    """Where the time of a training step goes on one device, with and without a hook: step_profile.csv,
    step_profile_steps.csv, step_profile_kernels.csv, step_profile.json, and step_trace_*.json.gz for Perfetto.

    Nothing is sent: see experiments/bench/step_profile.py for what this does and does not measure.
    """
    default = ",".join(step_profile.QUICK if quick else step_profile.VARIANTS)
    plan = step_profile.Plan(
        size=Size(layers, hidden, heads, vocabulary, sequence, batch),
        rank=rank,
        steps=10 if quick else steps,
        device=device_of(device),
        variants=words(variants or default, "--variants", step_profile.VARIANTS),
        traces=trace,
    )
    with measuring(results, len(plan.variants), plan.device) as (host, folder, advance):

        def after(variant: str, found: step_profile.Found) -> None:
            # After every variant: who ends it early keeps those that were run.
            save(folder, "step_profile", host, plan, step_profile.tables(plan, found))
            advance(variant)

        found = step_profile.measure(plan, folder, after)
    print(folder)
    table = step_profile.table(plan, found)
    values = "step_ms host_ms kernel_ms compress_ms decompress_ms peak_memory_mib over_ddp_step_ms"
    show(table, ["variant", "status"], values.split())
    if (table["status"] != "ok").any():
        raise SystemExit(1)


@app.command("network")
@main_guard
def time_steps(
    rates: Annotated[str, typer.Option(help="limits in Mbit/s, with commas; 0 is no limit")] = "100,1000,0",
    ranks: Annotated[str, typer.Option(help="ranks of torch's hook and ours, with commas")] = "4,32,128",
    quantised: Annotated[str, typer.Option(help="ranks of ours with int8 and int4 factors")] = "32,128",
    delay: Delay = 0.0,
    repeats: Repeats = 5,
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
    with measuring(results, plan.turns) as (host, folder, advance):
        rounds = network.measure(plan, advance)
    table = network.table(plan, rounds)
    write(folder, "network", host, plan, {"network": table, "network_rounds": rounds})
    values = ["seconds", "speedup_over_dense", "speedup_over_torch", "bytes"]
    show(table, ["mbit_per_s", "method", "status"], values)


@app.command("steps")
@main_guard
def validate_steps(
    workers: Annotated[str, typer.Option(help="numbers of data-parallel workers, with commas")] = "2,4",
    rates: Rates = "100,300,1000",
    delay: Delay = 0.0,
    repeats: Repeats = 5,
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
    with measuring(results, plan.turns) as (host, folder, advance):
        found = steps.measure(plan, advance)
    table = steps.table(found)
    tables = {"steps": table, "steps_rounds": found.rounds, "steps_probes": found.probes}
    write(folder, "steps", host, plan, tables, sent=found.sent, summary=steps.summary(table))
    show(table, ["workers", "mbit_per_s", "method", "used"], ["seconds", "seconds_predicted", "error"])


@app.command("pipeline")
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
    with measuring(results, len(plan.configurations)) as (host, folder, advance):
        found = pipeline_steps.measure(plan, advance)
    table = pipeline_steps.table(plan, found)
    tables = {"pipeline": table, "pipeline_rounds": found.rounds, "pipeline_probes": found.probes}
    write(folder, "pipeline", host, plan, tables, sent=found.sent, summary=steps.summary(table))
    show(table, ["mbit_per_s", "micro_batches", "method", "used"], ["seconds", "seconds_predicted", "error"])


@app.command("predict")
@main_guard
def predict_again(folder: Annotated[Path, typer.Argument(help="RESULTS/<machine>")]) -> None:
    """Predict the steps that `steps` and `pipeline` have measured in FOLDER again, by the model as it is now."""
    for path in again.predict_again(folder):
        print(path)


@app.command("race")
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
    with measuring(results, plan.turns) as (host, folder, advance):
        race.measure(plan, folder / "race", advance)
    table = race.table(plan, folder / "race")
    summary = race.summary(table)
    write(folder, "race", host, plan, {"race": table, "race_summary": summary})
    show(summary, ["mbit_per_s", "place", "label", "reached"], ["of_uncompressed", "seconds", "iterations"])


@app.command("stages")
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
    with measuring(results, len(stages.VARIANTS) + 1) as (host, folder, advance):
        found = stages.measure(plan, advance)
    table = stages.table(found.iterations)
    timing = [made["timing"] for made in found.decisions["dac"] if made["timing"]]
    tables = {"stages": table, "stages_iterations": found.iterations}
    tables |= {"timeline": found.shares, "timeline_spans": found.spans}
    atomic_write(folder / "timeline_trace.json", chrome_trace(found.spans))
    write(folder, "stages", host, plan, tables, timing=timing)
    show(table, ["variant", "ranks"], ["spread_seconds", "of_equal", "step_seconds"])


@app.command("keep")
@main_guard
def keep(results: Results = RESULTS, reference: Path = REFERENCE) -> None:
    """Copy the tables and figures of every machine from RESULTS to REFERENCE, where they can be committed."""
    for path in keeping.keep(results, reference):
        print(path)


if __name__ == "__main__":
    app()
