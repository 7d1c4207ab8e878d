"""Commands that time one device: ``engine`` and ``step``."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from experiments.bench import engine, engine_table, gpt, machine, options, step_profile
from experiments.bench.options import numbers, words
from experiments.bench.terminal import RESULTS, Results, place, progress, show, write
from experiments.common.cli import main_guard


@main_guard
def time_engines(
    layers: Annotated[
        int | None,
        typer.Option(help="transformer layers whose gradients are reduced (default: 3, or the model's)"),
    ] = None,
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
    chosen = options.device(device)
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
    host, folder = place(results, plan.device)
    with progress(plan.rounds) as advance:
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
    quick: Annotated[bool, typer.Option(help="seven variants, ten steps: three minutes on a GPU")] = False,
    results: Results = RESULTS,
) -> None:
    """Where the time of a training step goes on one device, with and without a hook: step_profile.csv,
    step_profile_steps.csv, step_profile_kernels.csv, step_profile.json, and step_trace_*.json.gz for Perfetto.

    Nothing is sent: see experiments/bench/step_profile.py for what this does and does not measure.
    """
    default = ",".join(step_profile.QUICK if quick else step_profile.VARIANTS)
    plan = step_profile.Plan(
        size=gpt.Size(layers, hidden, heads, vocabulary, sequence, batch),
        rank=rank,
        steps=10 if quick else steps,
        device=options.device(device),
        variants=words(variants or default, "--variants", step_profile.VARIANTS),
        traces=trace,
    )
    host, folder = place(results, plan.device)
    with progress(len(plan.variants)) as advance:
        found = step_profile.measure(plan, folder, advance)
    table = step_profile.table(plan, found)
    tables = {"step_profile": table, "step_profile_steps": step_profile.steps_table(found)}
    tables["step_profile_kernels"] = step_profile.kernels_table(found)
    write(folder, "step_profile", host, plan, tables)
    values = "step_ms host_ms kernel_ms compress_ms decompress_ms peak_memory_mib over_ddp_step_ms"
    show(table, ["variant", "status"], values.split())
    failed = table.loc[table["status"] != "ok", "variant"]
    if len(failed):
        raise SystemExit(1)
