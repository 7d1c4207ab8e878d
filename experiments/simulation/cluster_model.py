"""Tables of a cluster that we do not have: bytes that each method would send in a step, and seconds they would take.

Everything timed here is simulated and says so. The inputs are the ``cluster:`` section of a study file, each
with its source and kind (measured, cited or assumed); the formulas and what they leave out: :mod:`.cost`.

``python -m experiments.simulation.cluster_model --study gpt2_2p5b_v100 --out results/ci/gpt2_2p5b_v100``
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.common.written_tables import csv_text
from experiments.simulation import rank_trace
from experiments.simulation.cost import KIND, Model, of_method, reduction, step
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import build, groups_sharing_a_node, shape_of, study_run
from experiments.spec.matrix import load_study

RESULTS = ("table.csv", "steps.csv", "traces.csv", "traces_late.csv", "summary.json")


def load_model(study: str) -> Model:
    """Model of ``study`` at the first bandwidth of its sweep."""
    cluster, run = load_cluster(study), study_run(study)
    shape = shape_of(run)
    sharing = groups_sharing_a_node(shape, cluster.nodes.value, cluster.gpus_per_node.value)
    gbits = cluster.network.node_gbits_per_second.value[0]
    return Model(shape, build(shape), cluster, sharing, run.micro_batches, run.train.micro_batch, gbits)


def sweep(model: Model) -> Iterator[Model]:
    """The model at every bandwidth of the study."""
    for gbits in model.cluster.network.node_gbits_per_second.value:
        yield replace(model, gbits=gbits)


def table(models: Sequence[Model]) -> list[dict[str, Any]]:
    """One row per bandwidth, method and stage, and one for the stage that takes longest (``slowest``)."""
    rows = []
    for at in models:
        base = {stage.stage: at.none(stage) for stage in at.stages}
        slowest_base = max(base.values(), key=lambda cost: cost.seconds)
        for name, (rank, method) in at.methods().items():
            costs = {stage.stage: method(stage) for stage in at.stages}
            longest = max(costs, key=lambda stage: costs[stage].seconds)
            lines = [(str(stage), cost, base[stage]) for stage, cost in costs.items()]
            for label, cost, none in [*lines, ("slowest", costs[longest], slowest_base)]:
                saved = {
                    "communication": reduction(cost.communication, none.communication),
                    "with_compress": reduction(cost.seconds, none.seconds),
                }
                row = {"method": name, "rank": rank, "gbits_per_second": f"{at.gbits:g}", "stage": label}
                row |= {"bytes": round(cost.bytes), "seconds_communication": f"{cost.communication:.9g}"}
                row |= {"seconds_compress": f"{cost.compress:.9g}"}
                row |= {f"reduction_{part}_percent": f"{value:.4f}" for part, value in saved.items()}
                rows.append(row | {"kind": KIND})
    return rows


def step_table(models: Sequence[Model]) -> list[dict[str, Any]]:
    """A row per bandwidth, method, and whether reductions overlap with backward; what is saved is of the uncompressed
    step that overlaps as much."""
    rows = []
    for at in models:
        for overlap in (False, True):
            base = step(at, at.none, overlap=overlap)
            for name, (rank, _) in at.methods().items():
                iteration, seconds = of_method(at, name, overlap=overlap, base=base.seconds)
                row = {"method": name, "rank": rank, "gbits_per_second": f"{at.gbits:g}", "overlap": overlap}
                row |= {"seconds_step": f"{seconds:.9g}", "seconds_exposed": f"{max(iteration.exposed):.9g}"}
                row |= {"reduction_time_percent": f"{reduction(seconds, base.seconds):.4f}"}
                rows.append(row | {"kind": KIND})
    return rows


def summary(study: str, model: Model) -> dict[str, Any]:
    """The job, what the paper claims, and all inputs with their sources."""
    shape, paper = model.shape, model.cluster.paper
    return {
        "study": study,
        "title": load_study(study).title,
        "kind": KIND,
        "parameters": shape.unique_parameters,
        "parameters_allocated": shape.allocated_parameters,
        "parallel": {"tensor": shape.tensor, "pipeline": shape.pipeline, "data": shape.data},
        "paper_reduction_percent": paper.reduction_percent.value,
        "paper_time_reduction_percent": paper.time_reduction_percent.value,
        "inputs": model.cluster.model_dump(),
    }


@main_guard
def main(study: Annotated[str, typer.Option()], out: Annotated[Path, typer.Option()]) -> None:
    """Write table, steps, traces and traces_late.csv, and summary.json (last), of a simulated cluster."""
    model = load_model(study)
    check_writable(out)
    models = list(sweep(model))
    tables = {"table": table(models), "steps": step_table(models)}
    tables |= {"traces": rank_trace.table(study, models), "traces_late": rank_trace.late_table(study, models)}
    for name, rows in tables.items():
        atomic_write(out / f"{name}.csv", csv_text(rows))
    atomic_write(out / "summary.json", json.dumps(summary(study, model), indent=1) + "\n")
    print(f"{out}: {' '.join(RESULTS)} ({KIND})")


if __name__ == "__main__":
    typer.run(main)
