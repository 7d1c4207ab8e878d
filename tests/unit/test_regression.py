"""The comparison with the committed reference passes on equal tables and fails on each kind of difference."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from edgc.errors import UserError
from experiments.analyse.tables import write_table
from experiments.spec import matrix
from experiments.verdicts import reference, regression
from experiments.verdicts.regression import Check
from tests.unit.conftest import REFERENCE

COMPARED = sorted({check.study for check in regression.load_tolerances()})


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Fresh results that equal the committed reference."""
    for folder in ("ci", "reference/ci"):
        for study in COMPARED:
            ignore = shutil.ignore_patterns("runs", "*.parquet")
            shutil.copytree(REFERENCE / "ci" / study, tmp_path / folder / study, ignore=ignore)
    shutil.copy(REFERENCE / "ci" / "provenance.yaml", tmp_path / "reference" / "ci")
    return tmp_path


def compare(results: Path, studies: Sequence[str] = COMPARED) -> int:
    """Exit code of the program, of the checks of these studies."""
    checks = [check for check in regression.load_tolerances() if check.study in studies]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regression, "load_tolerances", lambda: checks)
        try:
            regression.main("ci", results)
        except SystemExit as stop:
            return int(stop.code or 0)
    return 0


def change(path: Path, variant: str, column: str, value: Any) -> None:
    table = pd.read_csv(path)
    assert variant in set(table["variant"])
    table.loc[table["variant"] == variant, column] = value
    write_table(path, table)


def test_a_fresh_run_equal_to_the_reference_passes(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(COMPARED) > 7 and all(check.key for check in regression.load_tolerances())
    assert compare(results) == 0
    assert "0 OUTSIDE" in capsys.readouterr().out
    written = pd.read_csv(results / "ci" / "regression.csv")
    assert len(written) > 100 and written["ok"].all()
    change(results / "ci" / "rank_sweep" / "table.csv", "r16", "final_ranks", "other")  # which no check is about
    assert compare(results) == 0


def test_of_the_text_of_another_python_only_what_does_not_hang_on_it_is_judged(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = results / "reference" / "ci" / "provenance.yaml"
    values = yaml.safe_load(record.read_text()) | {"data_fingerprint": "aa", "versions": {"python": "3.11.7"}}
    record.write_text(yaml.safe_dump(values))
    data = results / "ci" / "data" / "stdlib" / "data.yaml"
    data.parent.mkdir(parents=True)
    change(results / "ci" / "methods" / "table.csv", "none", "validation_perplexity", 4000.0)
    # Another text by the same Python is a change of the project's own.
    for python, fingerprint, code in (("3.11.7", "aa", 1), ("3.11.7", "bb", 1), ("3.11.2", "aa", 1), (None, "bb", 1),
                                      ("3.11.2", "bb", 0)):  # fmt: skip
        data.write_text(yaml.safe_dump({"python": python, "fingerprint": fingerprint}))
        assert compare(results, ["methods"]) == code
        output = capsys.readouterr().out
        assert ("not judged" in output and "other text" in output) == (code == 0)
    # What holds on any text is still judged.
    change(results / "ci" / "methods" / "table.csv", "none", "status", "diverged")
    assert compare(results, ["methods"]) == 1


def test_each_difference_is_outside(results: Path) -> None:
    changes: list[tuple[str, str, str, Any]] = [
        ("methods", "none", "validation_perplexity", 4000.0),
        ("methods", "powersgd_r16", "bytes_ratio", 0.9),
        ("methods", "edgc_cqm", "decisions_outside_limits", 1),
        ("rank_sweep", "r16", "worker_error_median", 0.99),
        ("entropy_trend", "gpt", "slope_first_per_100", 0.3),
    ]
    for change_of in changes:
        path = results / "ci" / change_of[0] / "table.csv"
        good = path.read_bytes()
        change(path, *change_of[1:])
        assert compare(results, change_of[:1]) == 1
        path.write_bytes(good)


@pytest.mark.parametrize(
    ("kind", "old", "new", "more", "expected"),
    [
        ("rows", ["ok", "ok"], ["ok"], {}, [True, False]),
        ("rows", ["ok"], ["ok", "ok"], {}, [True, False]),
        ("relative", [100.0, 100.0], [109.0, 89.0], {"tolerance": 0.1}, [True, False]),
        ("absolute", [0.0, 0.0], [0.1, -0.2], {"tolerance": 0.1}, [True, False]),
        ("absolute", [math.nan, math.nan], [math.nan, 0.0], {"tolerance": 0.1}, [True, False]),  # a diverged run
        ("bounds", [0.0, 0.0], [0.5, 0.4], {"at_least": 0.5}, [True, False]),
        ("bounds", [], [], {"at_least": 0.5}, [False]),  # a check without rows does not pass silently
        ("order", [3, 2, 1], [3, 2, 1], {"by": "rank"}, [True]),
        ("order", [3, 2, 1], [1, 2, 3], {"by": "rank"}, [False]),
        ("order", [3, 2, 1], [3, 3.005, 1], {"by": "rank", "tolerance": 0.01}, [True]),
        ("order", [3, 2, 1], [3], {"by": "rank"}, [False]),
    ],
)
def test_kinds(kind: str, old: list[Any], new: list[Any], more: dict[str, Any], expected: list[bool]) -> None:
    check = Check.model_validate({"study": "s", "kind": kind, "column": "x", "key": ["variant", "none"], **more})
    keys = pd.DataFrame({"variant": list("abc"), "rank": [4, 8, 16], "none": [16.0, None, None]})
    frames = [keys[: len(x)].assign(x=x) for x in (old, new)]
    assert [outcome.ok for outcome in regression.compare(check, *frames)] == expected
    assert sorted(outcome.ok for outcome in regression.compare(check, frames[0], frames[1][::-1])) == sorted(expected)


def test_missing_reference_table_and_column_are_bad_input(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = results / "ci" / "rank_sweep" / "table.csv"
    write_table(path, pd.read_csv(path).drop(columns="bytes_ratio"))
    assert compare(results) == 2
    assert "column bytes_ratio is missing" in capsys.readouterr().err
    path.unlink()
    assert compare(results) == 2
    assert "snakemake -c2 rank_sweep" in capsys.readouterr().err
    shutil.rmtree(results / "reference")
    assert compare(results) == 2
    assert "make reference" in capsys.readouterr().err


def test_update_keeps_tables_and_provenance_only(results: Path, kept_results: Path) -> None:
    shutil.copytree(kept_results / "ci" / "window_ablation", results / "ci" / "window_ablation", dirs_exist_ok=True)
    shutil.rmtree(results / "reference")
    reference.main("ci", results)
    folder = results / "reference" / "ci"
    declared = {f"{study}/{name}" for study in COMPARED for name in matrix.load_study(study).results}
    written = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert "provenance.yaml" in written <= {*declared, "claims.csv", "provenance.yaml"}
    for study in COMPARED:
        assert (folder / study / "table.csv").read_bytes() == (REFERENCE / "ci" / study / "table.csv").read_bytes()
    record = yaml.safe_load((folder / "provenance.yaml").read_text())
    assert record["runs"] == 2 and set(record) >= {"dates", "versions", "git", "hardware"}
    before = sorted(folder.rglob("*"))
    shutil.rmtree(results / "ci" / "methods")
    with pytest.raises(SystemExit) as stop:
        reference.main("ci", results)
    assert stop.value.code == 2 and sorted(folder.rglob("*")) == before


def test_a_simulated_study_is_kept_and_says_that_nothing_was_run(results: Path) -> None:
    committed, fresh = REFERENCE / "workstation" / "break_even", results / "ci" / "break_even"
    shutil.copytree(committed, fresh, ignore=shutil.ignore_patterns("*.yaml"))
    reference.main("ci", results, study="break_even")
    kept = results / "reference" / "ci" / "break_even"
    assert {path.name for path in kept.iterdir()} == {path.name for path in committed.iterdir()}
    assert all((kept / path.name).read_bytes() == path.read_bytes() for path in fresh.iterdir())
    assert yaml.safe_load((kept / "provenance.yaml").read_text()) == {"runs": 0, "kind": "simulated"}
    assert (kept.parent / "figures" / "break_even.png").is_file()
    with pytest.raises(SystemExit) as stop:
        reference.main("ci", results, study="nothing")
    assert stop.value.code == 2


def test_incomplete_checks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tolerances.yaml"
    for entry, message in (
        ({"kind": "bounds"}, "needs a bound"),
        ({"kind": "order"}, "needs `by`"),
        ({"kind": "bounds", "atleast": 3}, "unknown key"),
    ):
        check = {"study": "methods", "column": "cc"} | entry
        path.write_text(yaml.safe_dump({"key": ["variant"], "checks": [check]}))
        with pytest.raises(UserError, match=message):
            regression.load_tolerances(path)
