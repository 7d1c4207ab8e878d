"""Counting of backward transfers; that Megatron counts the same is in ``tests/integration/test_pipeline.py``."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgc.megatron.pipeline_schedule import BackwardSchedule


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
