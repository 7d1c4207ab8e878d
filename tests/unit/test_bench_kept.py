"""Tables and figures of the kept benchmarks follow from the rounds beside them, by today's code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from typer.testing import CliRunner

from experiments.bench import network, pipeline, race, steps, terminal, testbed
from experiments.bench.__main__ import REFERENCE, app
from paper_figures.__main__ import draw

MACHINE = ["machine", "caches", "torch"]


def kept(name: str) -> pd.DataFrame:
    [path] = REFERENCE.glob(f"*/{name}.csv")
    return pd.read_csv(path)


def read_steps(name: str) -> Callable[[dict[str, Any]], steps.Measurements]:
    return lambda record: steps.read(next(REFERENCE.glob(f"*/{name}.json")), record)


CASES: dict[str, tuple[Any, Callable[[dict[str, Any]], Any]]] = {
    "network": (network, lambda record: kept("network_rounds")),
    "steps": (steps, read_steps("steps")),
    "pipeline": (pipeline, read_steps("pipeline")),
}


@pytest.mark.parametrize("name", CASES)
def test_the_program_writes_the_tables_that_are_kept(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, measured = CASES[name]
    [path] = REFERENCE.glob(f"*/{name}.json")
    record = json.loads(path.read_text())
    monkeypatch.setattr(testbed, "missing", lambda: None)
    monkeypatch.setattr(module, "measure", lambda *_: measured(record))
    # Of an earlier version are other settings, such as how a record says that there is no limit.
    known = module.Plan.model_fields.keys() - {"rates"}
    settings = {key: value for key, value in record["settings"].items() if key in known}
    terminal.run(module, module.Plan(**settings), tmp_path)
    [folder] = tmp_path.iterdir()
    assert capsys.readouterr().out.splitlines() == [str(folder)]
    files = sorted(folder.glob("*.csv"))
    assert path.with_suffix(".csv").name in {file.name for file in files}
    for file in files:
        ours, theirs = pd.read_csv(file), pd.read_csv(path.with_name(file.name))
        pd.testing.assert_frame_equal(ours.drop(columns=MACHINE), theirs.drop(columns=MACHINE), rtol=1e-5)
    written = json.loads((folder / f"{name}.json").read_text())
    assert {key: written[key] for key in written.keys() - {"machine", "settings"}} == {
        key: record[key] for key in record.keys() - {"machine", "settings"}
    }


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


def test_the_ranking_of_the_race_follows_from_its_runs() -> None:
    summary, theirs = race.summary(kept("race")), kept("race_summary")
    pd.testing.assert_frame_equal(summary, theirs[summary.columns], rtol=1e-5)


def words(fig: Figure) -> str:
    """All words of a figure, which has labelled axes with data in every panel."""
    fig.canvas.draw()
    text = " ".join(text.get_text() for text in fig.findobj(Text))
    plt.close(fig)
    return text


def test_figures_show_what_is_kept() -> None:
    machine = {name: next(REFERENCE.glob(f"*/{name}.csv")).parent for name in ("network", "race", "steps")}
    failed = kept("network")["status"].ne("ok").any()
    assert ("failed" in words(draw("bench_network", machine["network"]))) == failed
    missed = kept("race_summary").eval("reached < seeds").any()
    assert ("never" in words(draw("bench_race", machine["race"]))) == missed
    fig = draw("bench_steps", machine["steps"])
    points = sum(len(line.get_xdata()) for ax in fig.axes for line in ax.lines if line.get_gid() == "step")
    assert points == sum((kept(name)["used"] == "validation").sum() for name in ("steps", "pipeline")) > 0
    assert any("DP2 x PP2" in ax.get_title(loc="left") for ax in fig.axes)
    plt.close(fig)
