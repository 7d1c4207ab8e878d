"""Predict measured steps of two pipeline stages with two replicas each, every rank on a host of the testbed:
pipeline.csv, pipeline.json, from pipeline_rounds.csv and pipeline_probes.csv. What measured these is in commit b28727f.

Megatron trains; activations and gradients share the limited cable of their host. Calibrated without a limit at two
numbers of micro-batches; predicted under limits at others. Of a limited link nothing is used but messages timed by
themselves, as in :mod:`experiments.bench.steps`. A stage that sends activations or their gradients waits until they
have gone, as Megatron's schedule does on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pandas as pd
from scipy.optimize import brentq

from experiments.bench import steps, terminal
from experiments.bench.collectives import ALL_REDUCE, total_bytes
from experiments.bench.steps import FREE, Links, Measurements, Messages, compared, links_of, messages_of
from experiments.simulation.iteration_model import Bucket, Stage, iterate

record = steps.record
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
    """
    between, last = links[SEND].seconds(traffic.activations), len(traffic.sent) - 1
    passes = zip(compute.forward, compute.backward, traffic.sent, strict=True)
    stages = [
        Stage(
            forward=forward + compute.beside / 2 + (between if index < last else 0.0),
            backward=backward + compute.beside / 2 + (between if index > 0 else 0.0),
            buckets=(Bucket(compress=overhead, messages=messages_of(sent, links)),),
        )
        for index, (forward, backward, sent) in enumerate(passes)
    ]
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
            | {"seconds_compute": predict(compute, silent, links, int(count)), "seconds_overhead": extra[name]}
            | links[ALL_REDUCE].columns()
        )
    return {"pipeline": pd.DataFrame(rows), "pipeline_rounds": data.rounds, "pipeline_probes": data.probes}
