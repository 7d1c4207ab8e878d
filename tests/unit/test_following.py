"""What a run takes over from another one: which ranks, in which order; and how studies name such runs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from edgc.control.policies.given import scheduled
from edgc.errors import UserError
from experiments.spec import matrix
from experiments.spec.settings import FollowsConfig, RunConfig, resolve
from experiments.training import lineage

BASE: dict[str, Any] = matrix.runs("methods", "ci")[0].model_dump(mode="json")
BASE |= {"study": "x", "variant": "cqm", "seed": 1, "train": {**BASE["train"], "iterations": 100}}
BASE["compression"] = {"method": "edgc", "window": 10, "r_max": 32, "r_min": 8, "step_limit": 8}


def write(root: Path, ranks: list[Any], status: str = "ok") -> RunConfig:
    """A run that decides every ten iterations, from the twentieth on; returns its settings."""
    folder, run = root / "ci" / "x" / "cqm-s1", resolve(BASE, "test")
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(run.model_dump(mode="json")))
    events = [{"event": "decision", "iteration": 10, "phase": "warmup", "ranks": [None]}]
    events += [
        {"event": "decision", "iteration": 20 + 10 * k, "phase": "active", "ranks": r if isinstance(r, list) else [r]}
        for k, r in enumerate(ranks)
    ]
    events.append({"event": "end", "status": status})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    (folder / "status").write_text(status + "\n")
    return run


def follower(order: str, **more: Any) -> RunConfig:
    return resolve({**BASE, "variant": order, "follows": {"variant": "cqm", "order": order, **more}}, "test")


RANKS = [32, 24, 16, 20, 16, 20, 24, 24, 20]  # the last one is decided when the run is over


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("reversed", [24, 24, 20, 16, 20, 16, 24, 32]),
        ("falling", [32, 24, 24, 24, 20, 20, 16, 16]),
        ("even", [22, 22, 22, 22, 22, 22, 22, 22]),
        ("line", [28, 27, 24, 23, 21, 20, 17, 16]),
    ],
)
def test_the_schedule_of_a_run_that_follows(tmp_path: Path, order: str, wanted: list[int]) -> None:
    write(tmp_path, RANKS)
    run = lineage.with_ranks(follower(order), tmp_path)
    settings = run.edgc.to_dict()
    assert settings["policy"] == "schedule"
    assert [scheduled(settings["schedule"], iteration, 100) for iteration in range(20, 100, 10)] == wanted
    assert sum(wanted) == sum(RANKS[:-1])
    assert lineage.with_ranks(run, tmp_path / "nowhere") == run, "a run from its own record follows nothing again"


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_two_neighbouring_ranks_send_exactly_the_same(ranks: list[int]) -> None:
    even = lineage.in_order(ranks, FollowsConfig(variant="a", order="even"), 1)
    assert len(even) == len(ranks) and sum(even) == sum(ranks)
    assert max(even) - min(even) <= 1
    ahead = [sum(even[: k + 1]) - sum(ranks) * (k + 1) / len(ranks) for k in range(len(ranks))]
    assert all(-1 < value <= 0 for value in ahead), "never a whole rank behind the mean"
    orders = [FollowsConfig(variant="a", order="shuffled", shuffle=number) for number in (1, 2)]
    shuffled = [tuple(lineage.in_order(list(range(40)), order, seed)) for order in orders for seed in (1, 2)]
    assert len(set(shuffled)) == 4, "they differ by seed and number"
    assert shuffled[0] == tuple(lineage.in_order(list(range(40)), orders[0], 1)), "and repeat"
    assert Counter(lineage.in_order(ranks, orders[0], 1)) == Counter(ranks)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_a_line_falls_from_four_to_two_thirds_of_the_mean_at_the_same_bytes(ranks: list[int]) -> None:
    line = lineage.in_order(ranks, FollowsConfig(variant="a", order="line"), 1)
    mean, count = sum(ranks) / len(ranks), len(ranks)
    assert len(line) == count and sum(line) == sum(ranks) and sorted(line, reverse=True) == line
    for place, rank in enumerate(line):
        assert abs(rank - mean * (4 - 2 * (place + 0.5) / count) / 3) <= 2


def test_where_stages_are_aligned_the_first_ones_ranks_are_followed(tmp_path: Path) -> None:
    write(tmp_path, [[24, 32], [16, 24], [20, 20]])
    aligned = {"compression": {**BASE["compression"], "alignment": "measured"}}
    run = lineage.with_ranks(resolve({**follower("reversed").model_dump(mode="json"), **aligned}, "test"), tmp_path)
    settings = run.edgc.to_dict()
    assert [rank for _, rank in settings["schedule"]] == [20, 16, 24] and settings["alignment"] == "measured"


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    write(tmp_path / "a", [[32, 24]])
    with pytest.raises(UserError, match=r"stages had the ranks \[32, 24\] after iteration 20.*alignment: off"):
        lineage.with_ranks(follower("even"), tmp_path / "a")
    write(tmp_path / "b", [])
    with pytest.raises(UserError, match="compressed nothing"):
        lineage.with_ranks(follower("even"), tmp_path / "b")
    with pytest.raises(UserError, match="even-s1 needs run cqm-s1, which has not ended"):
        lineage.blocked_reason(follower("even"), tmp_path)
    write(tmp_path, RANKS, status="diverged")
    assert lineage.blocked_reason(follower("even"), tmp_path) == "run cqm-s1, which it needs, is diverged"
    assert lineage.blocked_reason(follower("even"), tmp_path / "b") is None


STUDY: dict[str, Any] = {
    "study": "tried",
    "title": "t",
    "question": "q",
    "analysis": "policies",
    "base": {"branch": "cqm", "compression": {"method": "edgc", "window": 10}},
    "variants": {
        "none": {"compression": {"method": "none"}},
        "cqm": {},
        "back": {"follows": {"variant": "cqm", "order": "reversed"}},
        "rank_8": {"compression": {"policy": "fixed", "rank": 8}},
    },
}


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "studies").mkdir()
    (tmp_path / "scales").symlink_to(matrix.FOLDER / "scales")
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    return tmp_path / "studies"


def test_all_variants_branch_from_one_that_keeps_its_warm_up(studies: Path) -> None:
    (studies / "tried.yaml").write_text(yaml.safe_dump(STUDY))
    found = {run.variant: run for run in matrix.runs("tried", "ci")}
    assert {name: run.branch for name, run in found.items()} == {
        "none": None, "cqm": None, "back": "cqm", "rank_8": "cqm"
    }  # fmt: skip
    assert [name for name, run in found.items() if run.train.keep_warm_up] == ["cqm"]
    assert {name: run.needs for name, run in found.items()} == {
        "none": [], "cqm": [], "back": ["cqm-s1"], "rank_8": ["cqm-s1"]
    }  # fmt: skip


def test_every_variant_in_every_setting_goes_by_others_of_its_own(studies: Path) -> None:
    more: dict[str, Any] = {"more": {"compression": {"rank_multiple": 2}}, "rank_8": None}
    two = {"base": {"parallel": {"pipeline": 2}}, "variants": more}
    study = {**STUDY, "settings": {"one": {"base": {"parallel": {"pipeline": 1}}, "seeds": [1, 2]}, "two": two}}
    (studies / "tried.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    found = {run.name: run for run in matrix.runs("tried", "ci")}
    both = ["none", "cqm", "back"]
    expected = [f"one_{name}-s{seed}" for name in [*both, "rank_8"] for seed in (1, 2)]
    assert list(found) == expected + [f"two_{name}-s1" for name in [*both, "more"]]
    assert [found[f"{name}_none-s1"].parallel.pipeline for name in ("one", "two")] == [1, 2]
    assert found["two_back-s1"].needs == ["two_cqm-s1"] and found["one_back-s2"].needs == ["one_cqm-s2"]
    assert [name for name, run in found.items() if run.train.keep_warm_up] == ["one_cqm-s1", "one_cqm-s2", "two_cqm-s1"]
    assert found["two_back-s1"].setting == "two"
    assert resolve(found["two_back-s1"].model_dump(mode="json"), "its record") == found["two_back-s1"]
    two["more_seeds"] = {"variants": ["back"], "seeds": [2]}
    (studies / "tried.yaml").write_text(yaml.safe_dump({**STUDY, "settings": {"two": two}}))
    with pytest.raises(UserError, match=r"two_back: branch: two_cqm has no seed 2"):
        matrix.runs("tried", "ci")


def test_mistakes_are_named(studies: Path) -> None:
    def following(name: str, variant: str, order: str = "even") -> dict[str, Any]:
        return {"variants": {**STUDY["variants"], name: {"follows": {"variant": variant, "order": order}}}}

    more = {"variants": ["rank_8"], "seeds": [2]}
    for change, text in (
        ({"base": {**STUDY["base"], "branch": "cmq"}}, "branch: unknown variant 'cmq'.*did you mean cqm"),
        (following("back", "cqn"), "back: follows.variant: unknown variant 'cqn'"),
        (following("twice", "back"), "twice: follows.variant: back follows another run itself"),
        (following("back", "cqm", "backwards"), "follows.order"),
        ({"more_seeds": more}, r"rank_8: branch: cqm has no seed 2, .*; name cqm under more_seeds.variants as well"),
        ({"base": {"compression": {"method": "none"}}}, r"need compression\.method = edgc"),
    ):
        (studies / "tried.yaml").write_text(yaml.safe_dump({**STUDY, **change}))
        with pytest.raises(UserError, match=text):
            matrix.runs("tried", "ci")


def test_a_checkpoint_of_other_compression_is_refused_by_the_name_of_the_setting(tmp_path: Path) -> None:
    saved = lineage.checkpoint_settings(resolve(BASE, "test"), "abc")
    lineage.refuse_other(saved, saved, tmp_path)
    for key, value in (("window", 20), ("record_full_entropy", True), ("method", "bf16")):
        other = {**saved, "compression": {**saved["compression"], key: value}}
        with pytest.raises(UserError, match=rf"^compression\.{key} = .*, but the run's checkpoint has "):
            lineage.refuse_other(other, saved, tmp_path)
        lineage.refuse_other(other, saved, tmp_path, lineage.FREE_IN_WARM_UP)
