"""Clusters on which low-rank compression pays beyond the paper's, and the assumptions on which that hangs. Simulated.

``python -m experiments.simulation.break_even --study break_even --out results/ci/break_even`` writes ``table.csv``
(step time saved by cluster, method, bandwidth and overlap), ``break_even.csv`` (bandwidth up to which a share of the
step is saved), ``sensitivity.csv`` (what is saved when one assumption is changed) and ``disturbances.csv`` (where
stages or links differ, or are congested for a while).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import methodcaller
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer

from experiments.common.cli import main_guard
from experiments.common.files import atomic_write, check_writable
from experiments.simulation import rank_trace
from experiments.simulation.cluster_model import load_model
from experiments.simulation.cost import KIND, Model, of_method, reduction, step
from experiments.simulation.scenarios import Case, Scenarios, load_scenarios, model_of

RESULTS = ("table.csv", "break_even.csv", "sensitivity.csv", "disturbances.csv")
SAVED = (1.0, 5.0, 16.13)  # percent of the step; the last is the paper's claim
LEAST, MOST = 1e-2, 1e5  # Gbit/s between which break-even is looked for
PRECISION = 1.02
# What the controller is kept from where clusters are disturbed, by the name of the row.
CONTROLLERS: dict[str, dict[str, Any]] = {
    "edgc": {},
    "edgc_measured_once": {"remeasure_above": None},
    "edgc_unaligned": {"alignment": "off"},
}


def points(model: Model, names: Sequence[str], *, overlap: bool) -> dict[str, tuple[float, float]]:
    """(Mean step in seconds, percent saved of the uncompressed one with as much overlap) by method."""
    base = step(model, model.none, overlap=overlap).seconds
    seconds = {name: of_method(model, name, overlap=overlap, base=base)[1] for name in names}
    return {name: (value, reduction(value, base)) for name, value in seconds.items()}


def table(scenarios: Scenarios) -> Iterator[dict[str, Any]]:
    """One row per cluster, bandwidth, overlap and method."""
    for key, cluster in scenarios.clusters.items():
        for gbits in cluster.gbits_per_second:
            model = model_of(scenarios.of, cluster, gbits)
            ranks = {name: rank for name, (rank, _) in model.methods().items()}
            about = {"cluster": key, "label": cluster.label, "gpus": model.shape.world}
            about |= {"link": "sites" if cluster.sites else "node", "gbits_per_second": gbits}
            for overlap in (False, True):
                for name, (seconds, saved) in points(model, ("none", *scenarios.methods), overlap=overlap).items():
                    row = {"overlap": overlap, "method": name, "rank": ranks[name]}
                    yield about | row | {"seconds_step": seconds, "saved_percent": saved}


def break_even(scenarios: Scenarios) -> Iterator[dict[str, Any]]:
    """Gbit/s up to which a method saves a share of the step; empty where it does not even at 10 Mbit/s, infinite where
    it still does at 100 Tbit/s."""
    for key, cluster in scenarios.clusters.items():
        model = model_of(scenarios.of, cluster, cluster.reference)
        for overlap, name, percent in product((False, True), scenarios.methods, SAVED):
            gbits = boundary(partial(saved_at, model, name, overlap), percent)
            row = {"cluster": key, "label": cluster.label, "overlap": overlap, "method": name}
            yield row | {"saved_percent": percent, "gbits_per_second": gbits}


def boundary(saved: Callable[[float], float], percent: float) -> float | None:
    """Gbit/s up to which ``percent`` is saved, to a factor :data:`PRECISION` below it, given what is saved by
    bandwidth, which falls with it; None and infinity beyond :data:`LEAST` and :data:`MOST`."""
    low, high = LEAST, MOST
    if saved(low) < percent:
        return None
    if saved(high) >= percent:
        return math.inf
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saved(middle) >= percent else (low, middle)
    return low


def saved_at(model: Model, name: str, overlap: bool, gbits: float) -> float:
    """Percent of the step that a method saves at another bandwidth."""
    return points(replace(model, gbits=gbits), [name], overlap=overlap)[name][1]


class Assumption(NamedTuple):
    """An input of the model with a low and a high value; ``times``: as factors of the one that is assumed."""

    section: str
    key: str
    low: float
    high: float
    times: bool = False

    def at(self, model: Model, value: float) -> Model:
        """The model at one of the two."""
        if self.key == "micro_batches":
            return replace(model, micro_batches=max(1, round(model.micro_batches * value)))
        assumed = getattr(getattr(model.cluster, self.section), self.key).value
        return model.assuming(self.section, self.key, assumed * value if self.times else value)


ASSUMPTIONS = (
    Assumption("compute", "step_efficiency", 0.3, 0.7),
    Assumption("compute", "backward_ratio", 2.0, 3.0),
    Assumption("compute", "bucket_elements", 0.25, 4.0, times=True),
    Assumption("network", "latency_seconds", 0.25, 4.0, times=True),
    Assumption("gpu", "gemm_efficiency", 0.25, 0.9),
    Assumption("gpu", "memory_efficiency", 0.4, 0.9),
    Assumption("gpu", "orthogonalise_efficiency", 0.25, 4.0, times=True),
    Assumption("gpu", "seconds_per_matrix", 0.25, 4.0, times=True),
    Assumption("methods", "mean_rank_position", 0.0, 1.0),
    Assumption("train", "micro_batches", 0.25, 4.0, times=True),
)


def sensitivity(scenarios: Scenarios) -> Iterator[dict[str, Any]]:
    """Percent of the step saved at the reference bandwidth: as assumed, and with each assumption low and high."""
    names = scenarios.methods
    for key, cluster in scenarios.clusters.items():
        model = model_of(scenarios.of, cluster, cluster.reference)
        about = {"cluster": key, "label": cluster.label, "gbits_per_second": cluster.reference}
        for overlap in (False, True):
            base = points(model, names, overlap=overlap)
            for assumption in ASSUMPTIONS:
                values, sign = (assumption.low, assumption.high), "x" if assumption.times else ""
                low, high = (points(assumption.at(model, value), names, overlap=overlap) for value in values)
                for name in names:
                    row = about | {"overlap": overlap, "method": name, "assumption": assumption.key}
                    row |= {"low": f"{sign}{assumption.low:g}", "high": f"{sign}{assumption.high:g}"}
                    row |= {"saved_percent": base[name][1], "saved_percent_low": low[name][1]}
                    yield row | {"saved_percent_high": high[name][1]}


def course(even: Model, case: Case, iterations: int) -> rank_trace.Course:
    """A run of a case: as ``even`` before and after it."""
    uneven = replace(even, links=case.links or (), devices=case.devices or ())
    start, end = round(case.start * iterations), round(case.end * iterations)
    parts = ((0, start, even), (start, end, uneven), (end, iterations, even))
    return rank_trace.Course(tuple((last, model) for first, last, model in parts if last > first))


def disturbances(scenarios: Scenarios) -> Iterator[dict[str, Any]]:
    """One row per case, method and overlap: the mean step over the run, and what it saves of the uncompressed one.

    EDGC's controller goes through the run as in :mod:`experiments.simulation.rank_trace`: it aligns the stages by the
    times that it measures, and measures again when they change (for the paper an open question). What that is worth,
    the same run without one of the two tells. Left out: links between stages keep their speed, and a measurement costs
    nothing. ``measured`` is how often the controller has measured its times, ``mean_ranks`` per stage while it
    compressed.
    """
    chosen = scenarios.disturbances
    if chosen is None:
        return
    even = replace(load_model(scenarios.of), gbits=chosen.gbits_per_second)
    run, entropy = rank_trace.edgc_run(scenarios.of), rank_trace.recorded()[chosen.entropy]
    fixed = ("none", *(name for name in scenarios.methods if name != "edgc"))
    for key, case in chosen.cases.items():
        conditions = course(even, case, run.train.iterations)
        traces = {
            name: rank_trace.follow(conditions, entropy, replace(run.edgc, **changes))
            for name, changes in CONTROLLERS.items()
        }
        about = {"case": key, "label": case.label, "gbits_per_second": chosen.gbits_per_second}
        for overlap in (False, True):
            seconds = {name: conditions.mean_seconds(methodcaller("method", name), overlap=overlap) for name in fixed}
            seconds |= {name: trace.mean_seconds(overlap=overlap) for name, trace in traces.items()}
            for name, value in seconds.items():
                row = about | {"overlap": overlap, "method": name, "seconds_step": value}
                row |= {"saved_percent": reduction(value, seconds["none"])}
                if name in traces:
                    row |= {"measured": traces[name].measurements, "mean_ranks": traces[name].mean_ranks}
                yield row


@main_guard
def main(study: Annotated[str, typer.Option()], out: Annotated[Path, typer.Option()]) -> None:
    """Write table.csv (last), break_even.csv, sensitivity.csv and disturbances.csv of a study's scenarios."""
    scenarios = load_scenarios(study)
    check_writable(out)
    tables = {rows.__name__: pd.DataFrame(rows(scenarios)) for rows in (disturbances, sensitivity, break_even, table)}
    for name, frame in tables.items():
        text = frame.assign(kind=KIND).to_csv(index=False, lineterminator="\n", float_format="%.6g")
        atomic_write(out / f"{name}.csv", text)
    print(f"{out}: {' '.join(RESULTS)} ({KIND})")


if __name__ == "__main__":
    typer.run(main)
