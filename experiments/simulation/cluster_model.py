"""Tables of a cluster that we do not have: bytes that each method would send in a step, and seconds they would take.

Everything timed here is simulated and says so. The inputs are the ``cluster:`` section of a study file, each
with its source and kind (measured, cited or assumed); the formulas and what they leave out: :mod:`.cost`.

``python -m experiments.simulation.cluster_model --study gpt2_2p5b_v100 --out results/ci/gpt2_2p5b_v100``
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.common.written_tables import csv_text, write_text
from experiments.simulation import rank_trace
from experiments.simulation.cost import KIND, RANK_MULTIPLE, Cost, Model, StageCost, of_method, reduction, step
from experiments.simulation.inputs import load_cluster
from experiments.simulation.placement import FP32_BYTES, build, groups_sharing_a_node, shape_of, study_run
from experiments.spec.matrix import load_study

RESULTS = ("table.csv", "stages.csv", "steps.csv", "traces.csv", "summary.json")
EFFICIENCIES = (0.3, 0.5, 0.7)  # shares of the peak at which the largest possible saving is told


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
            lines = [(str(stage), cost, base[stage], stage) for stage, cost in costs.items()]
            for label, cost, none, stage in [*lines, ("slowest", costs[longest], slowest_base, longest)]:
                other = at.other(at.stages[stage])
                saved = {
                    "communication": reduction(cost.communication, none.communication),
                    "with_compress": reduction(cost.seconds, none.seconds),
                    "all": reduction(cost.seconds + other, none.seconds + other),
                }
                row = {"method": name, "rank": rank, "gbits_per_second": f"{at.gbits:g}", "stage": label}
                row |= {"bytes": round(cost.bytes), "seconds_communication": f"{cost.communication:.9g}"}
                row |= {"seconds_compress": f"{cost.compress:.9g}", "seconds_other": f"{other:.9g}"}
                row |= {f"reduction_{part}_percent": f"{value:.4f}" for part, value in saved.items()}
                rows.append(row | {"kind": KIND})
    return rows


def stage_table(model: Model) -> list[dict[str, Any]]:
    """One row per stage: content and uncompressed messages of one GPU of it. Exact, not simulated.

    Memory is that of fp32 training with Adam: weight, gradient and two moments, without activations.
    """
    return [
        {
            "stage": stage.stage,
            "layers": stage.layers,
            "parameters": stage.parameters,
            "matrices": len(stage.matrices),
            "matrix_shapes": " ".join(f"{n}*{m}x{k}" for (m, k), n in stage.shapes.items()),
            "bytes_dense": sum(stage.dense_payload()),
            "bytes_dense_rest": FP32_BYTES * stage.dense_rest,
            "memory_bytes": 4 * FP32_BYTES * stage.parameters,
            "kind": "computed",
        }
        for stage in model.stages
    ]


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
                row |= {"seconds_pipeline": f"{max(iteration.computed):.9g}"}
                row |= {"reduction_time_percent": f"{reduction(seconds, base.seconds):.4f}"}
                rows.append(row | {"kind": KIND})
    return rows


def bandwidth_where(model: Model, cost: Callable[[Model], StageCost], percent: float) -> float | None:
    """Gbit/s per node up to which a method of fixed size saves ``percent``, its compression time counted; None if it
    is not reached even at 1 Mbit/s, infinity if still at 1 Pbit/s."""

    def saved(gbits: float) -> float:
        at = replace(model, gbits=gbits)
        return reduction(at.slowest(cost(at)).seconds, at.slowest(at.none).seconds)

    return boundary(saved, percent, 1e-3, 1e6, precision=1 + 1e-12)


def boundary(
    saved: Callable[[float], float], percent: float, low: float, high: float, precision: float
) -> float | None:
    """Bandwidth (Gbit/s) up to which ``percent`` is saved, given what is saved by bandwidth: to a factor
    ``precision`` below it.

    Bisection, as what is saved falls with the bandwidth; None and infinity beyond ``low`` and ``high``.
    """
    if saved(low) < percent:
        return None
    if saved(high) >= percent:
        return math.inf
    while high / low > precision:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saved(middle) >= percent else (low, middle)
    return low


def edgc_at_claim(model: Model, percent: float) -> dict[str, Any]:
    """The searched ranks, and the largest mean rank at which a whole run still saves ``percent``."""
    ranks = model.edgc_ranks()
    if ranks is None:
        return {"r_min": None, "r_max": None, "mean_rank": None, "rank_for_claim": None}
    limit = model.slowest(model.none).seconds

    def saves(rank: int) -> bool:
        return reduction(model.slowest(partial(model.edgc, rank=rank)).seconds, limit) >= percent

    at_claim = next(filter(saves, range(ranks[2], 0, -RANK_MULTIPLE)), None)
    return {"r_min": ranks[0], "r_max": ranks[2], "mean_rank": ranks[1], "rank_for_claim": at_claim}


def summary(study: str, model: Model) -> dict[str, Any]:
    """Totals, inputs with their sources, and where the paper's figure falls."""
    percent = model.cluster.paper.reduction_percent.value
    low_rank = (f"powersgd_r{rank}" for rank in model.cluster.methods.powersgd_ranks.value)
    fixed = ("bf16", "topk", "int8", "int4", *low_rank)
    reach = {name: bandwidth_where(model, methodcaller("method", name), percent) for name in fixed}
    shape = model.shape
    return {
        "study": study,
        "title": load_study(study).title,
        "kind": KIND,
        "parameters": shape.unique_parameters,
        "parameters_allocated": shape.allocated_parameters,
        "parallel": {"tensor": shape.tensor, "pipeline": shape.pipeline, "data": shape.data},
        "padded_vocabulary": shape.padded_vocab,
        "groups_sharing_a_node": model.sharing,
        "paper_reduction_percent": percent,
        "paper_time_reduction_percent": model.cluster.paper.time_reduction_percent.value,
        "share_of_step_in_uncompressed_reduction": {f"{at.gbits:g}": shares(at) for at in sweep(model)},
        "gbits_up_to_which_the_paper_reduction_is_reached": {
            name: "always" if value == math.inf else None if value is None else float(f"{value:.6g}")
            for name, value in reach.items()
        },
        "edgc": {f"{at.gbits:g}": edgc_at_claim(at, percent) for at in sweep(model)},
        "inputs": model.cluster.model_dump(),
    }


def shares(model: Model) -> dict[str, float]:
    """Largest part of an uncompressed step that any method could save, by the assumed share of the peak."""
    found = {}
    for value in EFFICIENCIES:
        at = model.assuming("compute", "step_efficiency", value)
        free = step(at, lambda _: Cost(0.0, 0.0), overlap=False).seconds
        found[f"{value:g}"] = round(1 - free / step(at, at.none, overlap=False).seconds, 6)
    return found


@main_guard
def main(study: Annotated[str, typer.Option()], out: Annotated[Path, typer.Option()]) -> None:
    """Write table.csv, stages.csv, steps.csv, traces.csv and summary.json (last) of a simulated cluster."""
    model = load_model(study)
    check_writable(out)
    models = list(sweep(model))
    tables = {"table": table(models), "stages": stage_table(model), "steps": step_table(models)}
    for name, rows in (tables | {"traces": rank_trace.table(study, models)}).items():
        write_text(out / f"{name}.csv", csv_text(rows))
    atomic_write(out / "summary.json", json.dumps(summary(study, model), indent=1) + "\n")
    print(f"{out}: {' '.join(RESULTS)} ({KIND})")


if __name__ == "__main__":
    typer.run(main)
