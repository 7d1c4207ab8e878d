"""Predicted training steps, also with pipeline stages, and the programs that compare them with measured ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench import network, pipeline, steps
from experiments.bench.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from experiments.bench.gpt import Size
from experiments.bench.steps import Compute, Link, Links, Messages, overhead_of, predict
from tests.workers import run_workers


def line(latency: float, bandwidth: float) -> Link:
    """Bytes that take as long wherever in a message they are."""
    return Link.through([(bandwidth, latency + 1.0)], latency)


COMPUTE = Compute(forward=1.0, backward=2.0, rest=0.25, complete=(0.25, 1.0))
LINKS = {ALL_REDUCE: line(0.1, 10.0), ALL_TO_ALL: line(0.2, 20.0), ALL_GATHER: line(0.0, 5.0)}
seconds = st.floats(0.01, 10.0)


@st.composite
def computes(draw: st.DrawFn) -> Compute:
    complete = sorted(draw(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)))
    return Compute(forward=draw(seconds), backward=draw(seconds), rest=draw(seconds), complete=tuple(complete))


def reduced(*buckets: tuple[float, ...]) -> Messages:
    """All-reduces."""
    return tuple(tuple((ALL_REDUCE, sent) for sent in bucket) for bucket in buckets)


def test_a_link_has_its_timed_messages_and_is_slower_behind_the_burst() -> None:
    found = Link.through([(4e6, 5.0), (1e6, 0.5), (2e6, 2.0)], latency=0.7)
    timed = {0.0: 0.5, 5e5: 0.5, 1e6: 0.5, 1.5e6: 1.25, 2e6: 2.0, 3e6: 3.5, 4e6: 5.0, 6e6: 8.0}
    assert {size: found.seconds(size) for size in timed} == pytest.approx(timed)
    assert found.bandwidth == pytest.approx(2e6 / 3)


def test_steps_counted_by_hand() -> None:
    # 10 bytes after a quarter of backward (1.5 s) take 1.1 s, at half the speed until backward ends at 3, and so until
    # 3.35; 5 bytes after all of backward 0.6 s.
    assert predict(COMPUTE, reduced((10.0,), (5.0,)), LINKS) == pytest.approx(3.95 + 0.25)
    # 40 bytes take until 3 + 4.1 - 0.75 = 6.35, and the link is not free before.
    assert predict(COMPUTE, reduced((40.0,), (5.0,)), LINKS) == pytest.approx(6.95 + 0.25)
    # Two messages of a bucket, and 1.2 s of overhead: a quarter of it in the first bucket, 0.1 s before, between and
    # after its messages, and 0.3 s each in the second. Backward ends at 3 + 0.2 + 0.6; the second bucket's messages
    # begin at 3 + 0.2 + 0.3 and take 0.2 + 0.3 + 0.2, until 4.2; 0.1 + 0.3 come after all.
    assert predict(COMPUTE, reduced((2.0, 2.0), (1.0, 1.0)), LINKS, 1.2) == pytest.approx(4.2 + 0.4 + 0.25)
    # All of it before, where nothing is sent.
    assert predict(COMPUTE, ((), ()), LINKS, 0.4) == pytest.approx(3.0 + 0.4 + 0.25)
    # An exchange of 0.7 s and a gathering of 0.8 s.
    sent = ((), ((ALL_TO_ALL, 10.0), (ALL_GATHER, 4.0)))
    assert predict(COMPUTE, sent, LINKS) == pytest.approx(3.0 + 0.7 + 0.8 + 0.25)
    assert predict(COMPUTE, ((), ()), LINKS) == 3.25


@given(computes(), st.lists(st.floats(0, 1e3), min_size=5, max_size=5), seconds, st.floats(0, 100))
def test_the_overhead_explains_the_step_that_it_was_taken_from(
    compute: Compute, sent: list[float], latency: float, more: float
) -> None:
    messages = reduced(*((size,) for size in sent[: len(compute.complete)]))
    links = {ALL_REDUCE: line(latency, 100.0)}
    alone = predict(compute, messages, links)
    extra = overhead_of(compute, messages, links, alone + more)
    assert predict(compute, messages, links, extra) == pytest.approx(alone + more)
    assert overhead_of(compute, messages, links, 0.0) == 0
    # Where nothing is sent, all of it is found again.
    nothing: Messages = tuple(() for _ in messages)
    step = compute.forward + compute.backward + compute.rest + more
    assert predict(compute, nothing, links, overhead_of(compute, nothing, links, step)) == pytest.approx(step)


def counted() -> dict[str, tuple[list[list[Any]], int | None]]:
    """By method what a rank sent in a step, message by message, and as the method counts it."""
    rank, answers = network.Rank(), {}
    with mock.patch.object(network, "join"):
        rank.start(Size(layers=1, hidden=32, heads=2, vocabulary=64, sequence=16, batch=2))
    for name in ("powersgd_r4", "powersgd_r32_int8", "int8", "topk"):
        options = steps.METHODS[name]
        rank.prepare(name, options | {"rank": 4} if "rank" in options else options)
        answers[name] = rank.messages(name), rank.methods[name].bytes
    return answers


def test_messages_of_real_workers_are_what_the_methods_count() -> None:
    """Two workers without a testbed: what is noted message by message is what the engine says that it sent."""
    for answers in run_workers(2, counted):
        for name, (messages, total) in answers.items():
            sent = [message for bucket in messages for message in bucket]
            assert sum(size for _, size in sent) == total > 0, name
            assert all(size > 0 for _, size in sent)
            # What is quantised is exchanged, summed by its owner, and gathered.
            small = name.endswith("int8")
            assert ({ALL_TO_ALL, ALL_GATHER} <= {kind for kind, _ in sent}) == small, name
            if name.startswith("powersgd"):
                assert all(len(bucket) >= 2 for bucket in messages), "P and Q"


# ---- with pipeline stages

FREE_LINK = line(0.0, 1e12)
STAGED = pipeline.Compute(forward=(1.0, 1.0), backward=(2.0, 2.0), rest=0.25)


def links(replicas: Link = FREE_LINK, between: Link = FREE_LINK) -> Links:
    """An exchange takes as long as an all-reduce, and a gathering twice as long."""
    twice = Link(tuple((size, 2 * taken) for size, taken in replicas.points))
    return {ALL_REDUCE: replicas, ALL_TO_ALL: replicas, ALL_GATHER: twice, pipeline.SEND: between}


def traffic(*sent: tuple[float, ...], activations: float = 0.0, embedding: float = 0.0) -> pipeline.Traffic:
    """All-reduces."""
    reduced = tuple(tuple((ALL_REDUCE, bytes_) for bytes_ in stage) for stage in sent)
    return pipeline.Traffic(activations=activations, sent=reduced, embedding=embedding)


def test_pipelined_steps_counted_by_hand() -> None:
    # 1F1B of two stages that share the cores: all passes one after another.
    assert pipeline.predict(STAGED, traffic((), ()), links(), 4) == pytest.approx(24 + 0.25)
    slow = line(0.1, 10.0)
    # Stage 0 ends last, and its two messages follow: 0.1 + 2 each. Stage 1's are over before.
    sent = traffic((20.0, 20.0), (20.0,))
    assert pipeline.predict(STAGED, sent, links(replicas=slow), 4) == pytest.approx(24 + 4.2 + 0.25)
    gathered = replace(sent, sent=(((ALL_TO_ALL, 20.0), (ALL_GATHER, 20.0)), ()))
    assert pipeline.predict(STAGED, gathered, links(replicas=slow), 4) == pytest.approx(24 + 2.1 + 4.2 + 0.25)
    # Compression comes between, the embedding's sum after all.
    sent = traffic((20.0,), (), embedding=5.0)
    assert pipeline.predict(STAGED, sent, links(replicas=slow), 4, 0.5) == pytest.approx(24 + 0.5 + 2.1 + 0.6 + 0.25)
    # With two micro-batches, whose activations take 0.3 s, until 1.3; then a forward pass of both until 3.3. Stage 1's
    # backward ends at 5.3, its gradients have come at 5.6. Stage 0's backward and both passes of stage 1 end at 9.6 and
    # 10.6; gradients at 10.9, and stage 0 works until 12.9.
    sent = traffic((), (), activations=2.0)
    assert pipeline.predict(STAGED, sent, links(between=slow), 2) == pytest.approx(12.9 + 0.25)


def measured_pipeline(plan: pipeline.Plan, compute: pipeline.Compute, factor: float) -> steps.Measurements:
    """Steps as the model has them, those under a limit ``factor`` times as long; a round that is out of the way."""
    sent = {name: [[(ALL_REDUCE, 1e6)], [(ALL_REDUCE, 2e6), (ALL_REDUCE, 1e6)]] for name in ("none", "bf16")}
    activations = 4.0 * plan.sequence * plan.micro_batch * plan.hidden
    embedding = 4.0 * pipeline.VOCABULARY * plan.hidden
    bytes_ = traffic((1e6,), (2e6, 1e6), activations=activations, embedding=embedding)
    # Longer than the work in them, for ranks wait for a core.
    passes = {f"forward_{stage}": 1.7 * compute.forward[stage] for stage in range(pipeline.STAGES)}
    passes |= {f"backward_{stage}": 1.7 * compute.backward[stage] for stage in range(pipeline.STAGES)}
    rounds: list[dict[str, Any]] = []
    probes: list[dict[str, Any]] = []
    for rate in (0.0, *plan.rates):
        link = line(0.01, 1e5 * rate or 1e9)
        for kind, size in itertools.product((ALL_REDUCE, pipeline.SEND), (1e5, 1e6)):
            probes.append({"mbit_per_s": rate, "kind": kind, "bytes": size, "seconds": link.seconds(size)})
        for count, name in itertools.product(plan.micro_batches if rate else pipeline.CALIBRATED, sent):
            overhead = 0.0 if name == "none" else 0.3
            seconds = pipeline.predict(compute, bytes_, links(link, link), count, overhead) * (factor if rate else 1)
            place = {"mbit_per_s": rate, "micro_batches": count, "method": name, **passes}
            rounds += [place | {"round": i, "seconds": seconds * late} for i, late in enumerate((1.0, 1.0, 5.0))]
    return steps.Measurements(pd.DataFrame(rounds), pd.DataFrame(probes), sent)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.floats(0.01, 10.0), min_size=5, max_size=5), st.floats(0.5, 2.0))
def test_the_table_of_pipelines_finds_what_the_steps_were_made_of(times: list[float], factor: float) -> None:
    plan = pipeline.Plan(rates=(20.0, 200.0), micro_batches=(2, 3))
    compute = pipeline.Compute(forward=(times[0], times[1]), backward=(times[2], times[3]), rest=times[4])
    data = measured_pipeline(plan, compute, factor)
    table = pipeline.tables(plan, data)["pipeline"]
    assert len(table) == 2 * (2 + 2 * 2)
    assert set(table.loc[table["mbit_per_s"] == 0, "used"]) == {"calibration"}
    limited = table[table["used"] == "validation"]
    assert (limited["mbit_per_s"] > 0).all()
    assert (limited["error"] - (1 / factor - 1)).abs().max() < 1e-6
    overhead = table.set_index("method")["seconds_overhead"]
    assert overhead["bf16"].to_numpy() == pytest.approx(0.3, rel=1e-6)
    assert pipeline.record(data, table)["summary"]["configurations"] == len(limited)
