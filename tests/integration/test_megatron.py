"""EDGC under Megatron-Core: four gloo processes, DP2 x PP2 and others, one launch for all cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.integration import megatron_cases
from tests.workers import run_workers

pytestmark = pytest.mark.slow

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results() -> Results:
    per_rank = run_workers(4, megatron_cases.all_cases)
    return {case: [rank[case] for rank in per_rank] for case in per_rank[0]}


def losses(result: list[dict[str, Any]]) -> torch.Tensor:
    """Mean loss per iteration over the replicas of the last stage."""
    last = max(item["stage"] for item in result)
    return torch.tensor([item["losses"] for item in result if item["stage"] == last], dtype=torch.float64).mean(0)


def test_every_case_learns(results: Results) -> None:
    for case, result in results.items():
        curve = losses(result)
        assert torch.isfinite(curve).all(), case
        assert curve[-4:].mean() < curve[:4].mean() - 0.05, (case, curve)


def test_replicas_are_identical_after_20_steps(results: Results) -> None:
    for case, result in results.items():
        if case == "edgc_tp2":
            groups = [[r["weights"] for r in result[first::2]] for first in (0, 1)]
        else:
            groups = megatron_cases.replicas(result)
        assert all(len(group) > 1 for group in groups)
        for group in groups:
            assert all(torch.equal(group[0], other) for other in group[1:]), case


def test_no_compression_is_megatrons_own_reduction(results: Results) -> None:
    assert torch.equal(losses(results["plain"]), losses(results["none"]))


def test_overlap_changes_nothing(results: Results) -> None:
    for case in ("none", "powersgd"):
        assert torch.equal(losses(results[case]), losses(results[f"{case}_overlap"])), case


def test_two_runs_give_identical_losses(results: Results) -> None:
    assert torch.equal(losses(results["powersgd"]), losses(results["powersgd_again"]))


def test_full_rank_equals_no_compression(results: Results) -> None:
    reference, full = losses(results["none"]), losses(results["full_rank"])
    assert (full - reference).abs().max() < 1e-5 * reference.max()
    assert not torch.equal(full, reference), "nothing was factored: the comparison would be empty"


def test_compression_changes_the_run_and_sends_less(results: Results) -> None:
    assert not torch.equal(losses(results["powersgd"]), losses(results["none"]))
    for compressed, dense in zip(results["powersgd"], results["none"], strict=True):
        assert 0 < compressed["bytes"] < 0.5 * dense["bytes"]


def test_every_rank_takes_the_same_decisions(results: Results) -> None:
    for case in ("edgc", "edgc_tp2", "edgc_aligned", "edgc_search", "spectral_gated"):
        first, *others = (rank["decisions"] for rank in results[case])
        assert first, case
        for decisions in others:
            assert repr(decisions) == repr(first), case
        local = {repr(rank["entropies"]) for rank in results[case]}
        assert len(local) > 1, "ranks measured the same numbers: the agreement would prove nothing"


def test_the_controller_runs_through_its_phases(results: Results) -> None:
    decisions = results["edgc"][0]["decisions"]
    assert [d["phase"] for d in decisions][-1] == "active"
    ranks = [rank for d in decisions if d["phase"] == "active" for rank in d["ranks"]]
    assert ranks and all(4 <= rank <= 16 and rank % 4 == 0 for rank in ranks)


def test_alignment_gives_later_stages_no_lower_rank(results: Results) -> None:
    for decision in results["edgc_aligned"][0]["decisions"]:
        if decision["phase"] == "active":
            first, second = (math.inf if rank is None else rank for rank in decision["ranks"])
            assert second >= first


def test_the_search_for_r_max_ends(results: Results) -> None:
    final = results["edgc_search"][0]["decisions"][-1]
    assert final["phase"] in ("active", "disabled")
    if final["phase"] == "active":
        assert final["r_max"] >= final["r_min"] >= 4


def test_the_cost_gate_measures_every_group_of_every_stage(results: Results) -> None:
    active = [d for d in results["spectral_gated"][0]["decisions"] if d["gate"]]
    assert len(active) >= 2, "the gate measures again after its interval"
    for decision in active:
        assert {verdict["stage"] for verdict in decision["gate"]} == {0, 1}
        for verdict in decision["gate"]:
            assert verdict["seconds_compressed"] > 0 and verdict["seconds_dense"] > 0
            assert verdict["compress"] == (verdict["seconds_compressed"] < verdict["seconds_dense"])
