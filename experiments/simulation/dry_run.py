"""Memory and messages of each rank of a study, before anybody has the GPUs.

``python -m experiments.simulation.dry_run --study gpt2_2p5b_v100`` (or ``make dry-run STUDY=gpt2_2p5b_v100``) builds
every pipeline stage for every method on the meta device, takes it through two steps
(:mod:`experiments.simulation.virtual_rank`) and prints layers, parameters, memory and bytes sent per step, one line for
ranks that are alike. The exit code is 0 whether it fits or not: that is an answer too.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from edgc.control.settings import PolicyConfig
from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.common.written_tables import csv_text
from experiments.simulation import placement
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import GPTShape
from experiments.spec import matrix
from experiments.spec.settings import RunConfig

GIB = 2**30


def chosen(study: str, method: str | None) -> list[RunConfig]:
    """One run of each variant that a dry run can follow, or the one called ``method``.

    Raises:
        UserError: the study has no run called so, or one that a dry run cannot follow.
    """
    from experiments.simulation.virtual_rank import not_followed

    runs = {run.variant: run for run in reversed(matrix.runs(study, "paper"))}
    if method is not None and method not in runs:
        fix = f"use one of {', '.join(sorted(runs))}"
        raise UserError(f"study {study} has no method {method!r}", where=matrix.study_path(study), fix=fix)
    followed = []
    for run in reversed(runs.values()) if method is None else [runs[method]]:
        reason = not_followed(run)
        if reason and method:
            raise UserError(reason, where=f"{study}, {method}", fix="choose another method")
        if reason:
            print(f"left out: {run.label} ({reason})", file=sys.stderr)
        else:
            followed.append(run)
    return followed


def rows(study: str, memory: int, *, method: str | None, rank: int, every_rank: bool) -> Iterator[dict[str, Any]]:
    """Rows of all numbers, in bytes: one for each method and pipeline stage of ``study``, or for each rank of it.

    The first rank of a stage stands for all: every tensor-parallel shard has the same shapes, and every replica the
    same parameters.

    Args:
        memory: bytes of a GPU.
        rank: of the low-rank approximation where a controller decides it.
    """
    from experiments.simulation.virtual_rank import VirtualRank

    work = []
    for run in chosen(study, method):
        shape = placement.shape_of(run)
        work += [(run, shape, stage) for stage in placement.build(shape)]
    for number, (run, shape, stage) in enumerate(work, 1):
        print(f"[{number}/{len(work)}] {run.label}, stage {stage.stage}", file=sys.stderr, flush=True)
        config, alike = run.edgc, shape.tensor * shape.data
        used = config.r_max or rank if isinstance(config, PolicyConfig) else config.fixed_rank
        virtual = VirtualRank(run, stage.stage * alike)
        step = virtual.step(used if config.method == "edgc" else None)
        about = {"pipeline": stage.stage, "ranks_alike": alike, "layers": stage.layers, "parameters": stage.parameters}
        for key, size in asdict(step).items():
            about["micro_batches_in_flight" if key == "in_flight" else f"bytes_{key}"] = size
        about["bytes_activations_in_flight"] = step.all_activations
        about |= {"bytes_total": step.total, "bytes_gpu": memory}
        about |= {"fits": str(step.total <= memory).lower(), "label": run.label}
        for place in range(alike if every_rank else 1):  # Megatron's order: tensor fastest, then data, then pipeline
            data, tensor = divmod(place, shape.tensor)
            at = {"method": run.variant, "rank": used, "global_rank": virtual.rank + place}
            yield at | {"data": data, "tensor": tensor} | about


def as_table(rows: list[dict[str, Any]], title: str, shape: GPTShape, *, every_rank: bool) -> Table:
    """For people: GiB of memory, MB sent."""
    columns = ["method", "r", "PP", "TP", "DP", "ranks", "layers", "parameters", "param.", "grad.", "Adam",
               "activations", "E", "buffers", "work", "total GiB", "sent MB/step"]  # fmt: skip
    sizes = ("parameters", "gradients", "optimizer", "activations_in_flight",
             "error_feedback", "buffers", "work", "total")  # fmt: skip
    table = Table(*columns, title=title)
    for row in rows:
        kept = sum(row[f"bytes_{key}"] for key in sizes[:6])
        shown = row | {"bytes_work": max(0, row["bytes_total"] - kept)}
        numbers = [f"{shown[f'bytes_{key}'] / GIB:.2f}" for key in sizes]
        place = [str(row["tensor"]), str(row["data"]), "1"]
        if not every_rank:
            place = [f"0-{shape.tensor - 1}", f"0-{shape.data - 1}", str(row["ranks_alike"])]
        numbers[-1] += "" if row["fits"] == "true" else " DOES NOT FIT"
        first = (row["label"], "" if row["rank"] is None else str(row["rank"]), str(row["pipeline"]))
        last = (row["layers"], f"{row['parameters']:,}", *numbers, f"{row['bytes_sent'] / 1e6:.1f}")
        table.add_row(*first, *place, *last)
    return table


def verdict(rows: list[dict[str, Any]], memory: int, name: str) -> str:
    """One sentence: does every rank of every method fit, and which do not."""
    size = f"{memory / GIB:g} GiB of a {name}"
    large = dict.fromkeys(f"{row['label']} on stage {row['pipeline']}" for row in rows if row["fits"] == "false")
    worst = max(rows, key=lambda row: row["bytes_total"])
    where = f"({worst['label']}, stage {worst['pipeline']})"
    most = f"the largest rank needs {worst['bytes_total'] / GIB:.2f} GiB {where}"
    return f"DOES NOT FIT into the {size}: {', '.join(large)}; {most}." if large else f"Fits into the {size}: {most}."


@main_guard
def main(
    study: Annotated[str, typer.Option(help="A study with a `cluster` section.")],
    method: Annotated[str | None, typer.Option(help="One variant of the study [all].")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank where a controller decides it.")] = 64,
    every_rank: Annotated[bool, typer.Option("--every-rank", help="A line for each rank.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers, in bytes, as CSV.")] = None,
) -> None:
    """Print what each rank holds and sends; with --out also as CSV."""
    gpu, shape = load_cluster(study).gpu, placement.shape_of(placement.study_run(study))
    memory = gpu.memory_bytes.value
    lines = list(rows(study, memory, method=method, rank=rank, every_rank=every_rank))
    parallel = f"TP{shape.tensor} PP{shape.pipeline} DP{shape.data}"
    wide = Console(width=None if sys.stdout.isatty() else 240)
    wide.print(as_table(lines, f"{study}: {parallel}, GiB per GPU", shape, every_rank=every_rank))
    unique, allocated = shape.unique_parameters, shape.allocated_parameters
    print(f"{unique:,} parameters; {allocated:,} with vocabulary padding and the last stage's copy of the embedding")
    print(verdict(lines, memory, gpu.name.value))
    print("Not counted: what CUDA, NCCL and the allocator keep for themselves, and scratch memory inside of kernels.")
    if out is not None:
        atomic_write(out, csv_text([{key: row[key] for key in row if key != "label"} for row in lines]))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # sizes alone are asked for, and GPUs may be busy
    warnings.filterwarnings("ignore")  # about GPU packages that this program has no use for
    typer.run(main)
