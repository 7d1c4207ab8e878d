"""The benchmark of the stages' finish times: tables from known times, the program, the figure, the injected delay."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
from matplotlib.text import Text
from typer.testing import CliRunner

from edgc.compressors import Channel
from experiments.bench import stages
from experiments.bench.__main__ import app
from experiments.bench.collectives import Link
from experiments.spec.settings import RunConfig
from paper_figures import stage_spread
from paper_figures import timeline as timeline_figure
from tests.unit.test_timeline import timeline_of
from tests.workers import run_workers


def answers(*, spread: float, ranks: tuple[int | None, int | None]) -> list[dict[str, Any]]:
    """Two stages of two replicas: stage 0 is over ``spread`` after stage 1, of which one replica is 1 s earlier."""
    found = []
    for stage in (0, 1):
        for replica in (0, 1):
            iterations = [
                {
                    "iteration": index,
                    "rank": ranks[stage],
                    "steady": index > 2,
                    "finished": 100.0 * index + (spread * index if stage == 0 else 0.0) - replica,
                    "seconds": 2.0 + stage,
                }
                for index in range(1, 6)
            ]
            found.append({"stage": stage, "replica": replica, "iterations": iterations})
    return found


def known() -> pd.DataFrame:
    times = {"none": (0.4, (None, None)), "equal": (0.2, (8, 8)), "dac": (0.05, (8, None))}
    tables = [stages.rows(name, answers(spread=s, ranks=r)) for name, (s, r) in times.items()]
    return pd.concat(tables, ignore_index=True)


def test_a_stage_is_over_with_its_last_replica_and_only_steady_iterations_count() -> None:
    rows = stages.rows("equal", answers(spread=0.2, ranks=(8, 8)))
    assert list(rows["iteration"].unique()) == [3, 4, 5]
    assert rows[rows["stage"] == 0]["finish_seconds"].tolist() == pytest.approx([0.6, 0.8, 1.0])
    assert rows[rows["stage"] == 1]["finish_seconds"].tolist() == [0.0, 0.0, 0.0]


def test_table_of_known_times() -> None:
    none = pd.DataFrame()
    data = stages.Measurements(known(), {}, none, none)
    table = stages.tables(stages.Plan(), data)["stages"].set_index("variant")
    assert list(table.index) == list(stages.VARIANTS)
    assert table["spread_seconds"].tolist() == pytest.approx([1.6, 0.8, 0.2])
    assert table["of_equal"].tolist() == pytest.approx([2.0, 1.0, 0.25])
    assert table.loc["equal", ["spread_q1", "spread_q3"]].tolist() == pytest.approx([0.7, 0.9])
    assert table["ranks"].tolist() == ["dense/dense", "8/8", "8/dense"]
    assert set(table["iterations"]) == {3} and set(table["step_seconds"]) == {3.0}


def test_program_and_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timing = [{"stage": 0, "seconds_per_rank": 0.1}]
    decisions = {name: [{"timing": []}, {"timing": timing}] for name in stages.VARIANTS}
    shares, spans = zip(*(timeline_of(name) for name in stages.VARIANTS), strict=True)
    found = stages.Measurements(known(), decisions, pd.concat(shares), pd.concat(spans))
    monkeypatch.setattr(stages, "measure", lambda *_: found)
    done = CliRunner().invoke(app, ["stages", "--slowdown", "3", "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    [folder] = tmp_path.iterdir()
    assert done.stdout.splitlines() == [str(folder)]
    described = json.loads((folder / "stages.json").read_text())
    assert described["settings"]["slowdown"] == 3.0
    assert described["timing"] == [timing]
    assert len(pd.read_csv(folder / "stages_iterations.csv")) == len(known())
    fig = stage_spread.draw(folder)
    said = " ".join(text.get_text() for text in fig.findobj(Text))
    assert "INJECTED" in said and "0.25 ×" in said and "equal ranks" in said
    fig = timeline_figure.draw(folder)
    assert any("INJECTED" in text.get_text() for text in fig.texts)
    for ax in fig.axes:
        assert [text.get_text() for text in ax.texts if "idle" in text.get_text()] == ["50 % idle", "40 % idle"]
    plt.close("all")


def test_settings_of_every_variant_are_valid() -> None:
    plan = stages.Plan(pipeline=3, slowdown=4.0, megabytes=2.0)
    assert plan.bandwidths == [0.5e6, 2e6, 2e6]
    runs = {name: RunConfig(**stages.settings(plan, name)) for name in stages.VARIANTS}
    assert all(run.micro_batches == plan.micro_batches for run in runs.values())
    assert [run.edgc.to_dict().get("alignment") for run in runs.values()] == [None, "off", "measured"]
    # Beside alignment, equal ranks and DAC differ in nothing but what is timed and how long warm-up takes.
    equal, dac = runs["equal"].edgc.to_dict(), runs["dac"].edgc.to_dict()
    assert {key for key in equal if equal[key] != dac[key]} == {"alignment", "search_start"}


def delayed() -> dict[str, Any]:
    """Seconds and results of an all-reduce of 40 kB: as it is, at 1 MB/s, and with the limit taken away again."""
    link, found = Link(), []
    for bandwidth in (None, 1e6, None):
        link.bandwidth = bandwidth
        channel, tensor = link(None), torch.ones(10_000)
        started = time.perf_counter()
        channel.mean_(tensor)
        channel.finish()
        channel.finish()  # nothing is left to wait for
        found.append((time.perf_counter() - started, channel.waited.seconds, bool((tensor == 1).all())))
    return {"times": found, "bytes": channel.bytes, "is_channel": isinstance(channel, Channel)}


def test_an_injected_delay_is_waited_for_and_counted() -> None:
    for result in run_workers(2, delayed):
        assert result["bytes"] == 40_000 and result["is_channel"]
        assert all(equal for _, _, equal in result["times"])
        seconds, waited, _ = result["times"][1]
        assert seconds >= waited >= 0.04
