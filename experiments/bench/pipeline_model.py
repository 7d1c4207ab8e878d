"""What :mod:`experiments.simulation.iteration_model` predicts for a step of pipeline stages with replicas (DP x PP).

As in :mod:`experiments.bench.step_model`, it is told only what was measured apart from the steps that it is to predict.
A stage that sends activations or their gradients waits until they have gone, as Megatron's schedule does on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from experiments.bench.collectives import ALL_REDUCE, SEND
from experiments.bench.step_model import Links, Messages, messages_of
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
            forward=(forward + compute.beside / 2 + (between if index < last else 0.0),),
            backward=(backward + compute.beside / 2 + (between if index > 0 else 0.0),),
            buckets=(Bucket(compress=overhead, messages=messages_of(sent, links)),),
        )
        for index, (forward, backward, sent) in enumerate(
            zip(compute.forward, compute.backward, traffic.sent, strict=True)
        )
    )
    after = compute.rest + (links[ALL_REDUCE].seconds(traffic.embedding) if traffic.embedding else 0.0)
    return Model(stages=stages, micro_batches=micro_batches, after=after).run().seconds
