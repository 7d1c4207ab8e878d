"""Savings of each method on clusters whose parts are not alike, or whose links are congested for a while. Simulated.

Beside :mod:`experiments.simulation.cost`: the links over which a stage is reduced have a share of the bandwidth, or the
devices of a stage a share of the speed, for the whole run or between two shares of it. EDGC's controller goes through
the run as in :mod:`experiments.simulation.rank_trace`: it aligns the stages by the times that it measures, and measures
again when they change (for the paper an open question). What that is worth, the same run without one of the two tells.
Left out: links between stages keep their speed, and a measurement costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import methodcaller
from typing import Any

import pandas as pd

from edgc.errors import UserError
from experiments.simulation.cluster_model import load_model
from experiments.simulation.cost import KIND, Model, reduction
from experiments.simulation.placement import StageShard
from experiments.simulation.rank_trace import PATH, Course, edgc_run, follow, recorded
from experiments.simulation.scenarios import Case, Scenarios

# What the controller is kept from, by the name of the row.
CONTROLLERS: dict[str, dict[str, Any]] = {
    "edgc": {},
    "edgc_measured_once": {"remeasure_above": None},
    "edgc_unaligned": {"alignment": "off"},
}


@dataclass(frozen=True, kw_only=True)
class Uneven(Model):
    """Stages with a share of the bandwidth for their reductions, and of the speed of the device."""

    links: Sequence[float]
    devices: Sequence[float]

    def link(self, stage: StageShard) -> float:
        return replace(self, gbits=self.gbits * self.links[stage.stage]).bandwidth

    def speed(self, stage: StageShard) -> float:
        return self.devices[stage.stage]


def course(even: Model, case: Case, iterations: int) -> Course:
    """A run of a case: as ``even`` before and after it."""
    ones = [1.0] * len(even.stages)
    values = {field.name: getattr(even, field.name) for field in fields(even)}
    uneven = Uneven(**values, links=case.links or ones, devices=case.devices or ones)
    start, end = round(case.start * iterations), round(case.end * iterations)
    parts = ((0, start, even), (start, end, uneven), (end, iterations, even))
    return Course(tuple((last, model) for first, last, model in parts if last > first))


def table(scenarios: Scenarios) -> pd.DataFrame:
    """One row per case, method and overlap: the mean step over the run, and what it saves of the uncompressed one.

    ``measured`` is how often the controller has measured its times, ``mean_ranks`` per stage while it compressed.

    Raises:
        UserError: an entropy that was not recorded.
    """
    chosen = scenarios.disturbances
    if chosen is None:
        return pd.DataFrame()
    even = replace(load_model(scenarios.of), gbits=chosen.gbits_per_second)
    run, known = edgc_run(scenarios.of), recorded()
    if chosen.entropy not in known:
        fix = f"use one of {', '.join(known)}"
        raise UserError(f"disturbances.entropy = {chosen.entropy!r} was not recorded", where=PATH, fix=fix)
    entropy = known[chosen.entropy]
    rows: list[dict[str, Any]] = []
    for key, case in chosen.cases.items():
        conditions = course(even, case, run.train.iterations)
        traces = {
            name: follow(conditions, entropy, replace(run.edgc, **changes)) for name, changes in CONTROLLERS.items()
        }
        about = {"case": key, "label": case.label, "gbits_per_second": chosen.gbits_per_second}
        for overlap in (False, True):
            fixed = ("none", *(name for name in scenarios.methods if name != "edgc"))
            seconds = {name: conditions.mean_seconds(methodcaller("method", name), overlap=overlap) for name in fixed}
            seconds |= {name: trace.mean_seconds(overlap=overlap) for name, trace in traces.items()}
            for name, step in seconds.items():
                row = about | {"overlap": overlap, "method": name, "seconds_step": step}
                row |= {"saved_percent": reduction(step, seconds["none"])}
                if name in traces:
                    row |= {"measured": traces[name].measurements, "mean_ranks": traces[name].mean_ranks}
                rows.append(row)
    return pd.DataFrame(rows).assign(kind=KIND)
