"""What :mod:`experiments.simulation.iteration_model` predicts for a data-parallel training step on the testbed.

It is told what was measured apart from the steps that it is to predict: the step without any communication, with the
moment at which each bucket is complete; what a method sends for each bucket; the seconds that it adds to a step where
the network has no limit; and how long single collectives of each kind take at the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.bench.collectives import Sent
from experiments.simulation.iteration_model import Bucket, Message, Model, Stage


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
    """A collective of one kind in which a rank sends n bytes takes ``latency`` + n / ``bandwidth`` seconds."""

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


Collectives = Mapping[str, Link]  # by kind


def links_of(probes: pd.DataFrame) -> dict[str, Link]:
    """From timed collectives (columns ``kind``, ``bytes``, ``seconds``); the median of each size counts."""
    found = {}
    for kind, part in probes.groupby("kind"):
        medians = part.groupby("bytes")["seconds"].median()
        found[str(kind)] = Link.fit([(float(sent), float(seconds)) for sent, seconds in medians.items()])
    return found


@dataclass(frozen=True, kw_only=True)
class Method:
    """What a way of averaging gradients does in a step.

    Attributes:
        sent: per bucket, in the order in which they are complete: what this rank sends, collective by collective.
        overhead: seconds of the processor in a step, beside the compute.
    """

    sent: tuple[tuple[Sent, ...], ...]
    overhead: float = 0.0


def predict(compute: Compute, method: Method, links: Collectives) -> float:
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
            messages=tuple(links[kind].message(bytes_) for kind, bytes_ in messages if bytes_),
        )
        for complete, share, messages in zip(compute.complete, shares, method.sent, strict=True)
    )
    stage = Stage(forward=(compute.forward,), backward=(compute.backward,), buckets=buckets)
    return Model(stages=(stage,), micro_batches=1, overlap=True, after=compute.rest).run().seconds


def overhead(compute: Compute, sent: tuple[tuple[Sent, ...], ...], links: Collectives, seconds: float) -> float:
    """What a method adds to a step of ``seconds`` over ``links`` beyond its messages; not negative."""
    return max(0.0, seconds - predict(compute, Method(sent=sent), links))
