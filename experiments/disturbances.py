"""Clusters whose parts are not alike, or whose links are congested for a while: what each method saves. Simulated.

Beside :mod:`experiments.cluster_cost`: the links over which a stage is reduced have a share of the bandwidth, or the
devices of a stage a share of the speed, for the whole run or between two shares of it. EDGC's controller goes through
the run as in :mod:`experiments.rank_trace`: it aligns the stages by the times that it measures, and measures again when
they change (for the paper an open question). What that is worth, the same run without one of the two tells. Left out:
links between stages keep their speed, and a measurement costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import pandas as pd

from edgc.errors import UserError
from edgc.policies import Ranks
from experiments import cluster_step, matrix
from experiments.cluster_cost import KIND, Cost, Model, StageCost
from experiments.cluster_model import load_model
from experiments.layouts import FP32_BYTES, StageLayout
from experiments.rank_trace import PATH, Trace, cost_at, follow, recorded
from experiments.scenarios import Case, Scenarios

# What the controller is kept from, by the name of the row.
CONTROLLERS: dict[str, dict[str, Any]] = {
    "edgc": {},
    "edgc_measured_once": {"remeasure_above": None},
    "edgc_unaligned": {"alignment": "off"},
}


@dataclass(frozen=True)
class Uneven(Model):
    """Stages with a share of the bandwidth for their reductions, and of the speed of the device."""

    links: tuple[float, ...] = ()
    devices: tuple[float, ...] = ()

    def _on(self, stage: StageLayout, cost: Callable[[Model], Cost]) -> Cost:
        fields = (self.shape, self.stages, self.cluster, self.sharing, self.micro_batches, self.micro_batch)
        found = cost(Model(*fields, self.gbits * self.links[stage.stage]))
        return replace(found, compress=found.compress / self.devices[stage.stage])

    def none(self, stage: StageLayout) -> Cost:
        return self._on(stage, lambda model: model.none(stage))

    def bf16(self, stage: StageLayout) -> Cost:
        return self._on(stage, lambda model: model.bf16(stage))

    def quantised(self, stage: StageLayout, bits: int) -> Cost:
        return self._on(stage, lambda model: model.quantised(stage, bits))

    def topk(self, stage: StageLayout) -> Cost:
        return self._on(stage, lambda model: model.topk(stage))

    def powersgd(
        self, stage: StageLayout, rank: int, *, always: bool = False, factor_bytes: int = FP32_BYTES
    ) -> Cost:
        return self._on(
            stage, lambda model: model.powersgd(stage, rank, always=always, factor_bytes=factor_bytes)
        )

    def speed(self, stage: StageLayout) -> float:
        return self.devices[stage.stage]


@dataclass(frozen=True)
class Course:
    """What a run meets: models, each with the iteration up to which it holds."""

    parts: tuple[tuple[int, Model], ...]

    @property
    def iterations(self) -> int:
        return self.parts[-1][0]

    def at(self, iteration: int) -> Model:
        return next(model for end, model in self.parts if iteration <= end)

    def mean_seconds(self, method: Callable[[Model], StageCost], *, overlap: bool) -> float:
        """Of a step with a method that does not change."""
        total, before = 0.0, 0
        for end, model in self.parts:
            seconds = cluster_step.step(model, method(model), overlap=overlap).seconds
            total, before = total + (end - before) * seconds, end
        return total / self.iterations

    def mean_seconds_of(self, trace: Trace, *, overlap: bool) -> float:
        """Of a step of a run whose ranks changed."""
        total = 0.0
        for start, end, ranks, model in self._pieces(trace):
            seconds = cluster_step.step(model, partial(cost_at, model, ranks), overlap=overlap).seconds
            total += (end - start + 1) * seconds
        return total / self.iterations

    def _pieces(self, trace: Trace) -> Iterator[tuple[int, int, Ranks, Model]]:
        """(first iteration, last one, ranks, model), where neither ranks nor the model change."""
        cuts = sorted({start for start, _, _ in trace.moves} | {end + 1 for end, _ in self.parts})
        moves = list(trace.moves)
        for start, after in pairwise(cuts):
            while len(moves) > 1 and moves[1][0] <= start:
                moves.pop(0)
            yield start, after - 1, moves[0][2], self.at(start)


def course(even: Model, case: Case, iterations: int) -> Course:
    """A run of a case: as ``even`` before and after it."""
    stages = len(even.stages)
    fields = (even.shape, even.stages, even.cluster, even.sharing, even.micro_batches, even.micro_batch)
    uneven = Uneven(
        *fields,
        even.gbits,
        links=tuple(case.links or [1.0] * stages),
        devices=tuple(case.devices or [1.0] * stages),
    )
    ends = ((case.start, even), (case.end, uneven), (1.0, even))
    parts = [(round(share * iterations), model) for share, model in ends]
    found: list[tuple[int, Model]] = []
    for end, model in parts:
        if end > (found[-1][0] if found else 0):
            found.append((end, model))
    return Course(tuple(found))


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
    run = next(run for run in matrix.runs(scenarios.of, "paper") if run.edgc.method == "edgc")
    known, iterations = recorded(), run.train.iterations
    if chosen.entropy not in known:
        fix = f"use one of {', '.join(known)}"
        raise UserError(f"disturbances.entropy = {chosen.entropy!r} was not recorded", where=PATH, fix=fix)
    entropy = known[chosen.entropy]
    rows: list[dict[str, Any]] = []
    for key, case in chosen.cases.items():
        met = course(even, case, iterations)
        traces = {
            name: follow(met.at, entropy, replace(run.edgc, **changes), iterations)
            for name, changes in CONTROLLERS.items()
        }
        about = {"case": key, "label": case.label, "gbits_per_second": chosen.gbits_per_second}
        for overlap in (False, True):
            base = met.mean_seconds(lambda model: model.none, overlap=overlap)
            for name in ("none", *(name for name in scenarios.methods if name != "edgc")):
                seconds = met.mean_seconds(partial(_method, name), overlap=overlap)
                rows.append(about | {"overlap": overlap, "method": name} | _saved(seconds, base))
            for name, trace in traces.items():
                seconds = met.mean_seconds_of(trace, overlap=overlap)
                ranks = "/".join(f"{trace.mean_rank(stage.stage):.4g}" for stage in even.stages)
                row = about | {"overlap": overlap, "method": name} | _saved(seconds, base)
                rows.append(row | {"measured": trace.measurements, "mean_ranks": ranks})
    return pd.DataFrame(rows).assign(kind=KIND)


def _method(name: str, model: Model) -> StageCost:
    return model.methods(edgc=False)[name][1]


def _saved(seconds: float, base: float) -> dict[str, float]:
    return {"seconds_step": seconds, "saved_percent": 100 * (1 - seconds / base)}
