"""Counting of backward transfers; that Megatron counts the same is in ``tests/integration/test_pipeline.py``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgc.megatron.pipeline_schedule import BackwardSchedule


def test_one_forward_one_backward() -> None:
    schedule = BackwardSchedule(stages=4)
    assert [schedule.warmup(stage, 8) for stage in range(4)] == [3, 2, 1, 0]
    assert [schedule.warmup(stage, 2) for stage in range(4)] == [2, 2, 1, 0]
    assert [schedule.sent(stage, 3) for stage in range(4)] == [[], [0] * 3, [0] * 3, [0] * 3]
    assert [schedule.cooldown(stage, 8) for stage in range(3)] == [3, 2, 1]
    assert [schedule.cooldown(stage, 2) for stage in range(3)] == [2, 2, 1]


def test_interleaved() -> None:
    schedule = BackwardSchedule(stages=2, chunks=2, group=2)
    assert schedule.steps(4) == [1, 1, 0, 0, 1, 1, 0, 0]
    assert BackwardSchedule(stages=2, chunks=2, group=3).steps(5) == [1, 1, 1, 0, 0, 0, 1, 1, 0, 0]
    assert [schedule.warmup(stage, 4) for stage in (0, 1)] == [4, 2]
    assert schedule.sent(1, 4) == schedule.steps(4)
    assert schedule.sent(0, 4) == [1, 1, 1, 1]
    assert [schedule.cooldown(stage, 4) for stage in (0, 1)] == [4, 2]


@given(
    stages=st.integers(2, 6),
    chunks=st.one_of(st.none(), st.integers(1, 4)),
    more=st.integers(0, 3),
    micro_batches=st.integers(1, 20),
)
def test_both_ends_of_a_link_see_the_same_gradients(
    stages: int, chunks: int | None, more: int, micro_batches: int
) -> None:
    schedule = BackwardSchedule(stages=stages, chunks=chunks, group=stages + more)
    steps, count = schedule.steps(micro_batches), chunks or 1
    assert sorted(steps) == sorted(list(range(count)) * micro_batches)
    for receiver in range(stages):
        sender, last = (receiver + 1) % stages, receiver == stages - 1
        sent = schedule.sent(sender, micro_batches)
        # Chunk c of the last stage is followed by chunk c + 1 of the first one.
        needed = [c for c in steps if not (last and c == count - 1)]
        assert [c - 1 if last else c for c in sent] == needed
        assert 0 <= schedule.cooldown(receiver, micro_batches) <= len(sent)
    one = BackwardSchedule(stages=1, chunks=chunks, group=1)
    assert one.sent(0, micro_batches) == []
