"""EDGC as a hook of PyTorch's DDP: gloo worlds of two and four ranks, one launch each for all cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration import ddp_cases
from tests.workers import run_workers

pytestmark = pytest.mark.slow

World = list[dict[str, Any]]
METHODS = ddp_cases.METHODS.keys() - set(ddp_cases.TIMED)


@pytest.fixture(scope="module")
def four() -> World:
    return run_workers(4, ddp_cases.world_of_four)


@pytest.fixture(scope="module")
def two(four: World) -> World:
    return run_workers(2, ddp_cases.world_of_two, [rank["saved"] for rank in four])


@pytest.fixture(scope="module", params=["two", "four"])
def world(request: pytest.FixtureRequest) -> World:
    ranks: World = request.getfixturevalue(request.param)
    return ranks


def each(world: World, kind: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """Every case of a kind with the results of all ranks."""
    return [(name, [rank[kind][name] for rank in world]) for name in world[0][kind]]


def equal(tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(tensors[0], other) and bool(tensors[0].isfinite().all()) for other in tensors)


def test_replicas_are_equal_in_every_case_of_the_matrix(world: World) -> None:
    assert len(world[0]["matrix"]) == 12
    for name, ranks in each(world, "matrix"):
        assert equal([rank["weights"] for rank in ranks]), name
        assert all(len(rank["losses"]) == {2: 100, 4: 60}[len(ranks)] for rank in ranks), name
        first, last = (sum(sum(rank["losses"][part]) for rank in ranks) for part in (slice(0, 8), slice(-8, None)))
        assert last < 0.7 * first, f"{name} does not learn"
        assert ranks[0]["buckets"] >= (5 if "unused True" in name else 4), name


def test_the_order_of_collectives_is_the_same_on_every_rank(world: World) -> None:
    for kind in ("matrix", "methods"):
        for name, ranks in each(world, kind):
            assert equal([rank["weights"] for rank in ranks]), name
            assert all(rank["calls"] == ranks[0]["calls"] for rank in ranks), name
            if "plain True" not in name:
                assert len(ranks[0]["calls"]) >= len(ranks[0]["losses"]), "nothing was recorded"


def test_delays_change_nothing(world: World) -> None:
    results = dict(each(world, "methods"))
    for method in METHODS:
        ranks, delayed = results[f"{method}, delays False"], results[f"{method}, delays True"]
        assert equal([rank["weights"] for rank in ranks + delayed]), method
        assert ranks[0]["calls"] == delayed[0]["calls"], method


def test_methods_differ_and_send_less(world: World) -> None:
    results = world[0]["methods"]
    dense = results["none, delays False"]
    for method in METHODS - {"none"}:
        result = results[f"{method}, delays False"]
        assert not torch.equal(result["weights"], dense["weights"]), method
        assert 0 < result["bytes"] < 0.8 * dense["bytes"], method


def test_the_controllers_rank_changes_on_the_way(world: World) -> None:
    ranks = world[0]["methods"]["edgc, delays False"]["ranks"]
    assert None in ranks and len(ranks) > 2, ranks


def test_no_compression_is_plain_ddp_bit_for_bit(world: World) -> None:
    for name, ranks in each(world, "methods"):
        if "plain False" in name:
            plain = dict(each(world, "methods"))[name.replace("plain False", "plain True")]
            assert equal([rank["weights"] for rank in ranks + plain]), name


def test_a_resumed_run_equals_one_that_never_stopped(world: World) -> None:
    for name, ranks in each(world, "resume"):
        for rank in ranks:
            assert rank["equal weights"] and rank["equal state"], name
            assert rank["saved state untouched"], f"{name}: training on changed a state that had been saved"
        assert equal([rank["weights"] for rank in ranks]), name
        assert ranks[0]["buckets of a new model"] < ranks[0]["buckets"], "buckets were not cut anew"


def test_ranks_with_different_numbers_of_batches(world: World) -> None:
    assert equal([rank["uneven"] for rank in world])


def test_a_group_that_is_not_the_world(four: World) -> None:
    weights = [rank["subgroups"] for rank in four]
    assert equal(weights[:2]) and equal(weights[2:])
    assert not torch.equal(weights[0], weights[2]), "the two jobs have different data"


def test_a_small_gpt_trains_as_with_torchs_hook(two: World) -> None:
    for rank in two:
        reference, _ = rank["gpt"]["torch"]
        uncompressed, _ = rank["gpt"]["plain"]
        assert len(reference) == 50 and reference[-1] < reference[0] - 0.3
        assert max(abs(a - b) for a, b in zip(reference, uncompressed, strict=True)) > 0.1
        for name in ("edgc", "edgc, many buckets"):
            losses, buckets = rank["gpt"][name]
            assert max(abs(a - b) for a, b in zip(reference, losses, strict=True)) < 1e-4, name
            assert buckets > 5 if "many" in name else buckets == 1


def test_reductions_finish_while_backward_goes_on(two: World) -> None:
    # Backward waits for the first bucket before its last: a hook without overlap would hang, and the launch with it.
    assert [rank["overlap"] for rank in two] == [[5] * 4] * 2


def test_two_models_do_not_disturb_each_other(two: World) -> None:
    for index in range(2):
        assert equal([rank["two models"][kind][index] for rank in two for kind in ("alone", "together")])


def test_a_gradient_that_is_not_finite_skips_the_step_everywhere(two: World) -> None:
    results = [rank["not finite"] for rank in two]
    bad = next(names for names in results[0]["layout"] if "second.weight" in names)
    for result in results:
        assert result["step was skipped"] and result["skipped"] == 1
        for name, finite in result["finite"].items():
            assert finite == (name not in bad), name
            for kind in ("errors", "factors"):
                # The step never was, also for buckets whose own gradients were finite.
                assert result.get(f"{kind} of {name}", True), f"{kind} of {name}"
        assert result["losses"][-1] < 0.8 * result["losses"][7], "training did not go on"
    assert equal([result["weights"] for result in results])


def test_a_rank_that_fails_ends_every_rank(two: World) -> None:
    start = "edgc: gradient reduction stopped on rank {} in iteration 4: "
    assert two[1]["lost rank"] == start.format(1) + "ValueError: out of luck"
    assert two[0]["lost rank"].startswith(start.format(0) + "RuntimeError: ")
    assert "\n" not in two[0]["lost rank"] and "and then" not in two[0]["lost rank"]


def test_the_thread_ends_with_its_handle_or_its_model(two: World) -> None:
    for rank in two:
        assert rank["ends"]["threads"] == [0, 1, 0, 1, 0]
        assert torch.equal(rank["ends"]["removed"], rank["ends"]["plain"])


def test_gradients_in_other_memory_orders(two: World) -> None:
    for rank in two:
        result = rank["shapes"]
        assert all(torch.equal(gradient, result["none"][name]) for name, gradient in result["plain"].items())
        errors = result["powersgd errors"]
        norm = float(result["plain"]["transposed"].norm())
        assert errors["transposed"] < 1e-5 * norm, "a gradient of rank 1 is sent whole"
        assert errors["convolution.weight"] > 0, "a convolution is compressed as a matrix"


def test_error_feedback_is_redistributed_in_another_world(two: World, four: World) -> None:
    saved = [rank["saved"]["edgc"]["engine"]["compressor"]["errors"] for rank in four]
    loaded = [rank["another world"]["errors"] for rank in two]
    assert set(loaded[0]) == set(saved[0]) and len(saved[0]) > 2
    for name in saved[0]:
        before = sum(errors[name].double() for errors in saved) / 4
        after = sum(errors[name].double() for errors in loaded) / 2
        assert float(before.norm()) > 0 or name == "never.weight"
        torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-9)
    for rank in two:
        assert len(rank["another world"]["warnings"]) == 1
        assert rank["another world"]["losses"][-1] < rank["another world"]["losses"][0]
    assert equal([rank["another world"]["weights"] for rank in two])


@pytest.mark.parametrize(
    ("mistake", "answer"),
    [
        ("not wrapped", "edgc.ddp.register was given a Linear; wrap the module"),
        ("twice", "the model is registered already; call handle.remove() before"),
        ("sparse", "module 0 has sparse gradients; build it with sparse=False"),
        ("complex", "parameter 0.weight has type torch.complex64; use real"),
        (
            "ranks differ",
            "config, iterations, options or parameters differ between ranks 0 and 1 (in edgc.ddp.register); give",
        ),
        (
            "pipeline",
            "pipeline.rank = 8 cannot be used (in edgc.ddp.register); a plain data-parallel job has one stage;",
        ),
        (
            "embedding",
            "fused_embedding = True cannot be used (in edgc.ddp.register); a plain data-parallel job has one",
        ),
        (
            "some stages",
            "compressed_stages = 0.5 cannot be used (in edgc.ddp.register); a plain data-parallel job has",
        ),
        ("no window", "window = 1000 leaves nothing to compress in 9 iterations; choose"),
        ("no scaler", "scaler = 65536.0 is not valid; give a GradScaler, or False"),
        ("python reducer", "wrapped with torch._dynamo.config.optimize_ddp = 'python_reducer', which has no buckets;"),
        ("optimizer in backward", "the model's optimizer steps in backward; step it after backward"),
        ("built-in hook", "the model already has a communication hook; register once"),
        ("another hook", "the model already has a communication hook; register once"),
        ("hook of the reducer", "DistributedDataParallel takes no hook: register_comm_hook or"),
        ("mixed precision", "the model already has a communication hook; register once per model, and wrap it without"),
        ("unfrozen", "DistributedDataParallel does not average 0.weight, 0.bias; wrap the model after they were made"),
        ("unfrozen on one rank", "DistributedDataParallel does not average 0.weight, 0.bias; wrap the model after"),
        ("fp16", "parameter weight is in fp16, and no scaler was given (in edgc.ddp.register); give the GradScaler as"),
        ("experts", "a plain data-parallel job has no expert parallelism; set compress_experts: true"),
        ("no iterations", "iterations = 0 is not valid; use a whole number of at least 1"),
        ("half an iteration", "iterations = 1000.0 is not valid; use a whole number of at least 1"),
        (
            "no losses",
            "policy loss was not told a training loss in the first 2 iterations; call add_loss(loss) after",
        ),
        ("inside", "edgc.ddp was called inside an iteration; call it after backward"),
        ("another rank", "but this is rank {rank}; save and load one state per rank"),
        (
            "another world",
            "is of rank {rank} of 4, but there are 2 ranks now; give every rank the list of all 4",
        ),
    ],
)
def test_mistakes_are_answered_in_one_line_on_every_rank(two: World, mistake: str, answer: str) -> None:
    for rank, results in enumerate(two):
        said = results["refusals"][mistake]
        assert answer.format(rank=rank) in said and "\n" not in said


def test_a_refusal_leaves_no_group_and_no_thread(two: World) -> None:
    for results in two:
        assert len(results["refusals"]["left"]) > 20
        assert {name: left for name, left in results["refusals"]["left"].items() if left != [0, 0]} == {}
