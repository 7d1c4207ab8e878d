"""The simulated step: its parts by hand, its limits, and that compression saves what the reduction cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.simulation import cluster_step
from experiments.simulation.cluster_model import load_model, sweep
from experiments.simulation.cost import Cost
from tests.unit.test_cluster_model import toy

OVERLAPS = (False, True)


def test_forward_by_hand() -> None:
    model = toy()
    # One layer a stage, hidden 64, ffn 256, split over two ranks: 12 * 64^2 / 2 weights; 512 / 2 x 64 logits.
    weights, attention, tokens, speed = 12 * 64 * 64 / 2, 4 * 32 * 64 / 2, 8 * 32, 15.7e12 * 0.5
    first, last = (cluster_step.forward_seconds(model, stage) for stage in model.stages)
    assert first == pytest.approx(tokens * (2 * weights + attention) / speed, rel=1e-12)
    assert last - first == pytest.approx(tokens * 2 * 256 * 64 / speed, rel=1e-12)


def test_the_parts_of_a_step_by_hand() -> None:
    model = replace(toy(), micro_batches=1)
    forward = [cluster_step.forward_seconds(model, stage) for stage in model.stages]
    alpha, speed = 14e-6, 10e9 / 8 / 2
    travel = alpha + 4 * 8 * 32 * 64 / 2 / speed
    adam = 7 * 4 * max(stage.parameters for stage in model.stages) / (900e9 * 0.8)
    embedding = 2 * alpha + 4 * 512 * 64 / 2 / speed
    # One micro-batch through both stages and back, then the reduction of stage 0, which ends last.
    pipeline = 3 * sum(forward) + 2 * travel
    found = cluster_step.step(model, model.none, overlap=False)
    assert found.computed[0] == pytest.approx(pipeline, rel=1e-9)
    expected = pipeline + model.none(model.stages[0]).communication + adam + embedding
    assert found.seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("method", "collectives"), [("none", 1), ("bf16", 1), ("int8", 1), ("powersgd_r64", 2)])
def test_every_bucket_pays_the_latency_of_all_its_collectives(method: str, collectives: int) -> None:
    """Of PowerSGD the second all-reduce waits for what the first one gives, in every bucket."""
    model = next(sweep(load_model("gpt2_12p1b_h100")))
    stage, cost = model.stages[0], model.methods()[method][1]
    found = cluster_step.buckets(model, stage, cost(stage))
    one = 2 * (model.shape.data - 1) * model.latency
    assert len(found) > 1 and one > 0
    messages = [message for bucket in found for message in bucket.messages]
    assert sum(message.latency for message in messages) == pytest.approx(len(found) * collectives * one, rel=1e-9)
    moved = sum(message.seconds for message in messages)
    assert moved == pytest.approx(cost(stage).communication - collectives * one, rel=1e-9)


@pytest.mark.parametrize("study", ["gpt2_345m", "gpt2_2p5b_v100", "gpt2_12p1b_h100"])
def test_limits(study: str) -> None:
    for model in sweep(load_model(study)):
        free = {o: cluster_step.step(model, lambda _: Cost(0.0, 0.0), overlap=o).seconds for o in OVERLAPS}
        none = {o: cluster_step.step(model, model.none, overlap=o).seconds for o in OVERLAPS}
        assert free[True] == pytest.approx(free[False])
        assert free[True] <= none[True] <= none[False]
        share = cluster_step.uncompressed_reduction_share(model)
        assert share == pytest.approx(1 - free[False] / none[False])
        for _, cost in model.methods().values():
            assert cluster_step.step(model, cost, overlap=False).seconds >= free[False]
        # The quicker the device, the more of a step is the reduction.
        shares = [
            cluster_step.uncompressed_reduction_share(model.assuming("compute", "step_efficiency", value))
            for value in (0.2, 0.5, 0.9)
        ]
        assert shares == sorted(shares)
