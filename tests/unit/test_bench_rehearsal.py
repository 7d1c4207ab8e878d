"""The rehearsal of a GPT on one device: what all variants share, the time that it takes, and the program."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from edgc.errors import UserError
from experiments.bench import gpt, rehearsal
from experiments.bench.__main__ import app
from experiments.bench.rehearsal import DILOCO, EDGC, FIXED, NONE, VARIANTS, Course, Plan

TINY: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 2, "vocabulary": 300, "sequence": 16, "batch": 2}
TINY |= {"r_max": 8, "windows": 5, "steps": 20, "lr": 5e-3, "documents": 20, "device": "cpu"}


@pytest.fixture
def course() -> Course:
    generator = torch.Generator().manual_seed(0)
    text = {split: torch.randint(300, (500,), generator=generator) for split in ("train", "validation")}
    return Course(Plan(**TINY), text)


def test_the_model_has_the_layers_of_gpt2() -> None:
    def parameters(plan: Plan) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in gpt.GPT(plan).parameters())

    assert parameters(Plan(vocabulary=50257)) == 124_439_808
    assert parameters(Plan()) == 88_988_160


def test_all_variants_have_the_steps_that_fit_into_the_time() -> None:
    plan = Plan(windows=20, steps=2000)
    seconds = {NONE: 0.1, FIXED: 0.3, DILOCO: 0.2}
    for left in (100.0, 300.0):
        window = plan.window(seconds, left)
        takes = [20 * steps * (0.2 * 0.1 + 0.8 * (0.1 + 0.3 + 0.3 + 0.2)) for steps in (window, window + 1)]
        assert takes[0] <= rehearsal.RESERVE * left < takes[1]
    assert plan.window(seconds, 1e6) == 100, "as many as were asked for"
    with pytest.raises(UserError, match="too little for 20 windows"):
        plan.window(seconds, 20.0)


def test_who_goes_on_from_the_shared_warm_up_ends_as_who_was_trained_alone(course: Course) -> None:
    alone = Course(course.plan, course.text)
    for each, variants in ((course, VARIANTS), (alone, (NONE,))):
        each.begin(3, float("inf"))
        rows = {variant: each.train(variant) for variant in variants}
        assert each.start[0] == 3
    assert rows[NONE]["steps"] == 15
    for key in ("validation_loss", "training_loss", "share_of_run", "tokens"):
        assert rows[NONE][key] == pytest.approx(course.train(NONE)[key], rel=1e-12), key


def test_time_that_is_over_ends_a_variant_with_a_row(course: Course) -> None:
    course.begin(2, -1.0)
    row = course.train(NONE)
    assert row["status"] == "out of time after 0 of 10 steps"
    assert row["validation_loss"] == pytest.approx(5.7, abs=0.3)  # ln 300


@pytest.fixture
def program(tmp_path: Path) -> Callable[[], tuple[int, pd.DataFrame, Path]]:
    def run() -> tuple[int, pd.DataFrame, Path]:
        words = [word for key, value in TINY.items() for word in (f"--{key.replace('_', '-')}", str(value))]
        done = CliRunner().invoke(app, ["rehearsal", *words, "--results", str(tmp_path / "bench")])
        assert done.stdout, done.output
        [folder] = (tmp_path / "bench").iterdir()
        return done.exit_code, pd.read_csv(folder / "rehearsal.csv").set_index("variant"), folder

    return run


def test_the_program_compares_all_variants(program: Callable[[], tuple[int, pd.DataFrame, Path]]) -> None:
    code, table, folder = program()
    assert code == 0 and list(table.index) == list(VARIANTS) and (table["status"] == "ok").all()
    assert (table["steps"] == 20).all() and (table["warmup_steps"] == 4).all()
    assert (table["tokens"] == 20 * 4 * 2 * 16).all()
    assert (table["skipped"] == 0).all() and (table["validation_loss"] < 5.6).all()  # ln 300 is 5.7
    assert table.loc[NONE, "share"] == 1 and table.loc[NONE, "over_none_nats"] == 0
    assert table.loc[DILOCO, "share"] == pytest.approx(1 / 4)
    assert 2 <= table.loc[EDGC, "rank"] <= 8
    # A rank more or less would be farther away.
    assert abs(table.loc[FIXED, "rank"] - table.loc[EDGC, "rank"]) <= 0.5
    a_rank = table.loc[FIXED, "bytes"] / table.loc[FIXED, "rank"]
    assert abs(table.loc[FIXED, "bytes"] - table.loc[EDGC, "bytes"]) <= 0.5 * a_rank
    assert 0 < table.loc[FIXED, "share"] < table.loc[FIXED, "share_of_run"] < 1
    assert table.loc[DILOCO, "replica_memory_mib"] > table.loc[NONE, "replica_memory_mib"] > 0
    assert (table["step_ms"] > 0).all()
    record = json.loads((folder / "rehearsal.json").read_text())
    assert record["settings"]["r_max"] == 8 and record["machine"]["versions"]["torch"] and record["machine"]["git"]


def test_who_fails_leaves_the_others_alone(
    program: Callable[[], tuple[int, pd.DataFrame, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Course.train

    def out_of_memory(course: Course, variant: str) -> dict[str, Any]:
        if variant == EDGC:
            raise MemoryError("none is left")
        return train(course, variant)

    monkeypatch.setattr(rehearsal.Course, "train", out_of_memory)
    code, table, _ = program()
    assert code == 1 and table.loc[EDGC, "status"] == "MemoryError: none is left"
    assert table.loc[FIXED, "status"].startswith("UserError: EDGC had no rank")
    assert (table.loc[[NONE, DILOCO], "status"] == "ok").all() and table.loc[NONE, "steps"] == 20
