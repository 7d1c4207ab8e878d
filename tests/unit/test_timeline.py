"""Timelines: the recorder behind Megatron's timers, the arithmetic of idle shares, kinds of spans, the trace."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.bench import timeline
from experiments.bench.timeline import Recorder, idle_seconds, without

ticks = st.integers(0, 40)
intervals = st.lists(st.tuples(ticks, ticks).map(lambda pair: (min(pair), max(pair))), max_size=8)


def cells(work: list[tuple[Any, Any]]) -> set[int]:
    """The unit cells that intervals with whole ends cover."""
    return {cell for start, end in work for cell in range(int(start), int(end))}


@given(intervals, ticks, st.integers(1, 20))
def test_moments_are_counted_once(work: list[tuple[int, int]], start: int, length: int) -> None:
    window = (start, start + length)
    idle = cells([window]) - cells(work)
    assert cells(without(window, work)) == idle and idle_seconds(work, window) == len(idle)


def test_recorder_keeps_megatrons_spans_without_meeting_other_ranks() -> None:
    timers = Recorder()
    timers("forward-backward", log_level=1).start(barrier=True)  # no process group: a barrier would fail
    timers("forward-compute", log_level=2).start()
    timers("forward-compute").stop()
    with timers.span("optimizer"):
        pass
    timers("forward-backward").stop()
    names = [name for name, _, _ in timers.spans]
    assert names == ["forward-compute", "optimizer", "forward-backward"]
    inner, step, outer = timers.take()
    assert outer[1] <= inner[1] <= inner[2] <= step[1] <= step[2] <= outer[2]
    assert timers.take() == []
    with pytest.raises(KeyError):
        timers("forward-compute").stop()


# Two stages, one micro-batch. Stage 1 is in its call at 1, the message can be sent at 3 and has arrived at 4; the
# gradient likewise at 6 and 7. Stage 1's reduction lasts 6 to 8, of which the link 7 to 8; stage 0's 9 to 10.
FIRST = [
    ("forward-compute", 0, 3),
    ("forward-send", 3, 4),
    ("backward-recv", 4, 7),
    ("backward-compute", 7, 9),
    ("reduction", 9, 10),
    ("all-grads-sync", 9, 10),
    ("embedding-grads-all-reduce", 10, 12),
    ("optimizer", 12, 13),
]
SECOND = [
    ("forward-recv", 1, 4),
    ("forward-compute", 4, 5),
    ("backward-compute", 5, 6),
    ("backward-send", 6, 7),
    ("link", 8, 9),
    ("reduction", 7, 9),
    ("all-grads-sync", 7, 10),
    ("embedding-grads-all-reduce", 11, 12),
    ("optimizer", 12, 13),
]


def answers(offset: float = 0.0, stretch: float = 1.0) -> list[dict[str, Any]]:
    return [
        {
            "stage": stage,
            "replica": 0,
            "spans": [[name, offset + stretch * a, offset + stretch * b] for name, a, b in spans],
        }
        for stage, spans in enumerate((FIRST, SECOND))
    ]


def rows(spans: pd.DataFrame, stage: int) -> list[tuple[str, float, float]]:
    own = spans[spans["stage"] == stage]
    return list(zip(own["kind"], own["start"], own["end"], strict=True))


def test_messages_move_once_both_ends_are_in_the_call() -> None:
    spans = timeline.classify(answers(offset=100.0))
    assert rows(spans, 0) == [
        ("forward", 0, 3),
        ("pipeline", 3, 4),
        ("wait", 4, 6),
        ("pipeline", 6, 7),
        ("backward", 7, 9),
        ("compress", 9, 10),
        ("wait", 10, 11),
        ("embedding", 11, 12),
        ("optimizer", 12, 13),
    ]
    assert rows(spans, 1) == [
        ("wait", 1, 3),
        ("pipeline", 3, 4),
        ("forward", 4, 5),
        ("backward", 5, 6),
        ("pipeline", 6, 7),
        ("compress", 7, 8),
        ("reduce", 8, 9),
        ("wait", 9, 10),
        ("embedding", 11, 12),
        ("optimizer", 12, 13),
    ]
    assert set(spans.loc[spans["micro_batch"].notna(), "kind"]) == {"forward", "backward"}


def test_shares_add_up() -> None:
    found = timeline.shares(timeline.classify(answers())).set_index("stage")
    assert found.loc[0, "idle"] == pytest.approx(3 / 13) and found.loc[1, "idle"] == pytest.approx(5 / 13)
    parts = found[[kind for kind in timeline.KINDS if kind != "wait"]].sum(axis=1)
    # No two spans of a rank overlap, so that what is not idle is the sum of its kinds.
    assert (parts / found["seconds"]).tolist() == pytest.approx((1 - found["idle"]).tolist())


def test_the_iteration_of_median_duration_is_shown_and_all_are_counted() -> None:
    ranks = answers(), answers(stretch=3.0), answers(stretch=2.0)
    iterations = [
        {**rank, "iterations": [{"iteration": at, "spans": ranks[at - 1][place]["spans"]} for at in (1, 2, 3)]}
        for place, rank in enumerate(answers())
    ]
    shares, spans = timeline.collect("dac", iterations, [1, 2, 3])
    assert sorted(shares["seconds"].unique()) == [13, 26, 39] and len(shares) == 6
    assert set(spans["iteration"]) == {3} and spans["end"].max() == 26
    assert shares.groupby("stage")["idle"].nunique().tolist() == [1, 1]
