"""The ranks that EDGC would take on a described cluster: training's own controller, fed with recorded entropies.

The controller (:class:`edgc.control.controller.Controller`) has the settings of the study's EDGC run. It is told the
entropy that a small run had at the same share of its training, and the seconds of a reduction and of backward by
:mod:`experiments.simulation.cost`; so it searches r_max, ends warm-up, moves stage 0 and aligns the other stages as it
would there. Two things are assumed: that the entropy of a large model moves over a run as that of a model of a million
parameters did, and that the network does not change.

``recorded_entropy.csv`` has the entropies: of every variant of study ``entropy_trend`` at workstation scale the first
seed, for a mean over seeds would be smoother than what a controller sees.

These runs were not compressed, so their entropies lie before any decision; no run of EDGC in which the paper's rule of
stable entropy was on is kept at that scale. The rule itself is on, with the settings of the study. It compares
consecutive windows, which in the paper are a 230th of the run, and a recorded entropy is a line between 41 points; so
it holds at once or nearly so. In this project's runs of EDGC on such small models a window is a twentieth of the run,
and with that it holds later: :func:`late_table` begins to compress only then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.controller import Controller
from edgc.control.policies.base import Ranks
from edgc.control.settings import PolicyConfig
from edgc.measurement.report import Report
from experiments.simulation.cost import KIND, Cost, Model, StageCost, forward_seconds, reduction, step
from experiments.simulation.placement import StageShard
from experiments.spec import matrix
from experiments.spec.settings import RunConfig

PATH = Path(__file__).with_name("recorded_entropy.csv")
SMALL_WINDOWS = 20  # in a run of EDGC at workstation scale: 20 iterations of 400


@dataclass(frozen=True)
class Recorded:
    """Entropy in nats, measured at shares of a run, ascending in (0, 1]."""

    shares: tuple[float, ...]
    entropy: tuple[float, ...]

    def mean(self, start: float, end: float) -> float:
        """Mean of the line through what was measured, between two shares of a run; before the first as at the first."""
        inside = [share for share in self.shares if start < share < end]
        at = [start, *inside, end]
        return float(np.trapezoid(np.interp(at, self.shares, self.entropy), at) / (end - start))


def recorded() -> dict[str, Recorded]:
    """The entropies of ``recorded_entropy.csv``, by the run that they are of."""
    runs = pd.read_csv(PATH).groupby("run", sort=False)
    return {str(name): Recorded(tuple(rows["share"]), tuple(rows["entropy"])) for name, rows in runs}


@dataclass(frozen=True)
class Course:
    """Conditions of a run: models of the same stages, each with the iteration up to which it holds."""

    parts: tuple[tuple[int, Model], ...]

    @property
    def iterations(self) -> int:
        return self.parts[-1][0]

    @property
    def stages(self) -> tuple[StageShard, ...]:
        return self.parts[0][1].stages

    def part(self, iteration: int) -> int:
        """Index of the part that holds at an iteration."""
        return next(index for index, (end, _) in enumerate(self.parts) if iteration <= end)

    def mean_seconds(self, method: Callable[[Model], StageCost], *, overlap: bool) -> float:
        """Mean of a step with a method that does not change."""
        total, start = 0.0, 0
        for end, model in self.parts:
            total += (end - start) * step(model, method(model), overlap=overlap).seconds
            start = end
        return total / self.iterations


@dataclass(frozen=True)
class Trace:
    """Decisions of the controller in the course of a run.

    Attributes:
        spent: (part of the course, ranks of all stages; None: uncompressed) -> iterations.
        r_min, r_max: at the end; None where nothing is compressed.
        measurements: how often the times of reductions were measured.
    """

    course: Course
    spent: Mapping[tuple[int, Ranks], int]
    r_min: int | None
    r_max: int | None
    measurements: int = 1

    def share(self, stage: int, rank: int | None) -> float:
        """Share of the run that ``stage`` spent at ``rank``."""
        at_rank = sum(count for (_, ranks), count in self.spent.items() if ranks[stage] == rank)
        return at_rank / self.course.iterations

    def mean_rank(self, stage: int) -> float:
        """Mean while ``stage`` compressed; nan if it never did."""
        used = [(rank, count) for (_, ranks), count in self.spent.items() if (rank := ranks[stage]) is not None]
        total = sum(count for _, count in used)
        return sum(rank * count for rank, count in used) / total if total else float("nan")

    @property
    def mean_ranks(self) -> str:
        """Mean rank of each stage, as text."""
        return "/".join(f"{self.mean_rank(stage.stage):.4g}" for stage in self.course.stages)

    def mean_cost(self, stage: StageShard) -> Cost:
        """Mean cost of a stage's reduction, over the whole run."""
        costs = [
            cost_at(self.course.parts[part][1], ranks, stage).times(count / self.course.iterations)
            for (part, ranks), count in self.spent.items()
        ]
        return sum(costs, Cost(0.0, 0.0))

    def mean_seconds(self, *, overlap: bool) -> float:
        """Mean length of a step, over the whole run."""
        total = 0.0
        for (part, ranks), count in self.spent.items():
            model = self.course.parts[part][1]
            total += count * step(model, partial(cost_at, model, ranks), overlap=overlap).seconds
        return total / self.course.iterations


def follow(course: Course, entropy: Recorded, config: EDGCConfig) -> Trace:
    """Take a controller through a run."""
    iterations = course.iterations
    controller = make_controller(config, [stage.matrices for stage in course.stages], iterations)
    spent: Counter[tuple[int, Ranks]] = Counter()
    iteration, measurements = 1, 0
    while iteration <= iterations:
        plan, part = controller.plan(iteration), course.part(iteration)
        part_end, model = course.parts[part]
        last = iteration  # with this plan
        if plan.exchange:
            # The window's samples up to here.
            start = (iteration - 1) // config.window * config.window
            value = entropy.mean(start / iterations, iteration / iterations)
            decision = controller.observe(iteration, report(model, controller, iteration, value))
            measurements += decision is not None and bool(decision.timing)
        else:
            # Nothing is timed or decided before the window ends or the search for r_max begins.
            end = -(-iteration // config.window) * config.window
            if isinstance(config, PolicyConfig) and iteration < config.search_start:
                end = min(end, config.search_start)
            last = max(iteration, min(end - 1, part_end))
        spent[part, plan.ranks] += last - iteration + 1
        iteration = last + 1
    return Trace(course, spent, controller.r_min, controller.r_max, measurements)


def report(model: Model, controller: Controller, iteration: int, entropy: float) -> Report:
    """Report that training on the cluster would give the controller."""
    plan, stages = controller.plan(iteration), model.stages
    ratio = model.cluster.compute.backward_ratio.value

    def timed(ranks: Sequence[int]) -> tuple[float, ...]:
        """Seconds of a timed reduction: at rank 0 an uncompressed one; otherwise every matrix is factored."""
        costs = (
            model.powersgd(s, rank, always=True) if rank else model.none(s)
            for s, rank in zip(stages, ranks, strict=True)
        )
        return tuple(cost.seconds for cost in costs)

    return Report(
        (entropy,) * len(stages),
        probe_seconds=None if plan.probe_rank is None else timed([plan.probe_rank] * len(stages)),
        backward_seconds=tuple(ratio * forward_seconds(model, stage) for stage in stages),
        reduction_seconds=timed([rank or 0 for rank in plan.ranks]) if controller.watches(iteration) else None,
    )


def cost_at(model: Model, ranks: Ranks, stage: StageShard) -> Cost:
    """Cost of a stage's reduction at these ranks, one a stage."""
    rank = ranks[stage.stage]
    return model.none(stage) if rank is None else model.powersgd(stage, rank)


def stable_after(entropy: Recorded, config: PolicyConfig, windows: int) -> float:
    """Share of the run after which warm-up ends by the rule of ``config`` if the run has so many windows."""
    previous = None
    for window in range(1, windows + 1):
        value = entropy.mean((window - 1) / windows, window / windows)
        if config.warm_up_ends(windows, window, previous, value, measuring=False)[0]:
            return window / windows
        previous = value
    return 1.0


def edgc_run(study: str) -> RunConfig:
    """The run with EDGC of a paper-scale study."""
    return next(run for run in matrix.runs(study, "paper") if run.edgc.method == "edgc")


def table(study: str, models: Sequence[Model]) -> list[dict[str, Any]]:
    """A row per bandwidth and recorded entropy of a study's EDGC run."""
    return _rows(study, models, lambda config, entropy: config)


def late_table(study: str, models: Sequence[Model]) -> list[dict[str, Any]]:
    """The same where warm-up ends as it would with windows of a twentieth of the run."""

    def later(config: PolicyConfig, entropy: Recorded) -> PolicyConfig:
        share = stable_after(entropy, config, SMALL_WINDOWS)
        return replace(config, warmup_fraction=share, warmup_limit_fraction=max(share, config.warmup_limit_fraction))

    return _rows(study, models, later)


def _rows(
    study: str, models: Sequence[Model], settings: Callable[[PolicyConfig, Recorded], PolicyConfig]
) -> list[dict[str, Any]]:
    run = edgc_run(study)
    assert isinstance(run.edgc, PolicyConfig)
    # The network of the model does not change.
    config, iterations = replace(run.edgc, remeasure_above=None), run.train.iterations
    rows: list[dict[str, Any]] = []
    for at in models:
        dense = at.slowest(at.none)
        base = {overlap: step(at, at.none, overlap=overlap).seconds for overlap in (False, True)}
        silent = step(at, lambda _: Cost(0.0, 0.0), overlap=False).seconds
        for name, entropy in recorded().items():
            trace = follow(Course(((iterations, at),)), entropy, settings(config, entropy))
            slowest = at.slowest(trace.mean_cost)
            seconds = {overlap: trace.mean_seconds(overlap=overlap) for overlap in (False, True)}
            saved = {
                "communication": reduction(slowest.communication, dense.communication),
                "with_compress": reduction(slowest.seconds, dense.seconds),
                "exposed": reduction(seconds[False] - silent, base[False] - silent),
                "time": reduction(seconds[False], base[False]),
                "time_overlap": reduction(seconds[True], base[True]),
            }
            rows.append(
                {"entropy": name, "gbits_per_second": f"{at.gbits:g}"}
                | {"r_min": trace.r_min, "r_max": trace.r_max, "mean_ranks": trace.mean_ranks}
                | {"share_uncompressed": f"{trace.share(0, None):.6g}"}
                | {"bytes": round(slowest.bytes), "seconds_communication": f"{slowest.communication:.9g}"}
                | {"seconds_compress": f"{slowest.compress:.9g}"}
                | {f"reduction_{part}_percent": f"{percent:.4f}" for part, percent in saved.items()}
                | {"kind": KIND}
            )
    return rows
