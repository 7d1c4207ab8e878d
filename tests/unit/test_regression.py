"""The comparison with the committed reference passes on equal tables and fails on each kind of difference."""

from __future__ import annotations

import shutil
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

TRAINED = ("methods", "entropy_trend", "rank_sweep", "rank_model", "window_ablation", "sampling_ablation")


@pytest.fixture(scope="module")
def prepared(synthetic_results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with the tables of the trained studies and tolerances for these."""
    results = tmp_path_factory.mktemp("results")
    for study in TRAINED:
        ignore = shutil.ignore_patterns("metrics.jsonl", "*.parquet")  # which only the analysis reads
        shutil.copytree(synthetic_results / study, results / "ci" / study, ignore=ignore)
    values = yaml.safe_load(regression.TOLERANCES.read_text())
    values["checks"] = [check for check in values["checks"] if check["study"] in TRAINED]
    (results / "tolerances.yaml").write_text(yaml.safe_dump(values, explicit_end=True))
    return results


@pytest.fixture
def results(prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(prepared, tmp_path / "results"))


def compare(results: Path) -> int:
    """Exit code of the program."""
    try:
        regression.main("ci", results, None, results / "tolerances.yaml", every=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def write_reference(results: Path) -> None:
    reference.main("ci", results, None, results / "tolerances.yaml")


def change(path: Path, variant: str, column: str, value: Any) -> None:
    table = pd.read_csv(path)
    table.loc[table["variant"] == variant, column] = value
    write_table(path, table)


def test_the_committed_tolerances_are_valid_and_cover_every_study() -> None:
    checks = regression.load_tolerances()
    assert {check.study for check in checks} >= {*TRAINED, "zero_shot", "gpt2_2p5b_v100", "gpt2_12p1b_h100"}
    assert all(check.key for check in checks)


def test_a_fresh_run_equal_to_the_reference_passes(results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_reference(results)
    assert compare(results) == 0
    assert "0 OUTSIDE" in capsys.readouterr().out
    written = pd.read_csv(results / "ci" / "regression.csv")
    assert len(written) > 100
    assert written["ok"].all()


def test_of_the_text_of_another_python_only_what_does_not_hang_on_it_is_judged(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reference(results)
    reference_of = results / "reference" / "ci" / "provenance.yaml"
    values = yaml.safe_load(reference_of.read_text())
    values |= {"data_fingerprint": "aa", "versions": {"python": "3.11.7"}}
    reference_of.write_text(yaml.safe_dump(values))
    data = results / "ci" / "data" / "stdlib" / "data.yaml"
    data.parent.mkdir(parents=True)
    change(results / "ci" / "methods" / "table.csv", "none", "validation_perplexity", 400.0)
    # Another text by the same Python is a change of the project's own.
    for python, fingerprint, code in (
        ("3.11.7", "aa", 1),
        ("3.11.7", "bb", 1),
        ("3.11.2", "aa", 1),
        (None, "bb", 1),
        ("3.11.2", "bb", 0),
    ):
        data.write_text(yaml.safe_dump({"python": python, "fingerprint": fingerprint}))
        assert compare(results) == code
        said = capsys.readouterr().out
        assert ("not judged" in said and "other text" in said) == (code == 0)
    # What holds on any text is still judged.
    change(results / "ci" / "methods" / "table.csv", "none", "status", "diverged")
    assert compare(results) == 1


@pytest.mark.parametrize(
    ("study", "variant", "column", "value"),
    [
        ("methods", "none", "validation_perplexity", 400.0),
        ("methods", "powersgd_r8", "bytes_ratio", 0.13),
        ("methods", "powersgd_r16", "gap_nats", 0.2),  # higher rank worse than lower: the order fails too
        ("methods", "none", "status", "diverged"),
        ("methods", "edgc_cqm", "decisions_outside_limits", 1),
        ("entropy_trend", "gpt", "slope_first_per_100", 0.3),
        ("rank_sweep", "r16", "worker_error_median", 0.5),
        ("window_ablation", "w20", "cc", 0.3),
        ("sampling_ablation", "a0.1_b0.25", "sample_rmse_nats", 0.5),
        ("sampling_ablation", "a1_b1", "rmse_nats", 0.01),
    ],
)
def test_each_difference_is_outside(
    results: Path, capsys: pytest.CaptureFixture[str], study: str, variant: str, column: str, value: Any
) -> None:
    write_reference(results)
    change(results / "ci" / study / "table.csv", variant, column, value)
    capsys.readouterr()
    assert compare(results) == 1
    assert "OUTSIDE" in capsys.readouterr().out


def test_a_difference_within_the_tolerance_passes(results: Path) -> None:
    write_reference(results)
    change(results / "ci" / "methods" / "table.csv", "none", "validation_perplexity", 160.0)
    assert compare(results) == 0


def test_missing_and_additional_rows_are_outside() -> None:
    check = Check(study="methods", kind="rows", column="status", key=["variant"])
    two = pd.DataFrame({"variant": ["a", "b"], "status": ["ok", "ok"]})
    for old, new in ((two, two.iloc[:1]), (two.iloc[:1], two)):
        outcomes = regression.compare(check, old, new)
        assert [outcome.ok for outcome in outcomes] == [True, False]
        assert "no row" in (outcomes[1].reference, outcomes[1].fresh)


def test_a_check_without_rows_does_not_pass_silently() -> None:
    check = Check(study="methods", kind="bounds", column="cc", at_least=0.5, key=["variant"])
    empty = pd.DataFrame({"variant": [], "cc": []})
    assert [outcome.ok for outcome in regression.compare(check, empty, empty)] == [False]


@pytest.mark.parametrize(
    ("values", "direction", "ok"),
    [
        ([3, 2, 1], "falls", True),
        ([1, 2, 3], "falls", False),
        ([1, 2, 3], "rises", True),
        ([3, 3.005, 1], "falls", True),
    ],
)
def test_order(values: list[float], direction: str, ok: bool) -> None:
    check = Check.model_validate(
        {
            "study": "s",
            "kind": "order",
            "column": "x",
            "by": "rank",
            "direction": direction,
            "tolerance": 0.01,
        }
    )
    frame = pd.DataFrame({"rank": [4, 8, 16], "x": values})
    assert regression.compare(check, frame, frame)[0].ok is ok


def test_missing_reference_is_bad_input_and_names_the_command(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare(results) == 2
    assert "make reference" in capsys.readouterr().err


def test_missing_fresh_table_and_missing_column_are_bad_input(
    results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_reference(results)
    path = results / "ci" / "rank_sweep" / "table.csv"
    table = pd.read_csv(path)
    write_table(path, table.drop(columns="bytes_ratio"))
    assert compare(results) == 2
    assert "column bytes_ratio is missing" in capsys.readouterr().err
    path.unlink()
    assert compare(results) == 2
    assert "snakemake -c2 rank_sweep" in capsys.readouterr().err


def test_update_keeps_tables_and_provenance_only(results: Path) -> None:
    write_reference(results)
    folder = results / "reference" / "ci"
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    declared = {name for study in TRAINED for name in matrix.load_study(study).results}
    assert names <= {*declared, "claims.csv", "provenance.yaml"}
    for study in TRAINED:
        fresh = (results / "ci" / study / "table.csv").read_bytes()
        assert (folder / study / "table.csv").read_bytes() == fresh
    record = yaml.safe_load((folder / "provenance.yaml").read_text())
    assert record["versions"] == {"torch": "2.13.0"}
    assert record["runs"] == 39


def test_update_of_a_simulated_study_says_that_nothing_was_run(results: Path) -> None:
    study = results / "ci" / "break_even"
    study.mkdir()
    pd.DataFrame({"cluster": ["paper"], "kind": ["simulated"]}).to_csv(study / "table.csv", index=False)
    reference.main("ci", results, study="break_even", runs=True)
    kept = results / "reference" / "ci" / "break_even"
    assert {path.name for path in kept.iterdir()} == {"table.csv", "provenance.yaml"}
    assert yaml.safe_load((kept / "provenance.yaml").read_text()) == {"runs": 0, "kind": "simulated"}


def test_update_of_one_study_leaves_the_others_and_has_its_own_provenance(results: Path) -> None:
    folder = results / "reference" / "ci"
    reference.main("ci", results, study="methods")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    tables = ("table", "summary", "time_to_target", "timings")
    own = {"methods/provenance.yaml", "methods/curves.parquet"}  # a figure is drawn from the curves
    assert names == own | {f"methods/{name}.csv" for name in tables}
    assert yaml.safe_load((folder / "methods" / "provenance.yaml").read_text())["runs"] == 13
    with pytest.raises(SystemExit) as stop:
        reference.main("ci", results, study="nothing")
    assert stop.value.code == 2


def test_update_without_results_changes_nothing(results: Path) -> None:
    shutil.rmtree(results / "ci" / "methods")
    with pytest.raises(SystemExit) as stop:
        write_reference(results)
    assert stop.value.code == 2
    assert not (results / "reference").exists()


def test_incomplete_checks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tolerances.yaml"
    for check, message in (
        ({"kind": "bounds"}, "needs a bound"),
        ({"kind": "order"}, "needs `by`"),
        ({"kind": "bounds", "atleast": 3}, "unknown key"),
    ):
        entry = {"study": "methods", "column": "cc"} | check
        path.write_text(yaml.safe_dump({"key": ["variant"], "checks": [entry]}))
        with pytest.raises(UserError, match=message):
            regression.load_tolerances(path)


def test_a_key_may_have_no_value() -> None:
    check = Check(study="s", kind="relative", column="value", key=["variant", "rank"], tolerance=0.1)
    old = pd.DataFrame({"variant": ["a", "a"], "rank": [16.0, None], "value": [1.0, 2.0]})
    assert all(outcome.ok for outcome in regression.compare(check, old, old[::-1]))
    moved = old.assign(value=[1.0, 3.0])
    assert [outcome.ok for outcome in regression.compare(check, old, moved)] == [True, False]
