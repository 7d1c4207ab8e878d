"""What a workflow shows while it runs: the estimate of the time left, lines without a terminal, and errors."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from edgc.errors import UserError
from experiments.evaluation.inputs import Model, TaskFile
from experiments.evaluation.progress import Progress
from experiments.spec import matrix
from workflows import durations, events, names, progress
from workflows.durations import Estimate, Step

ROOT = Path(__file__).resolve().parents[2]
TRAINED = [Step("train", "s", f"r{number}", 2) for number in range(4)]
FIGURES = [Step("figure", "", name, 1) for name in ("a", "b")]
KEPT = {**dict.fromkeys(TRAINED, 20.0), **dict.fromkeys(FIGURES, 4.0)}


def estimate(steps: list[Step], cores: int = 2, kept: dict[Step, float] | None = None) -> Estimate:
    return Estimate(dict(enumerate(steps)), KEPT if kept is None else kept, cores)


def test_steps_side_by_side_share_the_cores() -> None:
    assert estimate([*TRAINED, *FIGURES]).seconds_left(0.0) == 4 * 20 + 2 * 4 / 2
    assert estimate([*TRAINED, *FIGURES], cores=4).seconds_left(0.0) == 4 * 20 / 2 + 2 * 4 / 4
    assert estimate(TRAINED[:1], cores=8).seconds_left(0.0) == 20.0, "the longest step is not shortened by cores"


def test_time_left_goes_down_to_nothing_and_never_below() -> None:
    found = estimate([*TRAINED, *FIGURES])
    left, now = [found.seconds_left(0.0)], 0.0
    for number, step in enumerate([*TRAINED, *FIGURES]):
        found.start(number, now)
        left += [found.seconds_left(now + part * KEPT[step]) for part in (0.5, 1.0)]
        now += KEPT[step]
        found.end(number, now)
        left.append(found.seconds_left(now))
    known = [seconds for seconds in left if seconds is not None]
    assert len(known) == len(left)
    assert known == sorted(known, reverse=True)
    assert known[-1] == 0.0
    late = estimate(TRAINED[:1])
    late.start(0, 0.0)
    assert late.seconds_left(1e6) == 0.0


def test_a_slower_machine_corrects_the_estimate() -> None:
    found = estimate(TRAINED)
    found.start(0, 0.0)
    found.end(0, 60.0)
    assert found.ratio() == 3.0
    assert found.seconds_left(60.0) == 3 * 60.0


def test_unknown_steps_take_the_median_of_their_rule() -> None:
    kept = {Step("figure", "", name): seconds for name, seconds in (("a", 2.0), ("b", 3.0), ("c", 50.0))}
    assert estimate([Step("figure", "", "new")], 1, kept).seconds_left(0.0) == 3.0


def test_where_nothing_is_kept_what_has_ended_here_counts() -> None:
    found = estimate(TRAINED, kept={})
    assert found.seconds_left(0.0) is None
    found.start(0, 0.0)
    found.end(0, 7.0)
    assert found.seconds_left(7.0) == 3 * 7.0


def test_steps_of_an_unknown_rule_take_what_a_rule_takes() -> None:
    kept = {**dict.fromkeys(TRAINED, 20.0), Step("tables", "s"): 2.0, Step("claims"): 3.0, Step(durations.ALL): 900.0}
    assert estimate([*TRAINED, Step("regression", threads=2)], kept=kept).seconds_left(0.0) == 4 * 20.0 + 3.0


def test_failed_steps_are_not_waited_for() -> None:
    found = estimate(TRAINED[:2])
    found.start(0, 0.0)
    found.end(0, 1.0, failed=True)
    assert found.done == 0 and found.seconds_left(1.0) == 20.0
    found.start(0, 2.0)  # submitted again
    assert found.seconds_left(2.0) == 40.0


def test_durations_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / durations.NAME
    assert durations.read(path) == {}
    durations.write(path, KEPT)
    assert durations.read(path) == KEPT
    path.write_text("rule,seconds\nx,1\n")
    with pytest.raises(UserError, match="durations is damaged"):
        durations.read(path)


def test_make_help_says_what_is_kept(tmp_path: Path) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "workflows", tmp_path / "workflows")
    path = tmp_path / "results" / "reference" / "ci" / durations.NAME

    def said() -> str:
        return subprocess.run(["make", "help"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    assert "took" not in said()
    path.parent.mkdir(parents=True)
    durations.write(path, KEPT | {Step(durations.ALL, threads=2): 700.0, Step(durations.TESTS, threads=3): 100.0})
    assert "`make reproduce SCALE=ci` took 12 min on 2 cores.\n`make test` took 2 min on 3 cores.\n" in said()


def test_kept_durations_can_be_read() -> None:
    for path in (ROOT / "results" / "reference").glob("*/" + durations.NAME):
        found = durations.read(path)
        assert found and min(found.values()) >= 0  # tenths of a second: a table that is only copied takes 0.0
        trained = [
            seconds for step, seconds in found.items() if step.rule == "train" and step.study in matrix.studies()
        ]
        assert trained and min(trained) > 0
    assert {durations.ALL, durations.TESTS} <= {step.rule for step in durations.kept("ci")}


def test_only_a_whole_reproduction_is_kept_as_one(tmp_path: Path) -> None:
    studies = [study for study in matrix.studies() if "ci" not in matrix.load_study(study).only_by_name]
    runs = [("train", {"study": study, "run": run.name}) for study in studies for run in matrix.runs(study, "ci")]
    for jobs, whole in ((runs, True), (runs[1:], False)):
        path = tmp_path / str(whole)
        path.mkdir()
        steps = progress.Steps("ci", path, 2)
        steps.take(plan(*jobs, ("snakemake_report", {})))
        numbers = list(range(len(jobs) + 1))
        steps.take({"event": events.STARTED, "jobs": numbers})
        for number in numbers:
            steps.take({"event": events.FINISHED, "jobs": [number]})
        steps.record()
        kept = durations.read(path / durations.NAME)
        assert len(kept) == len(numbers) + whole
        assert (Step(durations.ALL, threads=2) in kept) is whole


def plan(*jobs: tuple[str, dict[str, str]]) -> dict[str, object]:
    rows = [
        {"id": number, "rule": rule, "wildcards": wildcards, "threads": 1, "command": rule != "all"}
        for number, (rule, wildcards) in enumerate(jobs)
    ]
    return {"event": events.PLAN, "jobs": rows}


def test_steps_have_words(tmp_path: Path) -> None:
    run = matrix.runs("methods", "ci")[0]
    known = names.Names("ci", tmp_path)
    words = known.words(Step.of_job("train", {"study": "methods", "run": run.name}))
    assert words.startswith(f"train {run.label}, seed 1 of ") and words.endswith("(methods)")
    assert known.words(Step.of_job("methods_tables", {})) == "tables of methods"
    assert known.words(Step.of_job("figure", {"figure": "hero"})) == "draw hero"
    assert known.words(Step.of_job("train", {"study": "methods", "run": "gone-s1"})) == "train methods/gone-s1"


def test_running_steps_say_how_far_they_are(tmp_path: Path) -> None:
    run = matrix.runs("methods", "ci")[0]
    known, attempt = names.Names("ci", tmp_path), tmp_path / "methods" / run.name / ".attempt"
    training = Step.of_job("train", {"study": "methods", "run": run.name})
    assert known.inside(training) == ""
    attempt.mkdir(parents=True)
    (attempt / "metrics.jsonl").write_text('{"event": "step", "iteration": 7}\n{"event": "step", "itera')
    assert known.inside(training) == f"iteration 7 of {run.train.iterations}"
    log = tmp_path / "logs" / "evaluate" / "zero_shot.log"
    log.parent.mkdir(parents=True)
    log.write_text("3 of 9 documents (a b)\n")
    assert known.inside(Step.of_job("evaluate", {"study": "zero_shot"})) == "3 of 9 documents (a b)"


def test_every_rule_with_a_command_has_words() -> None:
    rules = Path(progress.__file__).parent / "rules"
    text = "".join(path.read_text() for path in rules.glob("*.smk"))
    blocks = [block.partition(":")[::2] for block in text.split("\nrule ")[1:]]
    named = {name for name, body in blocks if "shell:" in body.partition("\nrule ")[0]}
    assert "claims" in named
    assert named <= {*names.WORDS, "train"}, named


# A stand-in for Snakemake: tells of two steps, one of which fails, and says why.
CHILD = """
import os, sys, json
number = int(sys.argv[1])
def tell(**event): os.write(number, (json.dumps(event) + "\\n").encode())
jobs = [{"id": n, "rule": "figure", "wildcards": {"figure": f"f{n}"}, "threads": 1, "command": True} for n in (1, 2)]
tell(event="plan", jobs=jobs)
tell(event="job_started", jobs=[1, 2])
tell(event="job_finished", jobs=[1])
print("what failed and why", file=sys.stderr, flush=True)
tell(event="job_error", jobs=[2])
"""
PARENT = """
import subprocess, sys, time
from pathlib import Path
from workflows.progress import Display, Steps
folder, live = Path(sys.argv[1]), sys.argv[2] == "live"
with Display(Steps("ci", folder, 2), live=live) as display:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3], str(display.events)], pass_fds=[display.events],
        stdout=display.output, stderr=display.errors)
    display.started()
    child.wait()
"""


@pytest.mark.parametrize("kind", ["live", "plain"])
def test_steps_and_errors_are_shown_and_durations_written(tmp_path: Path, kind: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path), kind, CHILD],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = result.stderr.splitlines()
    assert any(line.startswith("2 steps to do") for line in lines), lines
    assert any(line.startswith("[1/2] draw f1: ") for line in lines)
    assert "what failed and why" in lines
    assert any(line.startswith("failed: draw f2") for line in lines)
    if kind == "plain":
        assert "\x1b" not in result.stderr
    assert [(step.rule, step.name) for step in durations.read(tmp_path / durations.NAME)] == [("figure", "f1")]


def test_a_line_is_written_after_a_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = progress.Steps("ci", tmp_path, 2)
    display = progress.Display(steps, live=False)
    display.said -= 2 * progress.SILENCE_SECONDS
    display.refresh()
    assert capsys.readouterr().err == "", "nothing is planned yet"
    steps.take(plan(("figure", {"figure": "a"}), ("all", {})))
    steps.take({"event": events.STARTED, "jobs": [0, 1]})
    display.refresh()
    assert capsys.readouterr().err.startswith("[0/1] draw a, ")
    display.refresh()
    assert capsys.readouterr().err == ""


def test_snakemake_still_says_what_is_wrong() -> None:
    def record(level: int, message: str, event: str | None = None) -> logging.LogRecord:
        made = logging.LogRecord("snakemake", level, "", 0, message, None, None)
        made.event = event
        return made

    assert events.is_shown(record(logging.ERROR, "Error in rule train", "job_error"))
    assert events.is_shown(record(logging.WARNING, "a warning"))
    assert events.is_shown(record(logging.INFO, "Nothing to be done (all requested files are present)."))
    assert events.is_shown(record(logging.INFO, "Job 3 has been submitted with SLURM jobid 7 (log: a/b.log)."))
    assert not events.is_shown(record(logging.INFO, " Rule: train", "job_info"))
    assert not events.is_shown(record(logging.INFO, "Job stats:\njob count", "run_info"))
    assert not events.is_shown(record(logging.INFO, "Select jobs to execute..."))


def test_events_are_lines_and_stop_with_their_reader() -> None:
    read, write = os.pipe()
    handler = events.Events(write)
    record = logging.LogRecord("snakemake", logging.INFO, "", 0, "Finished", None, None)
    record.event, record.job_id = "job_finished", 3
    handler.emit(record)
    assert json.loads(os.read(read, 1000)) == {"event": "job_finished", "jobs": [3]}
    os.close(read)
    handler.emit(record)
    os.close(write)


def test_evaluation_counts_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models = [Model(tmp_path, {"run": name}, "") for name in ("a", "b")]
    tasks = [TaskFile("long", "1", {}, "", {"documents": 300}), TaskFile("other", "1", {}, "", {})]
    now = [0.0]
    with Progress([(model, tasks) for model in models], live=False, clock=lambda: now[0]) as told:
        assert told.counts() == (0.0, 1200.0)
        now[0] = 60.0
        told.tell("a", "long", 150.0, 300)
        assert told.words() == "150 of 1200 documents, about 7 min left"
        told.tell("a", "other", 100.0, 100)
        assert told.words() == "250 of 800 documents, about 3 min left"
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "0 of 1200 documents (loading)"
    assert lines[-1] == "250 of 800 documents, about 3 min left (a other)"
