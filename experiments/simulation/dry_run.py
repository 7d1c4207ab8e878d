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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from edgc.control.settings import PolicyConfig
from edgc.errors import UserError
from experiments.common.cli import main_guard
from experiments.common.files import atomic_write
from experiments.common.written_tables import csv_text
from experiments.simulation import placement
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import GPTShape, StageShard
from experiments.spec import matrix
from experiments.spec.settings import RunConfig

if TYPE_CHECKING:
    from experiments.simulation.virtual_rank import Step

GIB = 2**30


@dataclass(frozen=True)
class Row:
    """Ranks of one method that are alike: those of a pipeline stage.

    Attributes:
        rank: of the low-rank approximation; None where there is none.
        activations_by_formula: bytes, of all micro-batches in flight; against ``step.all_activations``.
    """

    run: RunConfig
    shape: GPTShape
    stage: StageShard
    rank: int | None
    step: Step
    activations_by_formula: float

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """(global rank, data, tensor), ascending. Megatron's order: tensor fastest, then data, then pipeline."""
        tensor, data = self.shape.tensor, self.shape.data
        first = self.stage.stage * tensor * data
        return [(first + place, *divmod(place, tensor)) for place in range(tensor * data)]


def chosen(study: str, scale: str, method: str | None) -> list[RunConfig]:
    """One run of each variant that a dry run can follow, or the one called ``method``.

    Raises:
        UserError: the study has no runs at this scale, none called so, or one that a dry run cannot follow.
    """
    from experiments.simulation.virtual_rank import not_followed

    runs = {run.variant: run for run in reversed(matrix.runs(study, scale))}
    where = matrix.study_path(study)
    if not runs:
        raise UserError(f"study {study} has no runs at scale {scale}", where=where, fix="use --scale paper")
    if method is not None and method not in runs:
        fix = f"use one of {', '.join(sorted(runs))}"
        raise UserError(f"study {study} has no method {method!r}", where=where, fix=fix)
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


def rows(study: str, scale: str, *, method: str | None, rank: int) -> Iterator[Row]:
    """One row for each method and pipeline stage of ``study``; ``rank`` where a controller decides it.

    The first rank of a stage stands for all: every tensor-parallel shard has the same shapes, and every replica the
    same parameters.
    """
    from experiments.simulation.virtual_rank import VirtualRank

    work = []
    for run in chosen(study, scale, method):
        shape = placement.shape_of(run)
        work += [(run, shape, stage) for stage in placement.build(shape)]
    console = Console(stderr=True)
    for number, (run, shape, stage) in enumerate(track(work, f"{study}: stages", console=console, transient=True), 1):
        if not console.is_terminal:  # a bar would not be seen
            print(f"[{number}/{len(work)}] {run.label}, stage {stage.stage}", file=sys.stderr, flush=True)
        config = run.edgc
        used = config.r_max or rank if isinstance(config, PolicyConfig) else config.fixed_rank
        virtual = VirtualRank(run, stage.stage * shape.tensor * shape.data)
        step = virtual.step(used if config.method == "edgc" else None)
        formula = virtual.in_flight * placement.stage_activations(run, stage.stage, shape.padded_vocab)
        yield Row(run, shape, stage, used, step, formula)


def as_csv(rows: list[Row], memory: int, *, every_rank: bool) -> str:
    """All numbers, in bytes; a line for each row, or for each rank of it."""
    table = []
    for row in rows:
        step, stage, places = row.step, row.stage, row.places
        about = {"pipeline": stage.stage, "ranks_alike": len(places), "layers": stage.layers}
        about |= {"parameters": stage.parameters}
        for key, size in asdict(step).items():
            about["micro_batches_in_flight" if key == "in_flight" else f"bytes_{key}"] = size
        about["bytes_activations_in_flight"] = step.all_activations
        about["bytes_activations_by_formula"] = round(row.activations_by_formula)
        about |= {"bytes_total": step.total, "bytes_gpu": memory, "fits": str(step.total <= memory).lower()}
        for place, data, tensor in places if every_rank else places[:1]:
            at = {"method": row.run.variant, "rank": row.rank, "global_rank": place, "data": data, "tensor": tensor}
            table.append(at | about)
    return csv_text(table)


def as_table(rows: list[Row], title: str, memory: int, *, every_rank: bool) -> Table:
    """For people: GiB of memory, MB sent."""
    columns = ["method", "r", "PP", "TP", "DP", "ranks", "layers", "parameters", "param.", "grad.", "Adam",
               "activations", "by formula", "E", "buffers", "work", "total GiB", "sent MB/step"]  # fmt: skip
    table = Table(*columns, title=title)
    for row in rows:
        step, stage, places = row.step, row.stage, row.places
        spans = [(f"0-{row.shape.tensor - 1}", f"0-{row.shape.data - 1}", str(len(places)))]
        if every_rank:
            spans = [(str(tensor), str(data), "1") for _, data, tensor in places]
        sizes = (
            step.parameters, step.gradients, step.optimizer, step.all_activations, row.activations_by_formula,
            step.error_feedback, step.buffers, max(0, step.total - step.kept - step.all_activations), step.total,
        )  # fmt: skip
        numbers = [f"{size / GIB:.2f}" for size in sizes]
        if step.total > memory:
            numbers[-1] += " DOES NOT FIT"
        first = (row.run.label, "" if row.rank is None else str(row.rank), str(stage.stage))
        last = (stage.layers, f"{stage.parameters:,}", *numbers, f"{step.sent / 1e6:.1f}")
        for span in spans:
            table.add_row(*first, *span, *last)
    return table


def verdict(rows: list[Row], memory: int, name: str) -> str:
    """One sentence: does every rank of every method fit, and which do not."""
    size = f"{memory / GIB:g} GiB of a {name}"
    large = [f"{row.run.label} on stage {row.stage.stage}" for row in rows if row.step.total > memory]
    worst = max(rows, key=lambda row: row.step.total)
    most = f"the largest rank needs {worst.step.total / GIB:.2f} GiB ({worst.run.label}, stage {worst.stage.stage})"
    return f"DOES NOT FIT into the {size}: {', '.join(large)}; {most}." if large else f"Fits into the {size}: {most}."


@main_guard
def main(
    study: Annotated[str, typer.Option(help="A study with a `cluster` section.")],
    scale: Annotated[str, typer.Option(help="Scale whose runs are looked at.")] = "paper",
    method: Annotated[str | None, typer.Option(help="One variant of the study [all].")] = None,
    rank: Annotated[int, typer.Option(min=1, help="Rank where a controller decides it.")] = 64,
    every_rank: Annotated[bool, typer.Option("--every-rank", help="A line for each rank.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the numbers, in bytes, as CSV.")] = None,
) -> None:
    """Print what each rank holds and sends; with --out also as CSV."""
    gpu, shape = load_cluster(study).gpu, placement.shape_of(placement.study_run(study))
    lines = list(rows(study, scale, method=method, rank=rank))
    memory = gpu.memory_bytes.value
    parallel = f"TP{shape.tensor} PP{shape.pipeline} DP{shape.data}"
    wide = Console(width=None if sys.stdout.isatty() else 240)
    wide.print(as_table(lines, f"{study}: {parallel}, GiB per GPU", memory, every_rank=every_rank))
    unique, allocated = shape.unique_parameters, shape.allocated_parameters
    print(f"{unique:,} parameters; {allocated:,} with vocabulary padding and the last stage's copy of the embedding")
    print(verdict(lines, memory, gpu.name.value))
    print("Not counted: what CUDA, NCCL and the allocator keep for themselves, and scratch memory inside of kernels.")
    if out is not None:
        atomic_write(out, as_csv(lines, memory, every_rank=every_rank))


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # sizes alone are asked for, and GPUs may be busy
    warnings.filterwarnings("ignore")  # about GPU packages that this program has no use for
    typer.run(main)
