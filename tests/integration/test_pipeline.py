"""Compressed backward traffic under Megatron-Core: four gloo processes, 1F1B and interleaved, one launch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration import pipeline_cases
from tests.integration.pipeline_cases import RANK, SHORT
from tests.workers import run_workers

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]
TOKENS, HIDDEN = 32, 48  # of a micro-batch
DENSE, FACTORS = 4 * TOKENS * HIDDEN, 4 * RANK * (TOKENS + HIDDEN)  # bytes of a gradient


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    per_rank = run_workers(4, pipeline_cases.all_cases)
    return {case: [rank[case] for rank in per_rank] for case in per_rank[0]}


def losses(ranks: Ranks) -> Tensor:
    """Mean loss per iteration over the replicas of the last stage."""
    last = max(item["stage"] for item in ranks)
    return torch.tensor([item["losses"] for item in ranks if item["stage"] == last], dtype=torch.float64).mean(0)


def same_run(one: Ranks, other: Ranks, iterations: int) -> bool:
    return torch.equal(losses(one)[:iterations], losses(other)[:iterations])


def traffic(ranks: Ranks, key: str) -> list[int]:
    return [item["traffic"][key] for item in ranks]


def not_delivered(ranks: Ranks) -> list[tuple[Tensor, Tensor]]:
    """For every link of a pipeline of one rank a stage: what was sent and has not arrived, and what is kept."""
    return [
        (
            sender["sent"] - receiver["received"],
            sum(error.double() for error in sender["state"]["errors"].values()),
        )
        for receiver, sender in itertools.pairwise(ranks)
    ]


def test_counting_is_megatrons(results: dict[str, Any]) -> None:
    assert min(results["compared"]) > 500


def test_every_case_learns(results: dict[str, Any]) -> None:
    for case in ("megatron", "full", "rank4", "epilogue", "bf16", "interleaved", "tp2"):
        curve = losses(results[case])
        assert torch.isfinite(curve).all(), case
        assert curve[-4:].mean() < curve[:4].mean() - 0.05, (case, curve)


def test_what_would_not_be_smaller_goes_as_megatron_sends_it(results: dict[str, Any]) -> None:
    ranks = results["too_large"]
    assert same_run(ranks, results["megatron"], SHORT)
    assert traffic(ranks, "sent_compressed") == traffic(ranks, "received_compressed") == [0] * 4
    assert traffic(ranks, "sent") == [0, 6, 6, 6] and traffic(ranks, "received") == [6, 6, 6, 0]
    assert [r["traffic_bytes"] for r in ranks] == traffic(ranks, "dense_bytes") == [0] + [6 * DENSE] * 3


@pytest.mark.parametrize("schedule", ["", "interleaved_"])
def test_full_rank_equals_no_compression(results: dict[str, Any], schedule: str) -> None:
    reference, full = results[f"{schedule}megatron"], results[f"{schedule}full"]
    assert (losses(full) - losses(reference)).abs().max() < 1e-5 * losses(reference).max()
    assert sum(traffic(full, "sent_compressed")) == sum(traffic(full, "sent")) > 0
    different = [not torch.equal(f["weights"], r["weights"]) for f, r in zip(full, reference, strict=True)]
    assert any(different), "nothing was factored: the comparison would be empty"


def test_what_was_sent_is_what_arrived_plus_what_is_kept(results: dict[str, Any]) -> None:
    for case in ("rank4", "epilogue", "bf16"):
        for missing, kept in not_delivered(results[case]):
            assert kept.norm() > 0
            tolerance = 1e-4 if case == "bf16" else 1e-5
            assert (missing.flatten() - kept.flatten()).norm() < tolerance * kept.norm(), case


def test_without_error_feedback_more_is_lost(results: dict[str, Any]) -> None:
    assert not any(rank["state"]["errors"] for rank in results["no_feedback"])
    with_it, without = (not_delivered_norms(results[case]) for case in ("rank4", "no_feedback"))
    assert all(a < b for a, b in zip(with_it, without, strict=True)), (with_it, without)


def not_delivered_norms(ranks: Ranks) -> list[float]:
    return [
        float((sender["sent"] - receiver["received"]).norm() / sender["sent"].norm())
        for receiver, sender in itertools.pairwise(ranks)
    ]


def test_compression_sends_less_and_is_counted(results: dict[str, Any]) -> None:
    for case, message, dense in (("rank4", FACTORS, DENSE), ("bf16", FACTORS // 2, DENSE // 2)):
        ranks = results[case]
        assert [r["traffic_bytes"] for r in ranks] == [0] + [6 * message] * 3
        assert traffic(ranks, "dense_bytes") == [0] + [6 * dense] * 3
        for rank in ranks[1:]:
            assert 0 < rank["relative_error"] < 1
            assert rank["seconds"][0] > 0
        assert ranks[0]["relative_error"] is None
    assert not same_run(results["rank4"], results["megatron"], SHORT)


@pytest.mark.parametrize(
    ("case", "sent", "compressed"),
    [
        # Receivers are stages 0, 1 and 2, with 3, 2 and 1 micro-batches of warm-up.
        ("epilogue", [0, 6, 6, 6], [0, 3, 2, 1]),
        ("epilogue_few", [0, 2, 2, 2], [0, 2, 2, 1]),
        # Ranks are by stage 0, 0, 1, 1. Warm-up is 4 steps on stage 0 and 2 on stage 1, chunk 1 of which starts
        # from the loss; six micro-batches of two chunks, of which stage 0 sends the second one.
        ("interleaved_epilogue", [6, 6, 12, 12], [2, 2, 4, 4]),
        ("interleaved_epilogue_overlap", [6, 6, 12, 12], [2, 2, 4, 4]),
    ],
)
def test_the_epilogue_is_exactly_the_receivers_cooldown(
    results: dict[str, Any], case: str, sent: list[int], compressed: list[int]
) -> None:
    ranks = results[case]
    assert traffic(ranks, "sent") == sent
    assert traffic(ranks, "sent_compressed") == compressed
    by_stage: dict[tuple[int, int], dict[str, Any]] = {(r["stage"], r["replica"]): r for r in ranks}
    stages = max(stage for stage, _ in by_stage) + 1
    for (stage, replica), rank in by_stage.items():
        sender = by_stage[(stage + 1) % stages, replica]
        assert rank["flags"]["received"] == sender["flags"]["sent"], "both ends must agree on every transfer"
        assert traffic([rank], "received_compressed") == traffic([sender], "sent_compressed")
        count, low = sender["traffic"]["sent"], sender["traffic"]["sent_compressed"]
        if count:
            flags = sender["flags"]["sent"]
            assert flags == ([False] * (count - low) + [True] * low) * (len(flags) // count)
    assert not same_run(ranks, results["rank4"], SHORT)


@pytest.mark.parametrize("case", ["batch", "interleaved_batch", "interleaved_overlap", "interleaved_flush"])
def test_how_messages_are_posted_changes_nothing(results: dict[str, Any], case: str) -> None:
    reference = results["rank4" if case == "batch" else "interleaved"]
    assert same_run(results[case], reference, SHORT)
    assert any(rank["asynchronous"] for rank in results[case]) == (case not in ("batch", "interleaved_batch"))
    assert same_run(results["interleaved_epilogue"], results["interleaved_epilogue_overlap"], SHORT)


def test_every_model_chunk_has_its_own_state(results: dict[str, Any]) -> None:
    for rank in results["interleaved"]:
        # Stage 0 does not send for the model's first chunk.
        chunks = {"chunk1"} if rank["stage"] == 0 else {"chunk0", "chunk1"}
        assert set(rank["state"]["errors"]) == set(rank["state"]["factors"]) == chunks
        assert all(error.norm() > 0 for error in rank["state"]["errors"].values())
    assert not same_run(results["interleaved"], results["interleaved_megatron"], SHORT)


def test_copies_on_tensor_parallel_ranks_stay_equal(results: dict[str, Any]) -> None:
    first, second = sorted((r for r in results["tp2"] if r["stage"] == 1), key=lambda r: r["tensor"])
    assert (first["tensor"], second["tensor"]) == (0, 1)
    for key in ("errors", "factors"):
        assert torch.equal(first["state"][key]["chunk0"], second["state"][key]["chunk0"])
    assert torch.equal(first["sent"], second["sent"])
    received = [r["received"] for r in results["tp2"] if r["stage"] == 0]
    assert torch.equal(*received)
    assert not same_run(results["tp2"], results["tp2_megatron"], SHORT)


@pytest.mark.parametrize("case", ["resumed", "resumed_epilogue"])
def test_a_resumed_run_is_as_if_never_stopped(results: dict[str, Any], case: str) -> None:
    for rank in results[case]:
        straight, resumed, forgetful = rank["straight"], rank["resumed"], rank["forgetful"]
        assert repr(straight[0]) == repr(resumed[0])
        assert torch.equal(straight[1], resumed[1])
        assert not torch.equal(straight[1], forgetful[1]), "the state made no difference"


def test_what_is_not_finite_reaches_every_earlier_stage_and_no_state(results: dict[str, Any]) -> None:
    for rank in results["poisoned"]:
        # The last stage had its backward behind it, but shares the gradient of the embedding with the first one.
        assert not rank["finite"]
        assert rank["state_finite"]
        assert rank["skipped"] == (rank["stage"] > 0)
        assert rank["state_moved"] == (rank["stage"] > 0), "the five others went on"


def test_mistakes_are_answered_in_one_line(results: dict[str, Any]) -> None:
    for found in results["mistakes"]:
        for key in ("variable_seq_lengths", "use_ring_exchange_p2p", "mtp_standalone"):
            assert f"no pipeline traffic under {key}" in found[key] and f"set {key} to False" in found[key]
        assert "call begin_iteration" in found["not_begun"]
        assert "give it the num_microbatches" in found["unfinished"]
        assert not any("\n" in line for line in found.values())
