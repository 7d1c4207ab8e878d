"""EDGC under DDP with what users bring along: loss scales, fp16, saved states, copies. One launch for all cases."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration import ddp_user_cases
from tests.workers import run_workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_workers(2, ddp_user_cases.all_cases)


@pytest.mark.parametrize("method", ddp_user_cases.SCALED)
def test_a_loss_scale_changes_nothing(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        plain, scaled = rank["scales"][method]["plain"], rank["scales"][method]["scaled"]
        assert plain["scale"] == 1 and scaled["scale"] > 1
        assert plain["rows"] == scaled["rows"]
        assert torch.equal(plain["weights"], scaled["weights"])
        assert plain["errors"].keys() == scaled["errors"].keys() and plain["errors"]
        for name, error in plain["errors"].items():
            assert torch.equal(error, scaled["errors"][name]), name


def test_the_controller_acts_in_these_runs(ranks: list[dict[str, Any]]) -> None:
    """Or their equality would say nothing of decisions."""
    for method in ("edgc", "edgc spectral"):
        used = {row[1] for row in ranks[0]["scales"][method]["plain"]["rows"]}
        assert len(used - {None}) >= 2, method


@pytest.mark.parametrize("method", ddp_user_cases.SCALED)
def test_a_skipped_step_never_was(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        poisoned, without = rank["skips"][method]["poisoned"], rank["skips"][method]["without"]
        assert poisoned["skipped"] == len(ddp_user_cases.BAD) and without["skipped"] == 0
        assert poisoned["unchanged"] == [True] * len(ddp_user_cases.BAD)
        if not method.startswith("edgc"):  # whose windows count iterations, skipped ones too
            assert torch.equal(poisoned["weights"], without["weights"])


@pytest.mark.parametrize("method", ddp_user_cases.SCALED)
def test_the_path_of_a_gpu_trains_alike_without_a_thread(ranks: list[dict[str, Any]], method: str) -> None:
    cpu, gpu = ([rank["masked"][f"{method}, {on}"] for rank in ranks] for on in (False, True))
    assert torch.equal(gpu[0]["weights"], gpu[1]["weights"]) and bool(gpu[0]["weights"].isfinite().all())
    assert gpu[0]["bytes"] == cpu[0]["bytes"] > 0
    assert gpu[0]["iteration"] == cpu[0]["iteration"] == ddp_user_cases.STEPS
    distance = float((gpu[0]["weights"] - cpu[0]["weights"]).norm() / cpu[0]["weights"].norm())
    assert distance < 0.05, distance


def test_the_path_of_a_gpu_resumes_bit_for_bit(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["masked"]["resumed"]["equal"] for rank in ranks)


def test_means_of_fp16_do_not_overflow(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for method, (matrix, bias) in rank["halves"].items():
            assert bias == 40000, method
            assert matrix == pytest.approx(40000, rel=2e-2), method


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        (
            "other rank",
            "of other settings: rank = 8, now 2; use the saved settings, or load with changed_settings",
        ),
        ("other type", "factor_dtype = 'fp32', now 'int8', error_dtype = 'fp32', now 'bf16'"),
        ("other method", "of method powersgd, not topk; set method: powersgd, or start without"),
        ("other method on purpose", "of method powersgd, not topk"),
        ("none", "not a saved state of edgc but NoneType"),
        ("no engine", "it has no engine"),
        ("no layout", "has no state.layout"),
        ("no scale", "has no engine.scale"),
        ("no factors", "has no compressor.factors"),
        (
            "other parameters",
            "has error feedback of third.weight, (3, 3), which is no parameter of this rank's",
        ),
        ("other shape", "has error feedback of first.weight, (3, 3), which has (24, 24) here"),
        ("other limits", "of other settings: r_max = 10, now 8"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line(ranks: list[dict[str, Any]], case: str, answer: str) -> None:
    for rank in ranks:
        said = rank["states"][case]
        assert answer in said and "\n" not in said


def test_other_settings_hold_when_they_are_asked_for(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["states"]["errors are taken over"]
        assert rank["states"]["rank in use"] == 2
        limits, spectral, fixed, window = (used for used, _ in rank["states"]["changed ranks"])
        assert 2 <= limits <= 4 and 4 <= spectral <= 10 and fixed == 6 and 4 <= window <= 10
    assert torch.equal(ranks[0]["states"]["weights"], ranks[1]["states"]["weights"])
    for one, other in zip(*(rank["states"]["changed ranks"] for rank in ranks), strict=True):
        assert torch.equal(one[1], other[1])


def test_copies_average_plainly_and_can_be_registered_anew(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["copies"]["ranks"] == [2, 2]
    assert torch.equal(ranks[0]["copies"]["weights"], ranks[1]["copies"]["weights"])


def test_the_group_has_the_timeout_of_the_models(ranks: list[dict[str, Any]]) -> None:
    assert [rank["timeouts"] for rank in ranks] == [[77.0, 77.0]] * 2


def test_a_layer_frozen_after_wrapping_does_not_end_iterations_early(ranks: list[dict[str, Any]]) -> None:
    assert [rank["frozen"] for rank in ranks] == [{"iterations": [1, 2, 3], "reduced": [4, 4, 4]}] * 2


def test_removing_ends_the_group_that_was_made_and_no_other(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, *after = rank["groups"]
        assert after == [before + 1] * 3, "the given one stays"


def test_nothing_goes_with_a_result_that_ddp_throws_away(ranks: list[dict[str, Any]]) -> None:
    for name, found in ranks[0]["unused"].items():
        assert found["lost"] < 1e-5 and found["kept"] > 0, name


def test_no_mode_of_torch_changes_anything(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["modes"] and all(rank["modes"].values()), rank["modes"]
        assert all(lost < 1e-6 for lost in rank["products"].values()), rank["products"]


def test_parameters_without_entries_train(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["empty"] and all(gradient == 2 for gradient in rank["empty"].values())


def test_a_state_of_another_memory_format_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for case, answer in rank["memory orders"].items():
            one, other = case.split(" in ")
            assert answer == "nothing" if one == other else answer.startswith("weight has dimensions in the "), case


def test_a_sparse_gradient_is_refused_in_one_line(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["sparse"] == "parameter table has a sparse gradient (in edgc.ddp); look it up with sparse=False"


def test_means_are_in_the_range_of_their_type(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, found in rank["ranges"].items():
            assert found == pytest.approx((1, 1), rel=2e-2), name


def test_a_model_can_be_registered_anew(ranks: list[dict[str, Any]]) -> None:
    for key in ("removed", "weights"):
        assert torch.equal(ranks[0]["again"][key], ranks[1]["again"][key])
    for rank in ranks:
        (first, most), (second, least) = rank["again"]["sent"]
        assert first == second == 3, "each registration counts its own iterations"
        assert least != most and rank["again"]["hooks"] == 1


def test_what_is_warned_of_is_told_on_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    wanted = {
        "not given": "edgc.ddp.register was given no scaler, but a GradScaler makes the steps",
        "not given, clipped": "edgc.ddp.register was given no scaler, but a GradScaler makes the steps",
        "rank too high": "nothing is compressed in this run: rank 24 saves no bytes for any matrix; "
        "the highest that does is 23",
        "too small": "nothing is compressed in this run: no matrix is large enough",
        "edgc": "nothing is compressed in this run: rank 24 saves no bytes",
    }
    for case, told in ranks[0]["told"].items():
        assert len(told) == (case in wanted), (case, told)
        assert all(wanted[case] in line for line in told), case
    assert not any(ranks[1]["told"].values())


def test_remove_ends_alone_where_the_other_rank_is_lost(ranks: list[dict[str, Any]]) -> None:
    result = ranks[0]["lost peer"]
    assert len(result["told"]) == 1 and "not every rank came to handle.remove()" in result["told"][0]
    assert "\n" not in result["told"][0]
    assert result["again"] == [] and result["groups"] == -1 and not result["active"]


def test_the_settings_that_the_pages_offer_can_be_registered(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert any("paper" in call for call in rank["advised"]) and len(set(rank["advised"])) > 4
