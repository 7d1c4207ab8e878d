"""One training iteration as a model: 1F1B, then (or beside it) the reduction of the gradients.

A step (the forward or backward pass of one micro-batch through one stage) starts when its stage is free and its input
has come; a stage runs its steps in Megatron's order. Left out are the sender's own time for a transfer, and memory.
Source of the schedule: arXiv 2104.04473, section 2.2.1, as Megatron-Core orders it.

**One machine.** Measured steps are those of ranks that share one machine and its emulated cables
(:mod:`experiments.bench.testbed`), which a cluster's ranks do not. With ``one_machine`` three things hold that the
clusters' simulation leaves out:

* Stages that compute at the same time share the cores, which the replicas of one stage fill.
* Of two transfers in opposite directions of one cable, each goes at half its speed (exchanges timed by themselves
  take twice as long as a send). A stage waits until what it sends has gone.
* Messages advance at :data:`CORE_SHARE` of their speed while backward has the cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

TINY = 1e-12  # seconds: less is nothing left
CORE_SHARE = 0.5
"""What a thread that moves messages gets of a core that it shares with one that computes: an even share, not fitted.
What a dense step gains by several buckets on another machine (``network.csv``, 100 and 1000 Mbit/s) is about that of
0.54 and 0.66."""


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


def iterate(
    stages: Sequence[Stage],
    micro_batches: int,
    *,
    overlap: bool = False,
    after: float = 0.0,
    one_machine: bool = False,
    core_share: float = CORE_SHARE,
) -> Iteration:
    """Play one iteration.

    Args:
        micro_batches: of one replica.
        overlap: a bucket is reduced as soon as it is complete, beside backward; else after the stage's last step.
            Compression still takes the device: what is compressed during backward lengthens it.
        after: seconds after the last reduction: embedding all-reduce, gradient norm, optimizer.
        one_machine: whether all ranks share the cores and cables of one machine; there messages advance at
            ``core_share`` of their speed while backward has the cores.
    """
    spans = (_play_on_one_machine if one_machine else _play)(stages, micro_batches)
    share = core_share if one_machine else 1.0
    ends = [reduce(stage, line, overlap=overlap, core_share=share) for stage, line in zip(stages, spans, strict=True)]
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


def _play_on_one_machine(stages: Sequence[Stage], micro_batches: int) -> list[list[Span]]:
    """Spans of every stage where all share cores and cables; a span ends when what it sends has gone."""
    count = len(stages)
    waiting = [deque(order(stage, count, micro_batches)) for stage in range(count)]
    spans: list[list[Span]] = [[] for _ in stages]
    arrived = {(0, Step("forward", micro_batch)) for micro_batch in range(micro_batches)}
    arrived |= {(count - 1, Step("backward", micro_batch)) for micro_batch in range(micro_batches)}
    computing = dict[int, float]()  # seconds of work left, by stage
    sending = dict[tuple[int, int], float]()  # and of transfers, by the stages from and to which they go
    now = 0.0

    def target(index: int) -> int:
        return index + (1 if spans[index][-1].step.kind == "forward" else -1)

    while any(waiting) or computing or sending:
        for index, stage in enumerate(stages):
            busy = index in computing or any(source == index for source, _ in sending)
            if not busy and waiting[index] and (index, waiting[index][0]) in arrived:
                step = waiting[index].popleft()
                computing[index] = stage.forward if step.kind == "forward" else stage.backward
                spans[index].append(Span(step, now, now))
        core = 1 / max(1, len(computing))
        cable = {way: 0.5 if way[::-1] in sending else 1.0 for way in sending}
        passed = min([*(left / core for left in computing.values()), *(sending[way] / cable[way] for way in sending)])
        now += passed
        computing = {index: left - passed * core for index, left in computing.items()}
        sending = {way: left - passed * cable[way] for way, left in sending.items()}
        for index in [index for index, left in computing.items() if left <= TINY]:
            del computing[index]
            spans[index][-1] = spans[index][-1]._replace(end=now)
            if 0 <= (to := target(index)) < count:
                sending[index, to] = stages[index].to_next if to > index else stages[index].to_previous
        for source, to in [way for way, left in sending.items() if left <= TINY]:
            del sending[source, to]
            spans[source][-1] = spans[source][-1]._replace(end=now)
            arrived.add((to, spans[source][-1].step))
    return spans


def reduce(
    stage: Stage, spans: Sequence[Span], *, overlap: bool = False, core_share: float = 1.0
) -> tuple[float, float]:
    """(End of the stage's last step, end of its reduction), in seconds.

    Buckets use the link one after another in the order in which they are complete. With ``overlap`` each is
    compressed when it is complete, which delays the rest of backward; until that is over, what is computed between two
    messages aside, messages advance at ``core_share`` of their speed.
    """
    last = spans[-1]  # a backward step
    busy = last.end + sum(bucket.compress for bucket in stage.buckets) if overlap else last.end

    def sent(start: float, seconds: float) -> float:
        """When a message has gone that takes so many ``seconds`` by itself."""
        slowly = min(seconds, core_share * max(0.0, busy - start))
        return start + seconds + slowly * (1 / core_share - 1)

    def complete(bucket: Bucket) -> float:
        return last.start + bucket.share * (last.end - last.start) if overlap else last.end

    link = spent = decompress = 0.0
    for bucket in sorted(stage.buckets, key=complete):
        spent += bucket.compress
        link = max(link, complete(bucket) + spent)
        for index, (latency, seconds) in enumerate(bucket.messages):
            pause = bucket.between if index else 0.0
            link = sent(link + pause, latency + seconds)
            spent += pause
        decompress += bucket.decompress
    computed = last.end + (spent if overlap else 0.0)
    return computed, max(link, computed) + decompress
