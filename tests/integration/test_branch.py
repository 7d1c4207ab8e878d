"""Runs that branch from another one's warm-up, and runs that follow another one's ranks, through the launcher."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from experiments.common import interrupts
from experiments.spec.settings import resolve
from experiments.training import launch
from experiments.training.outputs import read_events
from tests.integration.launching import Launcher, changed, prepared, repeatable

__all__ = ["prepared"]  # a fixture

pytestmark = [pytest.mark.slow, pytest.mark.costly]

# A lax target, so that the rank falls at the end of every window.
EDGC = {
    "method": "edgc",
    "policy": "spectral",
    "target_error": 0.99,
    "window": 2,
    "r_max": 12,
    "r_min": 2,
    "rank_multiple": 1,
    "step_limit": 3,
    "warmup_fraction": 0.3,
    "warmup_limit_fraction": 0.3,
    "stability_tolerance": 100.0,
    "entropy": {"iteration_rate": 1.0},
}
TRUNK = changed(
    variant="trunk", parallel={"pipeline": 1, "data": 2}, train={"keep_warm_up": True}, compression={**EDGC}
)


def branched(variant: str, **more: Any) -> dict[str, Any]:
    train = {**TRUNK["train"], "keep_warm_up": False}
    return {**TRUNK, "variant": variant, "branch": "trunk", "train": train, **more}


BACK = branched("back", follows={"variant": "trunk", "order": "reversed"})
ONLY_SPECTRAL = ("r_min", "step_limit", "target_error")
FIXED = {key: value for key, value in EDGC.items() if key not in ONLY_SPECTRAL}
RANK_3 = branched("rank_3", compression={**FIXED, "policy": "fixed", "rank": 3, "factor_dtype": "int8"})
CHILD = branched("child")


@pytest.fixture(scope="module")
def launcher(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    launcher = Launcher(prepared, tmp_path_factory.mktemp("configs"))
    launcher.finish_all(TRUNK, BACK, RANK_3, CHILD)
    return launcher


def ranks(folder: Path) -> list[int | None]:
    """Step by step."""
    return [step["stages"][0]["rank"] for step in read_events(folder / "metrics.jsonl", "step")]


def decided(folder: Path) -> list[tuple[int, list[int | None]]]:
    return [(event["iteration"], event["ranks"]) for event in read_events(folder / "metrics.jsonl", "decision")]


def test_ranks_in_reverse_order_are_the_same_ranks_and_bytes(launcher: Launcher) -> None:
    trunk, back = launcher.path(TRUNK), launcher.path(BACK)
    forward = ranks(trunk)
    begin = forward.index(next(rank for rank in forward if rank is not None))
    assert ranks(back) == forward[:begin] + forward[begin:][::-1] != forward
    sent = [sum(step["bytes"] for step in read_events(f / "metrics.jsonl", "step")) for f in (trunk, back)]
    assert sent[0] == pytest.approx(sent[1], rel=0.03), "the policy itself sends a little: it measures errors"
    warm_up = [repeatable(folder)[:begin] for folder in (trunk, back)]
    assert warm_up[0] == warm_up[1]
    assert [rank for _, [rank] in decided(back)][-5:-1] == ranks(back)[begin::2]
    recorded = yaml.safe_load((back / "run.yaml").read_text())
    assert recorded["follows"] == {"variant": "trunk", "order": "reversed", "shuffle": 0}
    assert [rank for _, rank in recorded["compression"]["schedule"]] == ranks(back)[begin::2]


def test_a_branch_of_other_settings_says_what_it_does_from_its_first_step(launcher: Launcher) -> None:
    found = ranks(launcher.path(RANK_3))
    begin = ranks(launcher.path(TRUNK)).index(12)
    assert set(found[begin:]) == {3} and set(found[:begin]) == {None}
    [first] = [row for iteration, row in decided(launcher.path(RANK_3)) if iteration == begin]
    assert first == [3]


def test_a_run_needs_another_that_ended_well(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    late = branched("late", follows={"variant": "missing", "order": "even"})
    assert "late-s1 needs run missing-s1, which has not ended" in launcher.refusal(late)
    failed = launcher.path({**TRUNK, "variant": "failed"})
    shutil.copytree(launcher.path(TRUNK), failed)
    (failed / "status").write_text("diverged\n")
    lost = branched("lost", branch=None, follows={"variant": "failed", "order": "even"})
    monkeypatch.setattr(interrupts, "ignore", lambda: None)  # in this process
    assert launch.launch(resolve(lost, "the test"), launcher.results) == "failed"
    assert "failed-s1, which it needs, is diverged" in (launcher.path(lost) / "summary.json").read_text()


def test_a_branch_with_the_settings_of_its_trunk_is_the_same_run(launcher: Launcher) -> None:
    trunk, child = launcher.path(TRUNK), launcher.path(CHILD)
    assert repeatable(child) == repeatable(trunk)
    assert decided(child) == decided(trunk)
    assert len(set(ranks(trunk))) > 4, "a policy that never moves would show nothing here"
    [start] = read_events(child / "metrics.jsonl", "start")
    assert start["run"] == "child-s1"
    provenance = yaml.safe_load((child / "run.yaml").read_text())["provenance"]
    assert "resumed_at" not in provenance, "it was not interrupted"


def test_a_trunk_without_its_state_is_one_line_with_the_folder_to_delete(launcher: Launcher) -> None:
    restored = {**TRUNK, "variant": "restored"}
    shutil.copytree(launcher.path(TRUNK), launcher.path(restored), ignore=shutil.ignore_patterns("warm_up"))
    code, stderr = launcher.run(branched("lone", branch="restored"))
    assert code == 2 and "branches from restored-s1, which has kept no state" in stderr
    assert f"delete the folder {launcher.path(restored)} " in stderr


def test_a_checkpoint_never_lies_behind_a_warm_up_that_is_not_saved() -> None:
    """A run that is killed between the two goes on from the newest checkpoint, and would never save its warm-up."""
    from experiments.training.checkpoint import Checkpoints
    from experiments.training.train import Trainer

    trainer = object.__new__(Trainer)
    trainer.run = resolve({**TRUNK, "train": {**TRUNK["train"], "checkpoint_interval": 4}}, "the test")
    trainer.checkpoints = object.__new__(Checkpoints)
    trainer.checkpoints.interval, trainer.checkpoints.session = 4, SimpleNamespace(run=trainer.run)
    due = [trainer._checkpoints_due(iteration, warm_up_ended=iteration < 5) for iteration in (3, 4, 8)]
    assert due == [["warm_up"], ["warm_up", ".checkpoints"], [".checkpoints"]]
