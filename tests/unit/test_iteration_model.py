"""The model of an iteration: known lengths of the schedules, no step before its input, slower is never quicker."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.simulation.iteration_model import (
    Bucket,
    Iteration,
    Message,
    Model,
    Stage,
    Step,
    order,
)

seconds = st.floats(0.01, 5)


def even(stages: int, micro_batches: int, *, forward: float = 1.0, backward: float = 2.0) -> Model:
    return Model(stages=(Stage(forward=forward, backward=backward),) * stages, micro_batches=micro_batches)


@given(stages=st.integers(1, 6), micro_batches=st.integers(1, 12), forward=seconds, backward=seconds)
def test_equal_stages_take_the_known_time(stages: int, micro_batches: int, forward: float, backward: float) -> None:
    found = even(stages, micro_batches, forward=forward, backward=backward).run()
    assert found.seconds == pytest.approx((micro_batches + stages - 1) * (forward + backward))
    # Stage i ends i backward times before stage 0: what DAC gives it to communicate longer.
    assert [found.computed[0] - end for end in found.computed] == pytest.approx(
        [index * backward for index in range(stages)]
    )


def test_order_of_two_stages() -> None:
    def text(steps: list[Step]) -> str:
        return " ".join(f"{s.kind[0]}{s.micro_batch}" for s in steps)

    assert text(order(0, 2, 3)) == "f0 f1 b0 f2 b1 b2"
    assert text(order(1, 2, 3)) == "f0 b0 f1 b1 f2 b2"


models = st.builds(
    lambda stages, micro, values: Model(
        stages=tuple(
            Stage(
                forward=values[4 * i],
                backward=values[4 * i + 1],
                to_next=values[4 * i + 2],
                to_previous=values[4 * i + 3],
                buckets=(
                    Bucket(share=0.5, compress=values[4 * i], messages=(Message(seconds=values[4 * i + 1]),)),
                    Bucket(decompress=values[4 * i + 2], messages=(Message(latency=values[4 * i + 3]),)),
                ),
            )
            for i in range(stages)
        ),
        micro_batches=micro * stages,
        overlap=micro % 2 == 0,
    ),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(seconds, min_size=20, max_size=20),
)


@given(model=models)
def test_every_step_once_and_never_before_its_input(model: Model) -> None:
    found = model.run()
    count = len(model.stages)
    ends = {(index, span.step): span.end for index, line in enumerate(found.spans) for span in line}
    assert len(ends) == 2 * count * model.micro_batches == sum(map(len, found.spans))
    for index, line in enumerate(found.spans):
        for before, after in pairwise(line):
            assert after.start >= before.end
        for span in line:
            forward = span.step.kind == "forward"
            source = index + (-1 if forward else 1)
            if 0 <= source < count:
                sender = model.stages[source]
                travel = sender.to_next if forward else sender.to_previous
                assert span.start >= ends[source, span.step] + travel - 1e-9
            elif not forward:
                assert span.start >= ends[index, Step("forward", span.step.micro_batch)]
    assert all(exposed >= 0 for exposed in found.exposed)


@given(model=models, which=st.integers(0, 3), more=st.floats(0.1, 3))
def test_a_slower_part_never_makes_the_iteration_shorter(model: Model, which: int, more: float) -> None:
    index = which % len(model.stages)
    stage = model.stages[index]
    slower = replace(
        stage,
        backward=stage.backward + more,
        to_next=stage.to_next + more,
        buckets=tuple(replace(b, messages=(*b.messages, Message(seconds=more))) for b in stage.buckets),
    )
    stages = (*model.stages[:index], slower, *model.stages[index + 1 :])
    assert replace(model, stages=stages).run().seconds >= model.run().seconds - 1e-9


def test_a_pause_between_messages_holds_up_what_follows() -> None:
    def ends(overlap: bool) -> tuple[float, float]:
        buckets = (
            Bucket(
                share=0.5, between=0.25, messages=(Message(seconds=1.0), Message(seconds=1.0), Message(seconds=1.0))
            ),
            Bucket(share=1.0, between=9.0, messages=(Message(seconds=0.5),)),
        )
        stage = Stage(forward=1.0, backward=2.0, buckets=buckets)
        found = Model(stages=(stage,), micro_batches=1, overlap=overlap).run()
        return found.computed[0], found.reduced[0]

    # Two pauses; beside backward they lengthen it. After a last message there is none.
    assert ends(overlap=True) == pytest.approx((3.0 + 0.5, 2.0 + 3.5 + 0.5))
    assert ends(overlap=False) == pytest.approx((3.0, 3.0 + 3.5 + 0.5))


def test_buckets_in_numbers() -> None:
    buckets = (
        Bucket(share=1.0, compress=0.5, decompress=0.25, messages=(Message(seconds=1.0), Message(latency=0.5))),
        Bucket(share=0.5, compress=0.5, messages=(Message(seconds=3.0),)),
    )
    model = Model(stages=(Stage(forward=1.0, backward=2.0, buckets=buckets),), micro_batches=2, after=0.1)

    def ends(found: Iteration) -> tuple[float, float, float]:
        return found.computed[0], found.reduced[0], found.seconds

    # Steps end at 6; one after another: 0.5 + 1 + 0.5, 0.5 beside them + 3, 0.25.
    assert ends(model.run()) == pytest.approx((6.0, 11.25, 11.35))
    # The later bucket of the model is complete at 5, is sent from 5.5 to 8.5; the other waits for the link.
    assert ends(replace(model, overlap=True).run()) == pytest.approx((7.0, 8.5 + 1.5 + 0.25, 10.35))
