"""The race over slow links: its runs, its clock, its ranking, and how it fails."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from experiments.bench import race
from experiments.bench.workers import WorkerError


def write_run(folder: Path, config: Any, losses: list[float], seconds: float, status: str = "ok") -> None:
    """A run folder with an evaluation at every tenth step, all steps taking ``seconds``."""
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    (folder / "summary.json").write_text(json.dumps({"run": config.name, "status": status, "bytes_ratio": 0.5}))
    (folder / "status").write_text(f"{status}\n")
    events: list[dict[str, Any]] = []
    for at, loss in enumerate(losses, start=1):
        for iteration in range(10 * at - 9, 10 * at + 1):
            step = {"event": "step", "iteration": iteration, "loss": loss, "bytes": 10, "seconds": seconds}
            events.append(step | {"stages": []})
        events.append({"event": "eval", "iteration": 10 * at, "loss": loss, "perplexity": math.exp(loss)})
    events.append({"event": "end", "status": status, "iterations": 10 * len(losses)})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))


@pytest.fixture
def raced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[race.Plan, Path]:
    """Uncompressed reaches 5.0 at iteration 30 of 40; int4 at half the time a step, later; top-k never does."""
    plan = race.Plan(rates=(50.0,), seeds=(1, 2), methods=("int4", "topk", "edgc_cqm"))
    monkeypatch.setitem(race.RACE.base["train"], "iterations", 40)
    for config in plan.runs():
        folder = tmp_path / "race" / "50" / "ci" / "race" / config.name
        losses, seconds, status = {
            "none": ([7.0, 6.0, 5.0, 4.0], 2.0, "ok"),
            "int4": ([7.0, 6.0, 5.5, 4.5], 1.0, "ok"),
            "topk": ([8.0, 7.0, 6.5, 6.0], 0.1, "ok"),
            "edgc_cqm": ([7.0, 6.0, 5.0, 4.0], 1.5, "ok" if config.seed == 1 else "diverged"),
        }[config.variant]
        write_run(folder, config, losses, seconds, status)
    return plan, tmp_path / "race"


def test_the_clock_stops_where_the_loss_is_reached_and_who_misses_it_comes_last(
    raced: tuple[race.Plan, Path],
) -> None:
    tables = race.tables(*raced)
    table = tables["race"].set_index(["method", "seed"])
    assert table.loc[("none", 1), "target_loss"] == 5.0
    assert table.loc[("none", 1), "seconds"] == 60.0
    assert table.loc[("int4", 1), "iterations"] == pytest.approx(35.0)
    assert table.loc[("int4", 1), "seconds"] == pytest.approx(35.0)
    assert table.loc[("int4", 2), "of_uncompressed"] == pytest.approx(35 / 60)
    assert math.isnan(table.loc[("topk", 1), "seconds"])
    assert table.loc[("edgc_cqm", 1), "of_uncompressed"] == pytest.approx(0.75)
    assert table.loc[("edgc_cqm", 2), "status"] == "diverged"
    # Who does not arrive comes last.
    summary = tables["race_summary"].set_index("method")
    assert list(summary.index) == ["int4", "none", "edgc_cqm", "topk"]
    assert list(summary["place"]) == [1, 2, 3, 4]
    assert list(summary["reached"]) == [2, 2, 1, 0]
    assert summary.loc["none", ["of_uncompressed", "lowest", "highest"]].tolist() == [1, 1, 1]


def test_runs_of_the_file() -> None:
    runs = race.Plan(seeds=(1, 2)).runs()
    known = race.RACE.variants
    assert [run.variant for run in runs[: len(known)]] == list(known)
    assert runs[0].variant == "none" and runs[0].seed == 1
    assert {run.parallel.world for run in runs} == {2}
    assert len({json.dumps(run.train.model_dump(mode="json")) for run in runs}) == 1, "the same training for all"
    assert [run.variant for run in race.Plan(seeds=(1,), methods=("int4",)).runs()] == ["none", "int4"]


def test_runs_that_are_there_are_not_repeated(raced: tuple[race.Plan, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    class Network(contextlib.nullcontext[object]):
        hosts = 2

        def __enter__(self) -> Network:
            assert self.enter_result == self.hosts
            return self

        def limit(self, rate: float) -> None:
            assert rate == 50.0

    plan, folder = raced
    (folder / "50" / "ci" / "race" / "int4-s2" / "status").unlink()
    started: list[str] = []
    monkeypatch.setattr(race, "Testbed", Network)
    monkeypatch.setattr(race, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(race, "train", lambda run, results, testbed: started.append(run.name))
    said: list[str] = []
    assert race.measure(plan, folder.parent, said.append) == folder
    assert started == ["int4-s2"] and said == ["50 Mbit/s: int4-s2"]


def test_a_launcher_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        hosts = 2
        address = staticmethod(lambda node: "127.0.0.1")
        inside = staticmethod(lambda node: [])

    (run, *_) = race.Plan(seeds=(1,)).runs()
    with pytest.raises(WorkerError, match=r"none-s1: .*training data is missing"):
        race.train(run, tmp_path, Here())  # type: ignore[arg-type]
    assert not (tmp_path / "ci" / "race" / run.name).exists()
