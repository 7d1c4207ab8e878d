"""Where low-rank compression pays beyond the paper's clusters, and on which assumption that hangs. Simulated.

``python -m experiments.simulation.break_even --study break_even --out results/ci/break_even`` writes ``table.csv``
(step time saved by cluster, method, bandwidth and overlap), ``break_even.csv`` (bandwidth up to which a share of the
step is saved), ``sensitivity.csv`` (what is saved when one assumption is changed) and ``disturbances.csv`` (where
stages or links differ).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import typer

from experiments.common.cli import main_guard
from experiments.common.files import check_writable
from experiments.common.written_tables import write_text
from experiments.simulation import cluster_step, disturbances
from experiments.simulation.cost import KIND, Model, reduction
from experiments.simulation.scenarios import Scenarios, load_scenarios, model_of

RESULTS = ("table.csv", "break_even.csv", "sensitivity.csv", "disturbances.csv")
SAVED = (1.0, 5.0, 16.13)  # percent of the step; the last is the paper's claim
LEAST, MOST = 1e-2, 1e5  # Gbit/s between which break-even is looked for
PRECISION = 1.02


class Point(NamedTuple):
    """A method's mean step, seconds, and percent saved of the uncompressed one with as much overlap."""

    seconds: float
    saved: float


def points(model: Model, names: Sequence[str], *, overlap: bool) -> dict[str, Point]:
    """By method."""
    base = cluster_step.step(model, model.none, overlap=overlap).seconds
    seconds = {name: cluster_step.of_method(model, name, overlap=overlap, base=base)[1] for name in names}
    return {name: Point(value, reduction(value, base)) for name, value in seconds.items()}


def table(scenarios: Scenarios) -> pd.DataFrame:
    """One row per cluster, bandwidth, overlap and method."""
    rows: list[dict[str, Any]] = []
    for key, cluster in scenarios.clusters.items():
        for gbits in cluster.gbits_per_second:
            model = model_of(scenarios.of, cluster, gbits)
            ranks = {name: rank for name, (rank, _) in model.methods().items()}
            of = {"cluster": key, "label": cluster.label, "gpus": model.shape.world}
            of |= {"link": "sites" if cluster.sites else "node", "gbits_per_second": gbits}
            for overlap in (False, True):
                for name, found in points(model, ("none", *scenarios.methods), overlap=overlap).items():
                    row = {"overlap": overlap, "method": name, "rank": ranks[name]}
                    rows.append(of | row | {"seconds_step": found.seconds, "saved_percent": found.saved})
    return pd.DataFrame(rows).assign(kind=KIND)


def break_even(scenarios: Scenarios) -> pd.DataFrame:
    """Gbit/s up to which a method saves a share of the step; empty where it does not even at 10 Mbit/s, infinite where
    it still does at 100 Tbit/s."""
    rows: list[dict[str, Any]] = []
    for key, cluster in scenarios.clusters.items():
        model = model_of(scenarios.of, cluster, cluster.reference)
        for overlap in (False, True):
            for name in scenarios.methods:
                saved = partial(saved_at, model, name, overlap)
                for percent in SAVED:
                    gbits = boundary(saved, percent)
                    row = {"cluster": key, "label": cluster.label, "overlap": overlap, "method": name}
                    rows.append(row | {"saved_percent": percent, "gbits_per_second": gbits})
    return pd.DataFrame(rows).assign(kind=KIND)


def saved_at(model: Model, name: str, overlap: bool, gbits: float) -> float:
    """Percent of the step that a method saves at another bandwidth."""
    return points(replace(model, gbits=gbits), [name], overlap=overlap)[name].saved


def boundary(saved: Callable[[float], float], percent: float) -> float | None:
    """The bandwidth from which on less than ``percent`` is saved, to 2 %, given what is saved by bandwidth.

    Bisection, as what is saved falls with the bandwidth; None and infinity beyond the ends.
    """
    if saved(LEAST) < percent:
        return None
    if saved(MOST) >= percent:
        return math.inf
    low, high = LEAST, MOST
    while high / low > PRECISION:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if saved(middle) >= percent else (low, middle)
    return low


class Assumption(NamedTuple):
    """A changed model, with how to say what was changed."""

    name: str
    value: str
    change: Callable[[Model], Model]


def assumptions() -> Iterator[tuple[Assumption, Assumption]]:
    """Each assumption at a low and a high value."""

    def of(section: str, key: str, low: float, high: float, *, times: bool = True) -> tuple[Assumption, Assumption]:
        def change(factor: float) -> Callable[[Model], Model]:
            def changed(model: Model) -> Model:
                value = getattr(getattr(model.cluster, section), key).value * factor if times else factor
                return replace(model, cluster=model.cluster.assuming(section, key, value))

            return changed

        sign = "x" if times else ""
        found = [Assumption(key, f"{sign}{value:g}", change(value)) for value in (low, high)]
        return found[0], found[1]

    yield of("compute", "step_efficiency", 0.3, 0.7, times=False)
    yield of("compute", "backward_ratio", 2.0, 3.0, times=False)
    yield of("compute", "bucket_elements", 0.25, 4.0)
    yield of("network", "latency_seconds", 0.25, 4.0)
    yield of("gpu", "gemm_efficiency", 0.25, 0.9, times=False)
    yield of("gpu", "memory_efficiency", 0.4, 0.9, times=False)
    yield of("gpu", "orthogonalise_efficiency", 0.25, 4.0)
    yield of("gpu", "seconds_per_matrix", 0.25, 4.0)
    yield of("methods", "mean_rank_position", 0.0, 1.0, times=False)

    def batches(factor: float) -> Callable[[Model], Model]:
        return lambda model: replace(model, micro_batches=max(1, round(model.micro_batches * factor)))

    low, high = (Assumption("micro_batches", f"x{factor:g}", batches(factor)) for factor in (0.25, 4.0))
    yield low, high


def sensitivity(scenarios: Scenarios) -> pd.DataFrame:
    """Percent of the step saved at the reference bandwidth: as assumed, and with each assumption low and high."""
    rows: list[dict[str, Any]] = []
    for key, cluster in scenarios.clusters.items():
        model = model_of(scenarios.of, cluster, cluster.reference)
        of = {"cluster": key, "label": cluster.label, "gbits_per_second": cluster.reference}
        for overlap in (False, True):
            base = points(model, scenarios.methods, overlap=overlap)
            for pair in assumptions():
                low, high = (points(a.change(model), scenarios.methods, overlap=overlap) for a in pair)
                values = {"assumption": pair[0].name, "low": pair[0].value, "high": pair[1].value}
                for name in scenarios.methods:
                    row = of | {"overlap": overlap, "method": name} | values
                    row |= {"saved_percent": base[name].saved, "saved_percent_low": low[name].saved}
                    rows.append(row | {"saved_percent_high": high[name].saved})
    return pd.DataFrame(rows).assign(kind=KIND)


@main_guard
def main(study: Annotated[str, typer.Option()], out: Annotated[Path, typer.Option()]) -> None:
    """Write table.csv (last), break_even.csv, sensitivity.csv and disturbances.csv of a study's scenarios."""
    scenarios = load_scenarios(study)
    check_writable(out)
    parts = {"disturbances": disturbances.table, "sensitivity": sensitivity, "break_even": break_even}
    for name, make in (*parts.items(), ("table", table)):
        text = make(scenarios).to_csv(index=False, lineterminator="\n", float_format="%.6g")
        write_text(out / f"{name}.csv", text)
    print(f"{out}: table.csv break_even.csv sensitivity.csv disturbances.csv ({KIND})")


if __name__ == "__main__":
    typer.run(main)
