"""Whether a policy acted: three ranks in use, 30 % of the windows inside the limits, two thirds of the seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from experiments.analyse.acting import acting
from experiments.analyse.runs import Run
from experiments.common.acting import acted
from tests.unit import invented_runs
from tests.unit.conftest import REFERENCE
from tests.unit.invented_runs import decisions

LIMITS = {"r_min": 8, "r_max": 32}


def run(ranks: list[Any], policy: str | None = "cqm", iterations: int | None = None) -> Run:
    """A run that decides every ten iterations, and uses ``ranks`` after the tenth, a list of stages each."""
    given = {"fixed": {"rank": 16}, "schedule": {"schedule": [[0, 16]]}}.get(policy or "", {})
    settings = {"method": "edgc", "policy": policy, "window": 10, **given} if policy else None
    train = {"iterations": iterations or 10 * (len(ranks) + 1)}
    return invented_runs.run("x", compression=settings, events=decisions(ranks, 10, **LIMITS), train=train)


@pytest.mark.parametrize(
    ("ranks", "used", "inside", "said"),
    [
        ([32, 24, 16, 20, 16], 4, 4 / 5, True),
        ([32, 32, 32, 32, 32], 1, 0, False),
        ([32, 24, 16, 8, 8, 8, 8, 8, 8, 8], 4, 2 / 10, False),  # through to the lower limit, and there it stays
        ([32, 24, 16, 8, 8, 8], 4, 2 / 6, True),
        ([16, 16, 16, 20, 20], 2, 1, False),
        ([[32, 32], [24, 32], [16, 32], [20, 32]], 4, 3 / 8, True),  # the stage with the most ranks
        ([[32, None], [24, None], [16, None]], 3, 2 / 6, True),
        ([], 0, 0, False),
    ],
)
def test_ranks_in_use_and_windows_inside_the_limits(ranks: list[Any], used: int, inside: float, said: bool) -> None:
    found = acting(run(ranks))
    assert found == {"ranks_used": used, "windows_inside": pytest.approx(inside), "acted": said}


def test_only_ranks_count_that_follow_something_and_were_in_use_for_a_window() -> None:
    assert acting(run([32, 24, 16], iterations=30))["ranks_used"] == 2, "the last is decided when the run is over"
    short = run([32, 24])
    short.events["decision"].insert(1, {"iteration": 13, "phase": "active", "ranks": [4], **LIMITS})
    assert acting(short)["ranks_used"] == 2
    for policy in (None, "fixed", "schedule"):
        assert set(acting(run([32, 24, 16, 20], policy)).values()) == {None}


@pytest.mark.parametrize(
    ("seeds", "said"),
    [
        ([True, True, False], True),
        ([True, False, False], False),
        ([True], True),
        ([True, False], False),
        ([True, True, True, False, False], False),
        ([None, None], None),
        ([None, True], True),
        ([], None),
    ],
)
def test_two_thirds_of_the_seeds(tmp_path: Path, seeds: list[bool | None], said: bool | None) -> None:
    rows = pd.DataFrame({"seed": range(len(seeds)), "acted": seeds})
    assert acted(rows) is said
    rows.to_csv(tmp_path / "x.csv", index=False)
    assert acted(pd.read_csv(tmp_path / "x.csv")) is said


def test_every_kept_table_of_runs_says_whether_a_policy_acted() -> None:
    """And every summary beside one says "not tested" of a policy that did not."""
    judged = []
    for path in sorted(REFERENCE.glob("*/*/table.csv")):
        table = pd.read_csv(path)
        runs = table[table["method"] == "edgc"] if {"method", "seed"} <= set(table) else table.head(0)
        runs = runs[runs["policy"] != "fixed"] if "policy" in runs else runs
        if runs.empty:
            continue
        assert {"ranks_used", "windows_inside", "acted"} <= set(table), path
        summary = path.with_name("summary.csv")
        if not summary.is_file():
            continue
        verdicts = pd.read_csv(summary).set_index("variant")["verdict"]
        for variant, mine in runs.groupby("variant"):
            if acted(mine) is not None:
                assert (verdicts[str(variant)] == "not tested") is (acted(mine) is False), (path, variant)
                judged.append(acted(mine))
    assert {True, False} <= set(judged)
