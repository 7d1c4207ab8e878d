"""Optimus-CC under Megatron-Core: fused embedding synchronisation, selective stages, and all of it; one launch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.runtime.channel import all_reduce_bytes
from tests.integration import optimus_cases
from tests.integration.optimus_cases import LAYOUTS, POISONED, SHORT, STEPS
from tests.workers import run_workers

pytestmark = pytest.mark.slow

Ranks = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results() -> dict[str, Ranks]:
    per_rank = run_workers(4, optimus_cases.all_cases)
    return {case: [rank[case] for rank in per_rank] for case in per_rank[0]}


def losses(ranks: Ranks) -> Tensor:
    last = max(item["stage"] for item in ranks)
    return torch.tensor([item["losses"] for item in ranks if item["stage"] == last], dtype=torch.float64).mean(0)


def copies_are_identical(ranks: Ranks) -> int:
    """How many pairs of copies there were, of replicas and of the tied weight; all equal bit for bit."""
    seen: dict[Any, Tensor] = {}
    again = 0
    for rank in ranks:
        for key, weight in rank["copies"].items():
            assert torch.equal(seen.setdefault(key, weight), weight), key
            again += seen[key] is not weight
    return again


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_equals_two_steps(results: dict[str, Ranks], layout: str) -> None:
    two_steps, fused = results[f"{layout}/False"], results[f"{layout}/True"]
    assert losses(fused).shape == (STEPS,)
    assert (losses(fused) - losses(two_steps)).abs().max() < 1e-6 * losses(two_steps).max()
    for one, other in zip(fused, two_steps, strict=True):
        assert torch.allclose(one["weights"], other["weights"], rtol=1e-5, atol=1e-5)
    assert copies_are_identical(fused) > 0
    assert losses(fused)[-3:].mean() < losses(fused)[:3].mean() - 0.02


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_bytes_of_the_one_reduction_count(results: dict[str, Ranks], layout: str) -> None:
    replicas = 1 if layout == "tensor" else 2
    for one, other in zip(results[f"{layout}/True"], results[f"{layout}/False"], strict=True):
        assert (one["tied"] > 0) == (layout != "untied")
        more = all_reduce_bytes(one["tied"], 2 * replicas) - all_reduce_bytes(one["tied"], replicas)
        assert [a - b for a, b in zip(one["sent"], other["sent"], strict=True)] == [more] * STEPS


def test_a_gradient_of_the_embedding_that_is_not_finite_skips_the_step(results: dict[str, Ranks]) -> None:
    for one, other in zip(results["poisoned"], results["without"], strict=True):
        assert one["skipped"] == len(POISONED) and other["skipped"] == 0
        assert torch.equal(one["weights"], other["weights"])
        assert one["weights"].isfinite().all()


@pytest.mark.parametrize("case", ["selective", "selective overlap"])
def test_later_stages_send_what_they_would_without_compression(results: dict[str, Ranks], case: str) -> None:
    everywhere, dense = results["all stages"], results["/False"]
    for one, compressed, plain in zip(results[case], everywhere, dense, strict=True):
        assert len(one["sent"]) == SHORT
        if one["stage"] == 0:
            assert one["sent"] == compressed["sent"] and max(one["sent"]) < min(plain["sent"])
        else:
            assert one["sent"] == plain["sent"][:SHORT] and min(one["sent"]) > max(compressed["sent"])
            assert set(one["sent"]) == {all_reduce_bytes(one["size"], 2)}
    assert copies_are_identical(results[case]) > 0


@pytest.mark.parametrize("case", ["whole", "whole overlap"])
def test_the_whole_method_trains(results: dict[str, Ranks], case: str) -> None:
    curve = losses(results[case])
    assert curve.isfinite().all()
    assert curve[-4:].mean() < curve[:4].mean() - 0.05
    assert copies_are_identical(results[case]) > 0
    for one, fused in zip(results[case], results["/True"], strict=True):
        assert one["skipped"] == 0
        # Stage 0 compresses all but the embedding, stage 1 nothing.
        for sent, plain in itertools.zip_longest(one["sent"][:STEPS], fused["sent"]):
            assert sent < plain if one["stage"] == 0 else sent == plain


def test_what_cannot_work_is_refused_on_every_rank(results: dict[str, Ranks]) -> None:
    for sharded, direct in results["refused"]:
        assert sharded == (
            "fused_embedding does not work with use_distributed_optimizer = True (in fused_embedding); "
            "set fused_embedding to false"
        )
        assert direct.startswith("finalize_model_grads was called directly")
