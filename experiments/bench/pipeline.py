"""Predict measured steps of two pipeline stages with two replicas each, every rank on a host of the testbed:
pipeline.csv, pipeline.json, from pipeline_rounds.csv and pipeline_probes.csv. What measured these is in commit b28727f.

Megatron trains; activations and gradients share the limited cable of their host. Calibrated without a limit at two
numbers of micro-batches; predicted under limits at others. Of a limited link nothing is used but messages timed by
themselves, as in :mod:`experiments.bench.steps`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import brentq

from experiments.bench import steps, terminal
from experiments.bench.collectives import ALL_REDUCE, total_bytes
from experiments.bench.steps import FREE, Links, Measurements, Messages, compared, links_of, messages_of
from experiments.simulation.iteration_model import Bucket, Stage, iterate

STAGES, REPLICAS = 2, 2
LAYOUT = f"DP{REPLICAS} x PP{STAGES}"
SEND = "send"  # the kind of a message from one stage to the next, in the probes
VOCABULARY = 256  # of the worker's text
CALIBRATED = (4, 12)  # micro-batches at which the work of a step is measured


class Plan(terminal.Plan):
    """Settings of what was measured."""

    rates: tuple[float, ...] = (20.0, 50.0, 200.0)
    micro_batches: tuple[int, ...] = (2, 8)
    rounds: int = 9
    layers: int = 4
    hidden: int = 128
    sequence: int = 64
    micro_batch: int = 2


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Work of a step.

    Attributes:
        forward, backward: seconds of a micro-batch, per stage, where nothing else computes.
        rest: seconds after the gradients are averaged, without messages: gradient norm and optimizer.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
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
    """
    between = links[SEND].seconds(traffic.activations)
    stages = [
        Stage(
            forward=forward,
            backward=backward,
            to_next=between,
            to_previous=between,
            buckets=(Bucket(compress=overhead, messages=messages_of(sent, links)),),
        )
        for forward, backward, sent in zip(compute.forward, compute.backward, traffic.sent, strict=True)
    ]
    after = compute.rest + (links[ALL_REDUCE].seconds(traffic.embedding) if traffic.embedding else 0.0)
    return iterate(stages, micro_batches, after=after, one_machine=True).seconds


def compute_of(rounds: pd.DataFrame, traffic: Traffic, links: Links) -> Compute:
    """Work of the steps in ``rounds``, which have :data:`CALIBRATED` micro-batches.

    Passes are medians over all methods, which do not differ in them. Four ranks on two cores wait for each other within
    them, so they are scaled to what more micro-batches add to a step; the rest is what they leave of an uncompressed
    one.
    """
    forward, backward = (
        np.array([rounds[f"{kind}_{stage}"].median() for stage in range(STAGES)]) for kind in ("forward", "backward")
    )
    few, many = CALIBRATED
    seconds = rounds.groupby(["method", "micro_batches"])["seconds"].median().unstack()
    added = float((seconds[many] - seconds[few]).median())

    def scaled(factor: float) -> Compute:
        return Compute(forward=tuple(factor * forward), backward=tuple(factor * backward))

    def missing(factor: float) -> float:
        """Seconds that more micro-batches added and the model does not have."""
        work = scaled(factor)
        return added - (predict(work, traffic, links, many) - predict(work, traffic, links, few))

    # Each micro-batch takes at least the passes of one stage.
    most = max(0.0, added) / (many - few) / float((forward + backward).max())
    full = scaled(float(brentq(missing, 0.0, most)) if missing(0.0) > 0 else 0.0)
    return replace(full, rest=overhead(rounds[rounds["method"] == "none"], full, traffic, links))


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
    free_links = links_of(data.probes, FREE)
    compute = compute_of(free, traffic["none"], free_links)
    extra = {name: overhead(part, compute, traffic[str(name)], free_links) for name, part in free.groupby("method")}
    rows = []
    for (rate, count, name), part in data.rounds.groupby(["mbit_per_s", "micro_batches", "method"], sort=False):
        links = links_of(data.probes, float(rate))
        silent = replace(traffic[name], sent=((),) * STAGES, embedding=0.0)
        rows.append(
            {"workers": STAGES * REPLICAS, "layout": LAYOUT, "mbit_per_s": rate, "micro_batches": count, "method": name}
            | {"used": "calibration" if rate == FREE else "validation"}
            | {"bytes": max(map(total_bytes, traffic[name].sent))}
            | compared(part["seconds"], predict(compute, traffic[name], links, int(count), extra[name]))
            | {"seconds_compute": predict(compute, silent, links, int(count)), "seconds_overhead": extra[name]}
            | {"link_bandwidth": links[ALL_REDUCE].bandwidth}
        )
    return {"pipeline": pd.DataFrame(rows), "pipeline_rounds": data.rounds, "pipeline_probes": data.probes}


def record(data: Measurements, table: pd.DataFrame) -> dict[str, Any]:
    """Messages of every method; number, median and largest absolute error of the validated predictions."""
    return {"sent": data.sent, "summary": steps.summary(table)}
