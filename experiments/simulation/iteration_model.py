"""One training iteration as a model: 1F1B, then (or beside it) the reduction of the gradients.

A step (the forward or backward pass of one micro-batch through one stage) starts when its stage is free and its input
has come; a stage runs its steps in Megatron's order. Left out are the sender's own time for a transfer, and memory.
Source of the schedule: arXiv 2104.04473, section 2.2.1, as Megatron-Core orders it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """Pass of ``micro_batch`` through a stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


class Span(NamedTuple):
    """A step with its start and end, seconds since the start of the iteration."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, in the order in which backward completes them.

    Attributes:
        share: of the stage's last backward step after which they are complete, in (0, 1].
        compress, decompress: seconds of this device before the first and after the last message.
        between: seconds of this device after each message that another one follows, which has to wait for it.
        messages: collectives, one after another: seconds that no bandwidth shortens, and seconds at full speed.
    """

    share: float = 1.0
    compress: float = 0.0
    between: float = 0.0
    decompress: float = 0.0
    messages: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage: seconds of a micro-batch, seconds to send its result, its buckets.

    ``to_next`` is the time until the next stage has the activations, ``to_previous`` until the previous one has their
    gradients.
    """

    forward: float
    backward: float
    to_next: float = 0.0
    to_previous: float = 0.0
    buckets: tuple[Bucket, ...] = ()


@dataclass(frozen=True)
class Iteration:
    """Outcome per stage: spans of the steps, end of the last one, end of the reduction; all in seconds."""

    spans: tuple[tuple[Span, ...], ...]
    computed: tuple[float, ...]
    reduced: tuple[float, ...]
    after: float = 0.0

    @property
    def exposed(self) -> tuple[float, ...]:
        """Seconds that each stage waits for its own gradients."""
        return tuple(end - start for start, end in zip(self.computed, self.reduced, strict=True))

    @property
    def seconds(self) -> float:
        """Length of the iteration: the optimizer waits for the slowest stage (the norm is of all gradients)."""
        return max(self.reduced) + self.after


def order(stage: int, stages: int, micro_batches: int) -> list[Step]:
    """Steps of a stage in Megatron's order."""
    forwards = [Step("forward", micro_batch) for micro_batch in range(micro_batches)]
    backwards = [Step("backward", micro_batch) for micro_batch in range(micro_batches)]
    warmup = min(micro_batches, stages - stage - 1)
    steady = [step for pair in zip(forwards[warmup:], backwards, strict=False) for step in pair]
    return [*forwards[:warmup], *steady, *backwards[micro_batches - warmup :]]


def iterate(stages: Sequence[Stage], micro_batches: int, *, overlap: bool = False, after: float = 0.0) -> Iteration:
    """Play one iteration.

    Args:
        micro_batches: of one replica.
        overlap: a bucket is reduced as soon as it is complete, beside backward; else after the stage's last step.
            Compression still takes the device: what is compressed during backward lengthens it.
        after: seconds after the last reduction: embedding all-reduce, gradient norm, optimizer.
    """
    spans = _play(stages, micro_batches)
    ends = [reduce(stage, line, overlap=overlap) for stage, line in zip(stages, spans, strict=True)]
    computed, reduced = zip(*ends, strict=True)
    return Iteration(tuple(tuple(line) for line in spans), computed, reduced, after)


def _play(stages: Sequence[Stage], micro_batches: int) -> list[list[Span]]:
    """Spans of every stage: each round takes whatever steps have their input."""
    count = len(stages)
    waiting = [deque(order(stage, count, micro_batches)) for stage in range(count)]
    spans: list[list[Span]] = [[] for _ in stages]
    # What needs nothing of another stage: data, or the loss of its own forward step.
    arrived = {(0, Step("forward", micro_batch)): 0.0 for micro_batch in range(micro_batches)}
    arrived |= {(count - 1, Step("backward", micro_batch)): 0.0 for micro_batch in range(micro_batches)}
    while any(waiting):
        for index, stage in enumerate(stages):
            while waiting[index] and (index, waiting[index][0]) in arrived:
                step = waiting[index].popleft()
                start = max(arrived[index, step], spans[index][-1].end if spans[index] else 0.0)
                forward = step.kind == "forward"
                end = start + (stage.forward if forward else stage.backward)
                spans[index].append(Span(step, start, end))
                if 0 <= (neighbour := index + (1 if forward else -1)) < count:
                    arrived[neighbour, step] = end + (stage.to_next if forward else stage.to_previous)
    return spans


def reduce(stage: Stage, spans: Sequence[Span], *, overlap: bool = False) -> tuple[float, float]:
    """(End of the stage's last step, end of its reduction), in seconds.

    Buckets use the link one after another in the order in which they are complete. With ``overlap`` each is
    compressed when it is complete, which delays the rest of backward.
    """
    last = spans[-1]  # a backward step

    def complete(bucket: Bucket) -> float:
        return last.start + bucket.share * (last.end - last.start) if overlap else last.end

    link = spent = decompress = 0.0
    for bucket in sorted(stage.buckets, key=complete):
        spent += bucket.compress
        link = max(link, complete(bucket) + spent)
        for index, (latency, seconds) in enumerate(bucket.messages):
            pause = bucket.between if index else 0.0
            link = link + pause + latency + seconds
            spent += pause
        decompress += bucket.decompress
    computed = last.end + (spent if overlap else 0.0)
    return computed, max(link, computed) + decompress
