"""What :mod:`experiments.simulation.iteration_model` predicts for a data-parallel training step on the testbed.

It is told what was measured apart from the steps that it is to predict: the step without any communication, with the
moment at which each bucket is complete; what a method sends for each bucket; the seconds that it adds to a step where
the network has no limit; and how long single collectives of each kind take at the limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import brentq

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


Links = Mapping[str, Link]  # by kind of message
Messages = tuple[tuple[Sent, ...], ...]  # per bucket or stage, what a rank sends, collective by collective


def links_of(probes: pd.DataFrame) -> dict[str, Link]:
    """From timed collectives (columns ``kind``, ``bytes``, ``seconds``); the median of each size counts."""
    found = {}
    for kind, part in probes.groupby("kind"):
        medians = part.groupby("bytes")["seconds"].median()
        found[str(kind)] = Link.fit([(float(sent), float(seconds)) for sent, seconds in medians.items()])
    return found


def predict(compute: Compute, sent: Messages, links: Links, overhead: float = 0.0) -> float:
    """Seconds of a step.

    Args:
        sent: per bucket, in the order in which they are complete.
        overhead: seconds of the processor in a step, beside the compute. They are spread over the buckets as these
            were cut, and within a bucket evenly: before its messages, between them (a second factor is computed from
            the mean of the first) and after them. What comes before and between delays backward.

    Raises:
        ValueError: the buckets that are sent are not the compute's.
    """
    if len(sent) != len(compute.complete):
        raise ValueError(f"{len(sent)} buckets are sent, but {len(compute.complete)} become complete")
    shares = np.diff([0.0, *compute.complete])
    buckets = []
    for complete, share, of_bucket in zip(compute.complete, shares, sent, strict=True):
        messages = messages_of(of_bucket, links)
        part = overhead * share / compute.complete[-1] / (len(messages) + 1)
        behind = part if messages else 0.0
        buckets.append(Bucket(share=complete, compress=part, between=part, decompress=behind, messages=messages))
    stage = Stage(forward=(compute.forward,), backward=(compute.backward,), buckets=tuple(buckets))
    return Model(stages=(stage,), micro_batches=1, overlap=True, after=compute.rest).run().seconds


def messages_of(sent: Iterable[Sent], links: Links) -> tuple[Message, ...]:
    """The times of one bucket's messages."""
    return tuple(links[kind].message(bytes_) for kind, bytes_ in sent if bytes_)


def overhead_of(compute: Compute, sent: Messages, links: Links, seconds: float) -> float:
    """What a method adds to a step of ``seconds`` over ``links`` beyond its messages; not negative."""

    def missing(overhead: float) -> float:
        return seconds - predict(compute, sent, links, overhead)

    if missing(0.0) <= 0:
        return 0.0
    most = seconds
    while missing(most) > 0:  # where all but the last part of it is hidden behind messages
        most *= 2
    return float(brentq(missing, 0.0, most))
