"""Megatron-Core, DP2 x PP2: closing an attachment, traffic between stages, states that do not fit, a GPU's path."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration import megatron_user_cases
from tests.workers import run_workers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_workers(4, megatron_user_cases.all_cases, str(tmp_path_factory.mktemp("checkpoints")))


@pytest.mark.parametrize("how", megatron_user_cases.HOW)
def test_closing_gives_megatron_its_own_reduction_back(ranks: list[dict[str, Any]], how: str) -> None:
    for rank in ranks:
        result = rank["closed"][how]
        assert result["restored"]
        assert torch.equal(result[True], result[False])


def test_attach_makes_what_compresses_the_traffic_between_stages(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        result = rank["pipeline"]
        assert result["used"]
        assert "pipeline.rank is set, but the schedule ran without attachment.pipeline" in result["forgotten"]
        assert "begin_iteration(num_microbatches)" in result["forgotten"]
    # Stage 1 sends gradients back; its error feedback is in the attachment's state.
    assert sum(rank["pipeline"]["sent"] > 0 for rank in ranks) == 2
    assert sum(rank["pipeline"]["kept"] == ["chunk0"] for rank in ranks) == 2
    messages = [message for rank in ranks for message in rank["pipeline"]["one stage"]]
    assert messages == ["edgc: pipeline.rank has no effect: there is one pipeline stage"]


@pytest.mark.parametrize(
    ("case", "answer"),
    [
        ("another replica", "but this is rank"),
        ("another stage", "pipeline stage"),
        ("none", "not a saved state of edgc but NoneType"),
        ("no engine", "it has no engine"),
        ("no window", "has no engine.window"),
        ("other parameters", "error feedback of x, (2,), which is no parameter of this rank's"),
        ("other settings", "of other settings: rank = 4, now 2"),
        ("its own", "nothing"),
        ("on purpose", "nothing"),
        ("rank in use", "2"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_in_one_line(ranks: list[dict[str, Any]], case: str, answer: str) -> None:
    for rank in ranks:
        said = rank["states"][case]
        assert answer in said and "\n" not in said


def test_error_feedback_follows_the_loss_scale_that_a_run_goes_on_with(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["scaled"]
        for order in ("scale first", "scale last"):
            assert found[order] == pytest.approx(found["as saved"], rel=1e-6), order


def test_bytes_are_reckoned_in_the_gradients_own_type(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all(reckoned == own for reckoned, own in rank["bits"])


@pytest.mark.parametrize("method", ["powersgd", "edgc", "int8", "int6"])
@pytest.mark.parametrize("how", ["", ", overlap", ", overlap, distributed optimizer"])
def test_the_path_of_a_gpu_trains_alike(ranks: list[dict[str, Any]], method: str, how: str) -> None:
    for on in (False, True):
        results = [rank["masked"][f"{method}{how}, {on}"] for rank in ranks]
        for stage in (0, 1):
            one, other = (result["weights"] for result in results if result["stage"] == stage)
            assert torch.equal(one, other)
        assert all(result["skipped"] == 1 and result["kept"] == [True] for result in results)
    for rank in ranks:
        cpu, gpu = (rank["masked"][f"{method}{how}, {on}"] for on in (False, True))
        assert gpu["bytes"] == cpu["bytes"]
        # Each rounds what it sends, at places that differ in the last bits: the fewer bits, the larger the steps.
        limit = 2e-2 if "int6" in method + how else 1e-2
        assert float((gpu["weights"] - cpu["weights"]).norm() / cpu["weights"].norm()) < limit


@pytest.mark.parametrize("case", megatron_user_cases.FROZEN)
def test_frozen_parts_train_as_megatron_alone_does(ranks: list[dict[str, Any]], case: str) -> None:
    results = [rank["frozen"] for rank in ranks]
    for result in results:
        with_edgc, alone = result[case][True], result[case][False]
        assert torch.equal(with_edgc["weights"], alone["weights"])
        assert with_edgc["losses"] == pytest.approx(alone["losses"], nan_ok=True)
    moved = any(not torch.equal(r[case][True]["weights"], r["all"][True]["weights"]) for r in results)
    assert moved == (case != "all")


@pytest.mark.parametrize("stage", [0, 1])
def test_edgc_measures_and_decides_beside_a_frozen_stage(ranks: list[dict[str, Any]], stage: int) -> None:
    results = [rank["frozen search"][f"stage {stage}"] for rank in ranks]
    for result in results:
        assert repr(result["decisions"]) == repr(results[0]["decisions"])
        assert result["skipped"] == (1 if stage == 0 else 0)
        assert result["loaded"] == 16 and result["as saved"]
        assert "already have an attachment" in result["attached again"]
        assert result["stage"] != stage or result["errors"] == 0
    last = results[0]["decisions"][-1]
    if stage == 0:  # no times say whether it pays, and the other stage is the first that counts
        assert last["phase"] == "active" and len(last["ranks"]) == 1 and last["ranks"][0] is not None
        assert all(result["errors"] > 0 for result in results if result["stage"] == 1)
    else:
        assert last["phase"] in ("active", "disabled") and len(last["ranks"]) == 2


def test_a_tied_embedding_that_one_stage_trains_is_refused(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert "one copy of the tied embedding is frozen" in rank["one copy frozen"]


@pytest.mark.parametrize("method", megatron_user_cases.FEEDBACK)
def test_nothing_is_lost_of_a_layer_that_is_not_trained_in_every_step(ranks: list[dict[str, Any]], method: str) -> None:
    for rank in ranks:
        lost = rank["law"][method]
        assert set(lost) == set(megatron_user_cases.Sometimes.NAMES)
        assert max(lost.values()) < 1e-5, lost
