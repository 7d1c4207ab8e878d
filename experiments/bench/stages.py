"""When each pipeline stage finishes its reductions: without compression, with equal ranks and with DAC.

All stages have links of an injected bandwidth (:mod:`experiments.bench.collectives`), stage 0 a slower one. What DAC is
to bring about is that stages finish together; the spread of an iteration is the time between the first and the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.bench import children, timeline
from experiments.bench.children import Group
from experiments.bench.options import at_least
from experiments.bench.testbed import Testbed

MODULE = "experiments.bench.stages_worker"
SECONDS = 1800.0  # for all steps of one variant
WINDOW = 4
VARIANTS = ("none", "equal", "dac")


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    pipeline: int = 4  # stages
    data: int = 2  # replicas
    rank: int = 8  # of stage 0 under compression, and of all stages without DAC
    megabytes: float = 1.0  # injected bandwidth in MB/s
    slowdown: float = 2.0  # by what factor stage 0's link is slower
    steps: int = 20  # iterations that are counted, per variant
    layers_per_stage: int = 2
    hidden: int = 64
    sequence: int = 32
    micro_batches: int = 8

    def __post_init__(self) -> None:
        at_least(1, rank=self.rank, slowdown=self.slowdown)
        at_least(2, pipeline=self.pipeline, data=self.data)
        at_least(3, steps=self.steps)
        at_least(0.01, megabytes=self.megabytes)

    @property
    def bandwidths(self) -> list[float]:
        """Injected, per stage, in bytes per second."""
        first = self.megabytes / self.slowdown
        return [1e6 * value for value in (first, *[self.megabytes] * (self.pipeline - 1))]


def settings(plan: Plan, variant: str) -> dict[str, Any]:
    """The run of a variant, as :class:`experiments.spec.settings.RunConfig` takes it."""
    compression: dict[str, Any] = {"method": "none"}
    warm_up = WINDOW
    if variant != "none":
        compression = {
            "method": "edgc",
            "policy": "fixed",
            "rank": plan.rank,
            "window": WINDOW,
            "warmup_fraction": 0.0,
            "stability_tolerance": 10.0,
            "remeasure_above": None,  # the injected links do not change
            "entropy": {"iteration_rate": 0.25},
        }
        if variant == "dac":
            compression |= {"alignment": "measured", "search_start": 2}
        # DAC first times half a dozen ranks twice; without it warm-up is over after two windows.
        warm_up = (5 if variant == "dac" else 2) * WINDOW
    model = {"layers": plan.layers_per_stage * plan.pipeline, "hidden": plan.hidden, "sequence_length": plan.sequence}
    parallel = {"pipeline": plan.pipeline, "data": plan.data}
    batch = {"micro_batch": 2, "global_batch": 2 * plan.micro_batches * plan.data}
    return run_settings("stages", variant, model, parallel, batch | {"iterations": warm_up + plan.steps}, compression)


def run_settings(
    study: str,
    variant: str,
    model: Mapping[str, int],
    parallel: Mapping[str, int],
    train: Mapping[str, int],
    compression: Mapping[str, Any],
) -> dict[str, Any]:
    """A run of a benchmark, as :class:`experiments.spec.settings.RunConfig` takes it."""
    schedule = {"lr": 1e-3, "lr_warmup_fraction": 0.1, "eval_interval": train["iterations"], "eval_batches": 1}
    run = {"scale": "bench", "study": study, "variant": variant, "label": variant, "seed": 1}
    run |= {"model": {"heads": 4, **model}, "parallel": parallel}
    return run | {"train": {**train, **schedule}, "compression": compression}


@dataclass(frozen=True)
class Found:
    """What was measured.

    Attributes:
        iterations: one row per variant, counted iteration and stage, see :func:`rows`.
        decisions: of the controller, per variant.
        shares, spans: timelines of the counted iterations, see :func:`experiments.bench.timeline.collect`.
    """

    iterations: pd.DataFrame
    decisions: dict[str, list[dict[str, Any]]]
    shares: pd.DataFrame
    spans: pd.DataFrame


def measure(plan: Plan, advance: Callable[[str], None]) -> Found:
    """Train all variants one after another."""
    tables, shares, spans = [], [], []
    decisions: dict[str, list[dict[str, Any]]] = {}
    with ranks(plan.pipeline * plan.data) as group:
        advance("started")
        for variant in VARIANTS:
            request = {"do": "train", "run": settings(plan, variant), "bandwidths": plan.bandwidths}
            answers = group.ask(request, SECONDS)
            counted = rows(variant, answers).groupby("stage").tail(plan.steps)
            share, span = timeline.collect(variant, answers, sorted(set(counted["iteration"])))
            tables.append(counted)
            shares.append(share)
            spans.append(span)
            decisions[variant] = answers[0]["decisions"]
            advance(variant)
    iterations, every, shown = (pd.concat(parts, ignore_index=True) for parts in (tables, shares, spans))
    return Found(iterations, decisions, every, shown)


def ranks(world: int, testbed: Testbed | None = None) -> AbstractContextManager[Group]:
    """One process per rank, each on a host of ``testbed`` if there is one, joined to a process group."""
    return children.ranks(MODULE, world, testbed=testbed)


def rows(variant: str, answers: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """One row per steady iteration and stage.

    Columns: ``variant``, ``iteration``, ``stage``, ``rank`` (empty: uncompressed), ``finish_seconds`` after the first
    stage of that iteration (a stage is over when all its replicas are), ``step_seconds``.
    """
    found = [
        {"variant": variant, "stage": answer["stage"], **iteration, "spans": None}
        for answer in answers
        for iteration in answer["iterations"]
        if iteration["steady"]
    ]
    stages = pd.DataFrame(found).groupby(["variant", "iteration", "stage"], as_index=False)
    stages = stages.agg(rank=("rank", "first"), finished=("finished", "max"), step_seconds=("seconds", "max"))
    first = stages.groupby("iteration")["finished"].transform("min")
    stages["finish_seconds"] = stages.pop("finished") - first
    return stages


def table(found: pd.DataFrame) -> pd.DataFrame:
    """One row per variant: median and quartiles of the spread of the stages' finish times, and its share of that
    with equal ranks."""
    made = []
    for variant, own in found.groupby("variant", sort=False):
        last = own.groupby("stage").tail(1).sort_values("stage")
        iterations = own.groupby("iteration")
        spread = iterations["finish_seconds"].max()
        made.append(
            {
                "variant": variant,
                "iterations": len(spread),
                "ranks": "/".join("dense" if pd.isna(rank) else f"{rank:.0f}" for rank in last["rank"]),
                "spread_seconds": spread.median(),
                "spread_q1": spread.quantile(0.25),
                "spread_q3": spread.quantile(0.75),
                "step_seconds": iterations["step_seconds"].max().median(),
            }
        )
    result = pd.DataFrame(made)
    equal = result.loc[result["variant"] == "equal", "spread_seconds"].iloc[0]
    return result.assign(of_equal=result["spread_seconds"] / equal)
