"""Timeline of every rank's work: spans from Megatron's own timers, sorted into kinds, without a barrier anywhere.

A rank notes when its work starts and ends (:class:`Recorder`); times are readings of one clock that all processes of a
machine share, so they are compared afterwards (:func:`classify`). A message between two stages moves only once both
are in the call: what a rank spends there before is waiting, the rest is communication. Whatever is no work and no
communication is idle time, the pipeline's bubble included.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pandas as pd

Interval = tuple[float, float]

KINDS = ("forward", "backward", "pipeline", "compress", "reduce", "embedding", "optimizer", "wait")
"""Work in the pipeline; messages between its stages; a gradient reduction's arithmetic and its time on the link; the
sum of the two copies of the embedding's gradient; the optimizer's step; waiting for another rank."""

REDUCTION, LINK, OPTIMIZER, AGREEMENT = "reduction", "link", "optimizer", "all-grads-sync"
_EMBEDDING = "embedding-grads-all-reduce"
_WORK = {"forward-compute": "forward", "backward-compute": "backward"}
_KINDS = {**_WORK, LINK: "reduce", OPTIMIZER: "optimizer"}
# Per timer of a call: the messages in it, each (direction, whether it is sent).
_MESSAGES: dict[str, tuple[tuple[str, bool], ...]] = {
    "forward-recv": (("forward", False),),
    "forward-send": (("forward", True),),
    "backward-recv": (("backward", False),),
    "backward-send": (("backward", True),),
    "forward-send-backward-recv": (("forward", True), ("backward", False)),
    "backward-send-forward-recv": (("backward", True), ("forward", False)),
}


class Recorder:
    """Megatron's ``config.timers`` that keeps spans instead of sums, and never makes a rank wait.

    Attributes:
        spans: (timer, start, end) in the order in which they ended, seconds of :func:`time.perf_counter`.
    """

    def __init__(self) -> None:
        self.spans: list[tuple[str, float, float]] = []
        self._started: dict[str, float] = {}

    def __call__(self, name: str, log_level: int | None = None) -> _Timer:
        """Megatron's protocol: the timer of that name, whatever its level."""
        return _Timer(self, name)

    def add(self, name: str, start: float, end: float) -> None:
        self.spans.append((name, start, end))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note the time of a block."""
        started = time.perf_counter()
        yield
        self.add(name, started, time.perf_counter())

    def take(self) -> list[tuple[str, float, float]]:
        """The spans since the last call."""
        taken, self.spans = self.spans, []
        return taken


class _Timer:
    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def start(self, barrier: bool = False) -> None:
        """``barrier`` is Megatron's wish that all ranks meet first; it would change what is measured."""
        self._recorder._started[self._name] = time.perf_counter()

    def stop(self, barrier: bool = False) -> None:
        """
        Raises:
            KeyError: the timer was not started.
        """
        started = self._recorder._started.pop(self._name)
        self._recorder.add(self._name, started, time.perf_counter())


# ------------------------------------------------------------------ arithmetic of intervals


def without(interval: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """Parts of an interval outside all holes, ascending."""
    left, (start, end) = [], interval
    for low, high in sorted(holes):
        if min(low, end) > start:
            left.append((start, min(low, end)))
        start = max(start, high)
    return [*left, (start, end)] if end > start else left


def covered(intervals: Sequence[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def idle_share(work: Sequence[Interval], window: Interval) -> float:
    """The part of ``window``, which must have a length, in which nothing of ``work`` goes on."""
    inside = [(max(a, window[0]), min(b, window[1])) for a, b in work]
    return 1 - covered([(a, b) for a, b in inside if b > a]) / (window[1] - window[0])


# ------------------------------------------------------------------ of all ranks


def classify(answers: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The spans of one iteration of all ranks of a 1F1B pipeline, by kind.

    Args:
        answers: per rank its ``stage``, ``replica`` and ``spans`` (see :class:`Recorder`).

    Returns:
        Columns ``stage``, ``replica``, ``kind`` (one of :data:`KINDS`), ``micro_batch`` (of forward and backward, from
        0; empty otherwise), ``start``, ``end`` in seconds after the first span of any rank.
    """
    entered, together = _entered(answers)
    ends = (0, max(answer["stage"] for answer in answers))
    rows: list[dict[str, Any]] = []
    for answer in answers:
        stage, replica, spans = answer["stage"], answer["replica"], answer["spans"]
        links, reductions = ([(a, b) for name, a, b in spans if name == kind] for kind in (LINK, REDUCTION))
        number: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)
        for name, start, end in spans:
            pieces: list[tuple[str, Interval]] = []
            micro_batch = next(number[name]) if name in _WORK else None
            if name in _KINDS:
                pieces = [(_KINDS[name], (start, end))]
            elif name in _MESSAGES:
                ready = start
                for direction, sent in _MESSAGES[name]:
                    peer = stage + (1 if sent == (direction == "forward") else -1)
                    message = (direction, not sent, next(number[direction, sent]))
                    ready = max(ready, entered[replica, peer, *message])
                pieces = _split(start, end, ready, "pipeline")
            elif name == _EMBEDDING and stage in ends:
                pieces = _split(start, end, max(together[replica, at] for at in ends), "embedding")
            elif name == REDUCTION:
                pieces = [("compress", piece) for piece in without((start, end), links)]
            elif name == AGREEMENT:
                pieces = [("wait", piece) for piece in without((start, end), reductions)]
            rows += [
                {"stage": stage, "replica": replica, "kind": kind, "micro_batch": micro_batch} | {"start": a, "end": b}
                for kind, (a, b) in pieces
            ]
    made = pd.DataFrame(rows).astype({"micro_batch": "Int64"})
    made[["start", "end"]] -= made["start"].min()
    return made.sort_values(["stage", "replica", "start"], ignore_index=True)


def _entered(
    answers: Sequence[Mapping[str, Any]],
) -> tuple[dict[tuple[int, int, str, bool, int], float], dict[tuple[int, int], float]]:
    """Moments at which a rank entered the call with its n-th message of a direction, by (replica, stage, direction,
    sent, n), and the last all-reduce of the embedding, by (replica, stage)."""
    messages, embedding = {}, {}
    for answer in answers:
        replica, stage = answer["replica"], answer["stage"]
        number: defaultdict[Any, Iterator[int]] = defaultdict(itertools.count)
        for name, start, _ in answer["spans"]:
            if name == _EMBEDDING:
                embedding[replica, stage] = start
            for message in _MESSAGES.get(name, ()):
                messages[replica, stage, *message, next(number[message])] = start
    return messages, embedding


def _split(start: float, end: float, ready: float, kind: str) -> list[tuple[str, Interval]]:
    """Waiting until ``ready``, then ``kind``."""
    ready = min(max(ready, start), end)
    return [(name, piece) for name, piece in (("wait", (start, ready)), (kind, (ready, end))) if piece[1] > piece[0]]


def shares(spans: pd.DataFrame) -> pd.DataFrame:
    """Per ``stage`` and ``replica`` of one iteration: ``seconds`` of the iteration, ``idle`` share, and the seconds of
    every kind in a column of its own."""
    window = (float(spans["start"].min()), float(spans["end"].max()))
    rows = []
    for (stage, replica), own in spans.groupby(["stage", "replica"]):
        intervals = {kind: list(zip(part["start"], part["end"], strict=True)) for kind, part in own.groupby("kind")}
        intervals.pop("wait", None)
        lengths = {kind: covered(intervals.get(kind, [])) for kind in KINDS if kind != "wait"}
        idle = idle_share(list(itertools.chain(*intervals.values())), window)
        rows.append({"stage": stage, "replica": replica, "seconds": window[1] - window[0], "idle": idle, **lengths})
    return pd.DataFrame(rows)


def median_iteration(seconds: Mapping[int, float]) -> int:
    """The iteration with the median duration: of two in the middle the shorter, of equals the first."""
    ordered = sorted(seconds, key=lambda iteration: (seconds[iteration], iteration))
    return ordered[(len(ordered) - 1) // 2]


def collect(
    variant: str, answers: Sequence[Mapping[str, Any]], iterations: Sequence[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Timelines of one variant's counted iterations.

    Args:
        answers: per rank ``stage``, ``replica`` and ``iterations``, whose items hold ``iteration`` and ``spans``.

    Returns:
        :func:`shares` of all ``iterations``; :func:`classify` of the one with the median duration. Both with the
        columns ``variant`` and ``iteration`` in front.
    """
    timelines = {}
    for iteration in iterations:
        of_ranks = [
            (answer, one) for answer in answers for one in answer["iterations"] if one["iteration"] == iteration
        ]
        timelines[iteration] = classify([{**answer, "spans": one["spans"]} for answer, one in of_ranks])
    chosen = median_iteration({key: float(spans["end"].max()) for key, spans in timelines.items()})

    def labelled(table: pd.DataFrame, iteration: int) -> pd.DataFrame:
        return table.assign(variant=variant, iteration=iteration)[["variant", "iteration", *table]]

    every = [labelled(shares(spans), key) for key, spans in timelines.items()]
    return pd.concat(every, ignore_index=True), labelled(timelines[chosen], chosen)


def chrome_trace(spans: pd.DataFrame) -> str:
    """Spans (:func:`collect`) in Chrome's trace format, which Perfetto opens: a process per variant, a thread per
    rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for process, (variant, of_variant) in enumerate(spans.groupby("variant", sort=False)):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": variant}})
        ranks = sorted(set(zip(of_variant["stage"], of_variant["replica"], strict=True)))
        for thread, (stage, replica) in enumerate(ranks):
            name = {"name": f"stage {stage}, replica {replica}"}
            events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": name})
        for row in of_variant.itertuples():
            label = row.kind if pd.isna(row.micro_batch) else f"{row.kind} {row.micro_batch}"
            place = {"pid": process, "tid": ranks.index((row.stage, row.replica))}
            times = {"ts": round(1e6 * row.start, 1), "dur": round(1e6 * (row.end - row.start), 1)}
            events.append({"ph": "X", "name": label, "cat": row.kind, **place, **times})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"
