"""One training iteration as a model: 1F1B or interleaved 1F1B, then (or beside it) the reduction of the gradients.

A step (the forward or backward pass of one micro-batch through one model chunk) starts when its stage is free and its
input has come; a stage runs its steps in Megatron's order. What is left out: the sender's own time for a transfer, and
memory. Source of the schedules: arXiv 2104.04473, sections 2.2.1 and 2.2.2, as Megatron-Core orders them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """The pass of ``micro_batch`` through model chunk ``chunk`` of a stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int


class Span(NamedTuple):
    """A step with its start and end, seconds since the start of the iteration."""

    step: Step
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Message:
    """One collective of a reduction: ``latency`` seconds that no bandwidth shortens, and ``seconds`` at full speed."""

    latency: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together, in the order in which backward completes them.

    Attributes:
        chunk: model chunk they belong to.
        share: of that chunk's last backward step after which they are complete, in (0, 1].
        compress, decompress: seconds of this device before the first and after the last message.
        between: seconds of this device after each message that another one follows, which has to wait for it.
        messages: collectives, one after another.
    """

    chunk: int = 0
    share: float = 1.0
    compress: float = 0.0
    between: float = 0.0
    decompress: float = 0.0
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One pipeline stage: seconds of a micro-batch per model chunk, seconds to send its result, its buckets.

    ``to_next`` is the time until the next stage has the activations, ``to_previous`` until the previous one has their
    gradients; with interleaving the last stage's next one is the first.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    to_next: float = 0.0
    to_previous: float = 0.0
    buckets: tuple[Bucket, ...] = ()


@dataclass(frozen=True)
class Iteration:
    """What came out, per stage: spans of the steps, end of the last one, end of the reduction; all in seconds."""

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


def order(stage: int, stages: int, micro_batches: int, chunks: int = 1) -> list[Step]:
    """Steps of a stage in Megatron's order; interleaved where ``chunks`` > 1.

    Raises:
        ValueError: interleaved with a number of micro-batches that the stages do not divide.
    """
    if chunks > 1 and micro_batches % stages:
        raise ValueError(f"{micro_batches} micro-batches are not divisible by {stages} stages")
    group = stages if chunks > 1 else micro_batches
    passes = [
        (micro_batch, chunk)
        for start in range(0, micro_batches, group)
        for chunk in range(chunks)
        for micro_batch in range(start, start + group)
    ]
    forwards = [Step("forward", micro_batch, chunk) for micro_batch, chunk in passes]
    backwards = [Step("backward", micro_batch, chunks - 1 - chunk) for micro_batch, chunk in passes]
    later = stages - stage - 1
    warmup = min(len(passes), later if chunks == 1 else 2 * later + (chunks - 1) * group)
    steady = [step for pair in zip(forwards[warmup:], backwards, strict=False) for step in pair]
    return [*forwards[:warmup], *steady, *backwards[len(passes) - warmup :]]


@dataclass(frozen=True, kw_only=True)
class Model:
    """Stages, micro-batches of one replica, and how gradients are reduced.

    Attributes:
        overlap: a bucket is reduced as soon as it is complete, beside backward; else after the stage's last step.
            Compression still takes the device: what is compressed during backward lengthens it.
        after: seconds after the last reduction: embedding all-reduce, gradient norm, optimizer.
    """

    stages: tuple[Stage, ...]
    micro_batches: int
    overlap: bool = False
    after: float = 0.0

    def run(self) -> Iteration:
        """Play one iteration."""
        spans = self._play()
        ends = [reduce(*of_stage, overlap=self.overlap) for of_stage in zip(self.stages, spans, strict=True)]
        computed, reduced = zip(*ends, strict=True)
        return Iteration(tuple(tuple(line) for line in spans), computed, reduced, self.after)

    def _play(self) -> list[list[Span]]:
        """Spans of every stage: each round takes whatever steps have their input."""
        count, chunks = len(self.stages), len(self.stages[0].forward)
        waiting = [deque(order(stage, count, self.micro_batches, chunks)) for stage in range(count)]
        spans: list[list[Span]] = [[] for _ in self.stages]
        # What needs nothing of another stage: data, or the loss of its own forward step.
        arrived = {(0, Step("forward", micro_batch, 0)): 0.0 for micro_batch in range(self.micro_batches)}
        arrived |= {(count - 1, Step("backward", of, chunks - 1)): 0.0 for of in range(self.micro_batches)}
        while any(waiting):
            moved = False
            for index, stage in enumerate(self.stages):
                while waiting[index] and (index, waiting[index][0]) in arrived:
                    step = waiting[index].popleft()
                    start = max(arrived[index, step], spans[index][-1].end if spans[index] else 0.0)
                    forward = step.kind == "forward"
                    end = start + (stage.forward if forward else stage.backward)[step.chunk]
                    spans[index].append(Span(step, start, end))
                    chunk, to = divmod(step.chunk * count + index + (1 if forward else -1), count)
                    if 0 <= chunk < chunks:
                        # Within one stage (a pipeline of one) nothing travels.
                        travel = 0.0 if to == index else stage.to_next if forward else stage.to_previous
                        arrived[to, step._replace(chunk=chunk)] = end + travel
                    moved = True
            if not moved:
                raise AssertionError("the schedule waits for itself")
        return spans


def reduce(stage: Stage, spans: Sequence[Span], *, overlap: bool = False) -> tuple[float, float]:
    """(end of the stage's last step, end of its reduction), in seconds.

    Buckets use the link one after another in the order in which they are complete. With ``overlap`` each is
    compressed when it is complete, which delays the rest of backward.
    """
    end = spans[-1].end
    last = {
        chunk: next(s for s in reversed(spans) if s.step.kind == "backward" and s.step.chunk == chunk)
        for chunk in {bucket.chunk for bucket in stage.buckets}
    }

    def complete(bucket: Bucket) -> float:
        span = last[bucket.chunk]
        return span.start + bucket.share * (span.end - span.start) if overlap else end

    link = spent = decompress = 0.0
    for bucket in sorted(stage.buckets, key=complete):
        spent += bucket.compress
        link = max(link, complete(bucket) + spent)
        for index, message in enumerate(bucket.messages):
            pause = bucket.between if index else 0.0
            link = link + pause + message.latency + message.seconds
            spent += pause
        decompress += bucket.decompress
    computed = end + (spent if overlap else 0.0)
    return computed, max(link, computed) + decompress
