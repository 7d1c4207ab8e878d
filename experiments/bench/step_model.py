"""What :mod:`experiments.iteration_model` predicts for a data-parallel training step on the testbed.

It is told what was measured apart from the steps that it is to predict: the step without any communication, with the
moment at which each bucket is complete; what a method sends for each bucket; the seconds that it adds to a step where
the network has no limit; and how long an all-reduce takes at the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from experiments.iteration_model import Bucket, Message, Model, Stage


@dataclass(frozen=True, kw_only=True)
class Compute:
    """A step without communication.

    Attributes:
        forward, backward, rest: seconds; the rest is the optimizer.
        complete: per bucket, the share of backward after which its gradients are complete, in (0, 1].
    """

    forward: float
    backward: float
    rest: float
    complete: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Link:
    """An all-reduce in which a rank sends n bytes takes ``latency`` + n / ``bandwidth`` seconds."""

    latency: float
    bandwidth: float

    @classmethod
    def fit(cls, probes: Sequence[tuple[float, float]]) -> Link:
        """The line through (bytes sent, seconds) with the least relative errors; its latency is not negative."""
        sent, seconds = (np.array(column, dtype=float) for column in zip(*probes, strict=True))
        matrix = np.stack([1 / seconds, sent / seconds], axis=1)
        (latency, slope), *_ = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)
        if latency < 0:
            latency, slope = 0.0, float(np.sum(sent / seconds) / np.sum((sent / seconds) ** 2))
        return cls(latency=float(latency), bandwidth=float(1 / slope))

    def seconds(self, sent: float) -> float:
        return self.latency + sent / self.bandwidth

    def message(self, sent: float) -> Message:
        return Message(latency=self.latency, seconds=sent / self.bandwidth)


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a way of averaging gradients does in a step.

    Attributes:
        sent: per bucket, in the order in which they are complete: bytes that this rank sends, message by message.
        overhead: seconds of the processor in a step, beside the compute.
    """

    sent: tuple[tuple[float, ...], ...]
    overhead: float = 0.0

    @property
    def bytes(self) -> float:
        return sum(map(sum, self.sent))


def predict(compute: Compute, method: Method, link: Link) -> float:
    """Seconds of a step; the overhead is spread over the buckets as they were cut, and delays backward.

    Raises:
        ValueError: the method's buckets are not the compute's.
    """
    if len(method.sent) != len(compute.complete):
        raise ValueError(f"{len(method.sent)} buckets are sent, but {len(compute.complete)} become complete")
    shares = np.diff([0.0, *compute.complete])
    buckets = tuple(
        Bucket(
            share=complete,
            compress=method.overhead * share / compute.complete[-1],
            messages=tuple(link.message(sent) for sent in messages if sent),
        )
        for complete, share, messages in zip(compute.complete, shares, method.sent, strict=True)
    )
    stage = Stage(forward=(compute.forward,), backward=(compute.backward,), buckets=buckets)
    return Model(stages=(stage,), micro_batches=1, overlap=True, after=compute.rest).run().seconds


def overhead(compute: Compute, sent: tuple[tuple[float, ...], ...], link: Link, seconds: float) -> float:
    """What a method adds to a step of ``seconds`` over ``link`` beyond its messages; not negative."""
    return max(0.0, seconds - predict(compute, Method(sent=sent), link))
