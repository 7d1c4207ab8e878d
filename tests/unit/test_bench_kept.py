"""Tables and figures of the kept benchmarks follow from the rounds beside them, by today's code."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from experiments.bench import network, race, terminal, testbed
from experiments.bench.__main__ import REFERENCE, app

MACHINE = ["machine", "caches", "torch"]


def kept(name: str) -> pd.DataFrame:
    [path] = REFERENCE.glob(f"*/{name}.csv")
    return pd.read_csv(path)


def test_the_program_writes_the_tables_that_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    [path] = REFERENCE.glob("*/network.json")
    monkeypatch.setattr(testbed, "missing", lambda: None)
    monkeypatch.setattr(network, "measure", lambda *_: kept("network_rounds"))
    terminal.run(network, network.Plan(), tmp_path)
    [folder] = tmp_path.iterdir()
    assert capsys.readouterr().out.splitlines() == [str(folder)]
    for name in ("network.csv", "network_rounds.csv"):
        ours, theirs = pd.read_csv(folder / name), pd.read_csv(path.with_name(name))
        pd.testing.assert_frame_equal(ours.drop(columns=MACHINE), theirs.drop(columns=MACHINE), rtol=1e-5)


def test_predictions_that_are_kept_are_computed_again_to_the_byte(tmp_path: Path) -> None:
    """After a change of the model: `python -m experiments.bench predict results/reference/bench/MACHINE`."""
    [folder] = [path.parent for path in REFERENCE.glob("*/steps.json")]
    for path in (path for name in ("steps", "pipeline") for path in folder.glob(f"{name}*.*")):
        shutil.copy(path, tmp_path)
    done = CliRunner().invoke(app, ["predict", str(tmp_path)])
    assert done.exit_code == 0, done.output
    paths = [Path(line) for line in done.stdout.split()]
    assert {path.name for path in paths} == {"steps.csv", "steps.json", "pipeline.csv", "pipeline.json"}
    for path in paths:
        assert path.read_text() == (folder / path.name).read_text(), path


@pytest.mark.parametrize("runs", sorted(REFERENCE.glob("*/race.csv")), ids=lambda path: path.parent.name)
def test_the_ranking_of_a_race_follows_from_its_runs(runs: Path) -> None:
    summary, theirs = race.summary(pd.read_csv(runs)), pd.read_csv(runs.with_name("race_summary.csv"))
    pd.testing.assert_frame_equal(summary, theirs[summary.columns], rtol=1e-5)
