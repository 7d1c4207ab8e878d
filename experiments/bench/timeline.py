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
from functools import partial
from types import SimpleNamespace
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

    def __call__(self, name: str, log_level: int | None = None) -> SimpleNamespace:
        """Megatron's protocol: the timer of that name, whatever its level. Its ``stop`` raises KeyError where it was
        not started."""
        return SimpleNamespace(start=partial(self._start, name), stop=partial(self._stop, name))

    def _start(self, name: str, barrier: bool = False) -> None:
        """``barrier`` is Megatron's wish that all ranks meet first; it would change what is measured."""
        self._started[name] = time.perf_counter()

    def _stop(self, name: str, barrier: bool = False) -> None:
        self.add(name, self._started.pop(name), time.perf_counter())

    def add(self, name: str, start: float, end: float) -> None:
        """Note a span."""
        self.spans.append((name, start, end))

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Note the time of a block."""
        started = time.perf_counter()
        yield
        self.add(name, started, time.perf_counter())

    def take(self) -> list[tuple[str, float, float]]:
        """Return the spans since the last call."""
        spans, self.spans = self.spans, []
        return spans


def without(interval: Interval, holes: Sequence[Interval]) -> list[Interval]:
    """Parts of an interval outside all holes, ascending."""
    parts, (start, end) = [], interval
    for low, high in sorted(holes):
        if min(low, end) > start:
            parts.append((start, min(low, end)))
        start = max(start, high)
    return [*parts, (start, end)] if end > start else parts


def idle_seconds(work: Sequence[Interval], window: Interval) -> float:
    """Length of the part of ``window`` in which nothing of ``work`` goes on."""
    return sum(end - start for start, end in without(window, work))


def classify(answers: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The spans of one iteration of all ranks of a 1F1B pipeline, by kind.

    Args:
        answers: per rank its ``stage``, ``replica`` and ``spans`` (see :class:`Recorder`).

    Returns:
        Columns ``stage``, ``replica``, ``kind`` (one of :data:`KINDS`), ``micro_batch`` (of forward and backward, from
        0; empty otherwise), ``start``, ``end`` in seconds after the first span of any rank.
    """
    entered, embedding = _entered(answers)
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
                for direction, sends in _MESSAGES[name]:
                    peer = stage + (1 if sends == (direction == "forward") else -1)
                    message = (direction, not sends, next(number[direction, sends]))
                    ready = max(ready, entered[replica, peer, *message])
                pieces = _split(start, end, ready, "pipeline")
            elif name == _EMBEDDING and stage in ends:
                pieces = _split(start, end, max(embedding[replica, place] for place in ends), "embedding")
            elif name == REDUCTION:
                pieces = [("compress", piece) for piece in without((start, end), links)]
            elif name == AGREEMENT:
                pieces = [("wait", piece) for piece in without((start, end), reductions)]
            rank = {"stage": stage, "replica": replica}
            rows += [rank | {"kind": kind, "micro_batch": micro_batch, "start": a, "end": b} for kind, (a, b) in pieces]
    table = pd.DataFrame(rows).astype({"micro_batch": "Int64"})
    table[["start", "end"]] -= table["start"].min()
    return table.sort_values(["stage", "replica", "start"], ignore_index=True)


def _entered(
    answers: Sequence[Mapping[str, Any]],
) -> tuple[dict[tuple[int, int, str, bool, int], float], dict[tuple[int, int], float]]:
    """Moments at which a rank entered the call with its n-th message of a direction, by (replica, stage, direction,
    sends, n), and the last all-reduce of the embedding, by (replica, stage)."""
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
    length = window[1] - window[0]
    rows = []
    for (stage, replica), part in spans[spans["kind"] != "wait"].groupby(["stage", "replica"]):
        work = {kind: list(zip(s["start"], s["end"], strict=True)) for kind, s in part.groupby("kind")}
        busy = {kind: length - idle_seconds(work.get(kind, []), window) for kind in KINDS if kind != "wait"}
        idle = idle_seconds(list(itertools.chain(*work.values())), window) / length
        rows.append({"stage": stage, "replica": replica, "seconds": length, "idle": idle, **busy})
    return pd.DataFrame(rows)


def collect(
    variant: str, answers: Sequence[Mapping[str, Any]], iterations: Sequence[int]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Timelines of one variant's counted iterations.

    Args:
        answers: per rank ``stage``, ``replica`` and ``iterations``, whose items hold ``iteration`` and ``spans``.

    Returns:
        :func:`shares` of all ``iterations``; :func:`classify` of the one with the median duration (of two in the middle
        the shorter, of equals the first). Both with the columns ``variant`` and ``iteration`` in front.
    """
    timelines = {}
    for number in iterations:
        spans = [
            {**answer, "spans": iteration["spans"]}
            for answer in answers
            for iteration in answer["iterations"]
            if iteration["iteration"] == number
        ]
        timelines[number] = classify(spans)

    def labelled(table: pd.DataFrame, iteration: int) -> pd.DataFrame:
        return table.assign(variant=variant, iteration=iteration)[["variant", "iteration", *table]]

    every = [labelled(shares(spans), number) for number, spans in timelines.items()]
    ordered = sorted(timelines, key=lambda number: (float(timelines[number]["end"].max()), number))
    median = ordered[(len(ordered) - 1) // 2]
    return pd.concat(every, ignore_index=True), labelled(timelines[median], median)


def chrome_trace(spans: pd.DataFrame) -> str:
    """Spans (:func:`collect`) in Chrome's trace format, which Perfetto opens: a process per variant, a thread per
    rank, times in microseconds."""
    events: list[dict[str, Any]] = []
    for process, (variant, rows) in enumerate(spans.groupby("variant", sort=False)):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": variant}})
        for thread, ((stage, replica), rank) in enumerate(rows.groupby(["stage", "replica"])):
            place = {"pid": process, "tid": thread}
            name = {"name": f"stage {stage}, replica {replica}"}
            events.append({"ph": "M", "name": "thread_name", **place, "args": name})
            for row in rank.itertuples():
                label = row.kind if pd.isna(row.micro_batch) else f"{row.kind} {row.micro_batch}"
                times = {"ts": round(1e6 * row.start, 1), "dur": round(1e6 * (row.end - row.start), 1)}
                events.append({"ph": "X", "name": label, "cat": row.kind, **place, **times})
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"
