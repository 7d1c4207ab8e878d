"""What :mod:`experiments.simulation.iteration_model` predicts for a step of pipeline stages with replicas (DP x PP).

As in :mod:`experiments.bench.step_model`, it is told only what was measured apart from the steps that it is to predict.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.collectives import ALL_REDUCE, Sent
from experiments.bench.step_model import Collectives, Link
from experiments.simulation.iteration_model import Bucket, Model, Stage


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
        sent: per stage, what a rank sends to average its gradients, collective by collective.
        embedding: bytes that a rank of the end stages sends in the all-reduce of the tied embedding's gradients.
    """

    activations: float
    sent: tuple[tuple[Sent, ...], ...]
    embedding: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a message takes: a collective between replicas, and a tensor sent to the next stage."""

    replicas: Collectives
    stages: Link


def predict(compute: Compute, traffic: Traffic, links: Links, micro_batches: int, overhead: float = 0.0) -> float:
    """Seconds of a step under 1F1B whose gradients are averaged after backward.

    Args:
        overhead: seconds of the processor that averaging takes, beside its messages.

    Raises:
        ValueError: compute and traffic differ in their number of stages.
    """
    if not len(compute.forward) == len(compute.backward) == len(traffic.sent):
        raise ValueError(f"{len(traffic.sent)} stages send, but {len(compute.forward)} compute")
    between = links.stages.seconds(traffic.activations)
    stages = tuple(
        Stage(
            forward=(forward + compute.beside / 2,),
            backward=(backward + compute.beside / 2,),
            to_next=between,
            to_previous=between,
            buckets=(
                Bucket(
                    compress=overhead,
                    messages=tuple(links.replicas[kind].message(bytes_) for kind, bytes_ in sent if bytes_),
                ),
            ),
        )
        for forward, backward, sent in zip(compute.forward, compute.backward, traffic.sent, strict=True)
    )
    after = compute.rest + (links.replicas[ALL_REDUCE].seconds(traffic.embedding) if traffic.embedding else 0.0)
    return Model(stages=stages, micro_batches=micro_batches, after=after).run().seconds
