"""Which code made each run: what the record says, and the table of it in the report."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import yaml

from experiments.common.source import training_code
from experiments.training import provenance
from experiments.verdicts import run_code

STUDY = "rank_sweep"


def test_a_run_that_goes_on_names_all_code_that_worked_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today = ["a"]
    monkeypatch.setattr(provenance, "training_code", lambda: today[0])
    assert provenance.code_so_far(tmp_path) == "a"
    today[0] = "b"
    assert provenance.code_so_far(tmp_path) == "b", "nothing of a run without a checkpoint is left"
    (tmp_path / "iter_0000010").mkdir()
    assert provenance.code_so_far(tmp_path) == "b"
    today[0] = "c"
    assert provenance.code_so_far(tmp_path) == "b+c" == provenance.code_so_far(tmp_path)
    (tmp_path / "code").unlink()
    assert provenance.code_so_far(tmp_path) == "unknown+c"


def test_the_table_puts_runs_of_other_code_first(tmp_path: Path) -> None:
    codes = {"none-s1": training_code(), "r4-s1": "0" * 16, "r8-s1": None, "r16-s1": training_code()}
    for name, code in codes.items():
        folder = tmp_path / "ci" / STUDY / name
        folder.mkdir(parents=True)
        record = {"provenance": {"git": {"commit": "f" * 40}, **({"code": code} if code else {})}}
        (folder / "run.yaml").write_text(yaml.safe_dump(record))
        if name != "r16-s1":
            (folder / "status").write_text("ok\n")
    run_code.main("ci", tmp_path)
    rows = pd.read_csv(tmp_path / "ci" / "runs.csv")
    assert list(zip(rows["run"], rows["today"], strict=True)) == [
        ("r4-s1", "no"),
        ("r8-s1", "unknown"),
        ("none-s1", "yes"),
    ], "a run that has not ended has no row"
    assert set(rows["commit"]) == {"f" * 40}
