"""Compare predicted with measured steps of two pipeline stages with two replicas each, every rank on a host of the
testbed (root only): pipeline.csv, pipeline_rounds.csv, pipeline_probes.csv, pipeline.json.

Megatron trains; activations and gradients share the limited cable of their host. Calibrated without a limit at two
numbers of micro-batches; predicted under limits at others. Of a limited link nothing is used but messages timed by
themselves, as in :mod:`experiments.bench.steps`. A stage that sends activations or their gradients waits until they
have gone, as Megatron's schedule does on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field
from scipy.optimize import brentq

from experiments.bench import stages, steps, terminal
from experiments.bench.collectives import ALL_REDUCE, KINDS, SEND, total_bytes
from experiments.bench.steps import (
    FREE,
    Links,
    Measurements,
    Messages,
    based_on,
    compared,
    links_of,
    messages_of,
    probe,
)
from experiments.bench.terminal import Advance, Positive, Rate
from experiments.bench.testbed import Testbed
from experiments.bench.workers import ranks
from experiments.simulation.iteration_model import Bucket, Stage, iterate

ON_TESTBED = True
SHOWN = "mbit_per_s micro_batches method used"
VALUES = "seconds seconds_predicted error"
record = steps.record
STAGES, REPLICAS = 2, 2
LAYOUT = f"DP{REPLICAS} x PP{STAGES}"
VOCABULARY = 256  # of the worker's text
WARM_UP = 2  # iterations that are not counted
SECONDS = 600.0
CALIBRATED = (4, 12)  # micro-batches at which the work of a step is measured
# fp32 entries, around what the steps send; more than a token bucket lets through at once after a pause.
PROBES = dict.fromkeys(KINDS, (1 << 15, 1 << 17, 1 << 19)) | {SEND: (1 << 14, 1 << 16, 1 << 18)}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "bf16": {"method": "bf16"},
    "powersgd_r4": {"method": "powersgd", "rank": 4},
    "powersgd_r16": {"method": "powersgd", "rank": 16},
    "powersgd_r32_int8": {"method": "powersgd", "rank": 32, "factor_dtype": "int8"},
    "int8": {"method": "quantize", "bits": 8},
}


class Plan(terminal.Plan):
    """Settings of the benchmark."""

    rates: tuple[Rate, ...] = Field((20.0, 50.0, 200.0), description="limits in Mbit/s, with commas")
    micro_batches: tuple[Annotated[int, Field(ge=STAGES)], ...] = Field(
        (2, 8), description="of a replica in a step, to be predicted, with commas"
    )
    rounds: Positive = Field(9, alias="repeats", description="counted iterations of each run")
    layers: int = 4
    hidden: int = 128
    sequence: int = 64
    micro_batch: int = 2

    @property
    def configurations(self) -> list[tuple[float, int, str]]:
        """Limit, micro-batches and method of every run, those that calibrate first."""
        free = [(FREE, count, name) for count in CALIBRATED for name in METHODS]
        limited = [(rate, count, name) for rate in self.rates for count in self.micro_batches for name in METHODS]
        return [*free, *limited]

    @property
    def turns(self) -> int:
        """Number of runs."""
        return len(self.configurations)


def settings(plan: Plan, method: str, micro_batches: int) -> dict[str, Any]:
    """A run, as :class:`experiments.spec.settings.RunConfig` takes it."""
    model = {"layers": plan.layers, "hidden": plan.hidden, "sequence_length": plan.sequence}
    train = {"iterations": WARM_UP + plan.rounds, "micro_batch": plan.micro_batch}
    train |= {"global_batch": plan.micro_batch * micro_batches * REPLICAS}
    parallel = {"pipeline": STAGES, "data": REPLICAS}
    return stages.run_settings("pipeline_steps", method, model, parallel, train, METHODS[method])


def measure(plan: Plan, folder: Path, advance: Advance) -> Measurements:
    """Run everything in a testbed of its own. UserError if none can be made."""
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    sent: dict[str, Any] = {}
    limit = None
    world = STAGES * REPLICAS
    with Testbed(world) as testbed, ranks(stages.Rank, world, testbed=testbed) as group:
        for rate, count, name in plan.configurations:
            if rate != limit:
                testbed.limit(rate or None)
                limit = rate
                probes += [{"mbit_per_s": rate} | row for row in probe(group, PROBES, REPLICAS, stages=STAGES)]
            run = settings(plan, name, count)
            answers = group.ask("train", within=SECONDS, run=run, bandwidths=[None] * STAGES)
            place = {"mbit_per_s": rate, "micro_batches": count, "method": name}
            rounds += [place | row for row in iteration_rows(answers)]
            if rate == FREE:
                last = {answer["stage"]: answer["iterations"][-1]["messages"] for answer in answers}
                sent[name] = [last[stage] for stage in range(STAGES)]
            advance(f"{LAYOUT}, {rate:g} Mbit/s, {name}")
    return Measurements(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


def iteration_rows(answers: list[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    """The slowest rank's seconds of every counted iteration, and per stage the median time of a micro-batch."""
    for index in range(WARM_UP, len(answers[0]["iterations"])):
        iterations = [(answer["stage"], answer["iterations"][index]) for answer in answers]
        row: dict[str, Any] = {"round": index - WARM_UP}
        row["seconds"] = max(iteration["seconds"] for _, iteration in iterations)
        for kind, stage in itertools.product(("forward", "backward"), range(STAGES)):
            spans = [span for place, iteration in iterations if place == stage for span in iteration["spans"]]
            times = [end - start for name, start, end in spans if name == f"{kind}-compute"]
            row[f"{kind}_{stage}"] = float(pd.Series(times).median())
        yield row


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Work of a step.

    Attributes:
        forward, backward: seconds of a micro-batch, per stage.
        beside: seconds that a stage takes for a micro-batch beside these: code between the passes, and waiting for
            a core where there are fewer than ranks.
        rest: seconds after the gradients are averaged, without messages: gradient norm and optimizer.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    beside: float = 0.0
    rest: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of a step.

    Attributes:
        activations: of one micro-batch between two stages, and as many back.
        sent: per stage, what a rank sends to average its gradients.
        embedding: bytes that a rank of the end stages sends in the all-reduce of the tied embedding's gradients.
    """

    activations: float
    sent: Messages
    embedding: float = 0.0


def predict(compute: Compute, traffic: Traffic, links: Links, micro_batches: int, overhead: float = 0.0) -> float:
    """Seconds of a step under 1F1B whose gradients are averaged after backward.

    Args:
        links: between replicas by the kind of collective, between stages ``SEND``.
        overhead: seconds of the processor that averaging takes, beside its messages.

    Raises:
        ValueError: compute and traffic differ in their number of stages.
    """
    if not len(compute.forward) == len(compute.backward) == len(traffic.sent):
        raise ValueError(f"{len(traffic.sent)} stages send, but {len(compute.forward)} compute")
    between = links[SEND].seconds(traffic.activations)
    last = len(compute.forward) - 1
    stages = tuple(
        Stage(
            forward=forward + compute.beside / 2 + (between if index < last else 0.0),
            backward=backward + compute.beside / 2 + (between if index > 0 else 0.0),
            buckets=(Bucket(compress=overhead, messages=messages_of(sent, links)),),
        )
        for index, (forward, backward, sent) in enumerate(
            zip(compute.forward, compute.backward, traffic.sent, strict=True)
        )
    )
    after = compute.rest + (links[ALL_REDUCE].seconds(traffic.embedding) if traffic.embedding else 0.0)
    return iterate(stages, micro_batches, after=after).seconds


def compute_of(rounds: pd.DataFrame, traffic: Traffic, links: Links) -> Compute:
    """Work of the steps in ``rounds``, which have :data:`CALIBRATED` micro-batches.

    Passes and what a micro-batch takes beside them (told by the two numbers of micro-batches) are medians over all
    methods, which do not differ in them; the rest is what these leave of an uncompressed step.
    """
    forward, backward = (
        tuple(float(rounds[f"{kind}_{stage}"].median()) for stage in range(STAGES)) for kind in ("forward", "backward")
    )
    few, many = CALIBRATED
    seconds = rounds.groupby(["method", "micro_batches"])["seconds"].median().unstack()
    added = float((seconds[many] - seconds[few]).median())

    passes = Compute(forward=forward, backward=backward)

    def missing(beside: float) -> float:
        """Seconds that more micro-batches added and the model does not have."""
        compute = replace(passes, beside=beside)
        return added - (predict(compute, traffic, links, many) - predict(compute, traffic, links, few))

    # Each stage takes it for every micro-batch, so at the upper end it is at least all of the difference.
    most = max(0.0, added) / (many - few)
    full = replace(passes, beside=float(brentq(missing, 0.0, most)) if missing(0.0) > 0 else 0.0)
    uncompressed = seconds.loc["none"]
    rest = [float(uncompressed[count]) - predict(full, traffic, links, count) for count in CALIBRATED]
    return replace(full, rest=max(0.0, sum(rest) / len(rest)))


def overhead(rounds: pd.DataFrame, compute: Compute, traffic: Traffic, links: Links) -> float:
    """Seconds that a method adds to its steps in ``rounds`` beyond its messages; the mean over :data:`CALIBRATED`."""
    seconds = rounds.groupby("micro_batches")["seconds"].median()
    extra = [float(seconds[count]) - predict(compute, traffic, links, count) for count in CALIBRATED]
    return max(0.0, sum(extra) / len(extra))


def tables(plan: Plan, data: Measurements) -> dict[str, pd.DataFrame]:
    """One row per limit, number of micro-batches and method, with the columns of :mod:`experiments.bench.steps`; the
    rounds (a row per configuration and counted iteration) and the probes.

    ``used``: ``calibration`` (no limit) or ``validation``.
    """
    # fp32 activations; the ring of the two end stages' embeddings has two ranks.
    activations = 4.0 * plan.sequence * plan.micro_batch * plan.hidden
    embedding = 4.0 * VOCABULARY * plan.hidden
    traffic = {
        name: Traffic(activations=activations, sent=sent, embedding=embedding) for name, sent in data.sent.items()
    }
    free = data.rounds[data.rounds["mbit_per_s"] == FREE]
    free_links = links_of(data.probes[data.probes["mbit_per_s"] == FREE])
    compute = compute_of(free, traffic["none"], free_links)
    extra = {name: overhead(part, compute, traffic[str(name)], free_links) for name, part in free.groupby("method")}
    rows = []
    for (rate, count, name), part in data.rounds.groupby(["mbit_per_s", "micro_batches", "method"], sort=False):
        links = links_of(data.probes[data.probes["mbit_per_s"] == rate])
        silent = replace(traffic[name], sent=((),) * STAGES, embedding=0.0)
        rows.append(
            {"workers": STAGES * REPLICAS, "layout": LAYOUT, "mbit_per_s": rate, "micro_batches": count, "method": name}
            | {"used": "calibration" if rate == FREE else "validation"}
            | {"bytes": max(map(total_bytes, traffic[name].sent))}
            | compared(part["seconds"], predict(compute, traffic[name], links, int(count), extra[name]))
            | {"seconds_compute": predict(compute, silent, links, int(count))}
            | based_on(extra[name], links[ALL_REDUCE])
        )
    return {"pipeline": pd.DataFrame(rows), "pipeline_rounds": data.rounds, "pipeline_probes": data.probes}
