"""Checkpoints that resume exactly: four gloo processes, one launch for all layouts, one more with two processes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration import resume_cases
from tests.workers import run_workers

pytestmark = pytest.mark.slow

CASES = list(resume_cases.RUNS)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def ranks(root: Path) -> list[dict[str, Any]]:
    return run_workers(4, resume_cases.four_ranks, str(root))


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states differ, in any bit of any tensor or number; but for measured times of reductions."""
    if path == "/edgc/engine/window/times":
        return []
    if isinstance(a, torch.Tensor):
        alike = isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape
        alike = alike and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
        return [] if alike else [path]
    if isinstance(a, dict) and isinstance(b, dict):
        keys = sorted({*a, *b}, key=str)
        return [found for key in keys for found in differences(a.get(key), b.get(key), f"{path}/{key}")]
    if isinstance(a, (list, tuple)) and type(a) is type(b) and len(a) == len(b):
        return [d for i, (x, y) in enumerate(zip(a, b, strict=True)) for d in differences(x, y, f"{path}[{i}]")]
    return [] if type(a) is type(b) and repr(a) == repr(b) else [f"{path}: {a!r}, {b!r}"]


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_equals_one_that_never_stopped(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        found = rank["cases"][case]
        assert not differences(found["undisturbed"], found["resumed"])
        assert found["undisturbed"]["phase"] == "active"
        assert found["found"] == (4, 1.5, [2, 4]) and found["log"] == '{"event": "start"}\n'
    losses = [x for rank in ranks for x in rank["cases"][case]["resumed"]["losses"] if not math.isnan(x)]
    assert len(losses) >= 2 * resume_cases.STEPS and len(set(losses)) > resume_cases.STEPS


@pytest.mark.parametrize("case", CASES)
def test_what_is_loaded_is_what_was_saved(ranks: list[dict[str, Any]], case: str) -> None:
    for rank in ranks:
        saved, loaded = rank["cases"][case]["at_save"], rank["cases"][case]["loaded"]
        assert not differences({**saved, "losses": []}, loaded)
        assert differences(saved["weights"], rank["cases"][case]["resumed"]["weights"]), "training went on"
    # Without error feedback, of each rank, this would say nothing of EDGC.
    norms = [sum(float(error.norm()) for error in errors(rank["cases"][case]["at_save"]).values()) for rank in ranks]
    assert min(norms) > 0 and len(set(norms)) == 4


def engine(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = state.get("engine", state)
    return found


def errors(snapshot: dict[str, Any]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = engine(snapshot["edgc"])["compressor"]["errors"]
    return found


def test_two_replicas_go_on_from_four_and_owe_the_same(ranks: list[dict[str, Any]], root: Path) -> None:
    two = run_workers(2, resume_cases.two_replicas, str(root))
    before = [errors(rank["dp4"]) for rank in ranks]
    after = [errors(rank["loaded"]) for rank in two]
    assert before[0] and all(list(found) == list(before[0]) for found in after)
    for name in before[0]:
        owed = sum(found[name].double() for found in before) / 4
        assert float(owed.norm()) > 0
        owed_now = sum(found[name].double() for found in after) / 2
        torch.testing.assert_close(owed_now, owed, rtol=1e-6, atol=1e-9)
    assert len(two[0]["warnings"]) == 1 and not two[1]["warnings"], "one rank says it"
    assert "a state of 4 replicas goes on with 2; error feedback is redistributed" in two[0]["warnings"][0]
    assert [rank["iteration"] for rank in two] == [4, 4]
    for key in ("controller", "iteration"):
        assert not differences(engine(two[1]["loaded"]["edgc"])[key], engine(ranks[0]["dp4"]["edgc"])[key])
    assert all(map(math.isfinite, two[0]["after"]["losses"]))
    assert not differences(two[0]["after"]["weights"], two[1]["after"]["weights"]), "replicas stay identical"


@pytest.mark.parametrize(
    ("case", "kind", "text"),
    [
        ("tp2_to_dp4", "UserError", "saved with tensor parallel size 2, not 1"),
        ("tp2_to_pp2", "UserError", "tensor parallel size 2, not 1, pipeline parallel size 1, not 2"),
        ("settings", "UserError", "seed = 2, but the run's checkpoint has 1"),
        ("data", "UserError", "data.fingerprint = 'other', but the run's checkpoint has 'fingerprint'"),
        ("branch", "UserError", "train.lr = 0.002, but the run's checkpoint has 0.003"),
        ("no_state", "UserError", "branches from dp2_pp2-s1, which has kept no state"),
        ("no_state", "UserError", "dp2_pp2-s1 and train that run again"),
        ("damage", "DamagedCheckpoint", "iter_0000004 is damaged: file edgc/rank_00002.pt has "),
        ("none_left", "None", ""),
        ("empty", "UserError", "the checkpoint does not hold this model: KeyError: "),
    ],
)
def test_what_does_not_fit_is_refused_by_every_rank_alike(
    ranks: list[dict[str, Any]], case: str, kind: str, text: str
) -> None:
    told = [rank["refusals"][case] for rank in ranks]
    assert len(set(told)) == 1, told
    assert told[0][0] == kind and text in told[0][1] and "\n" not in told[0][1]
