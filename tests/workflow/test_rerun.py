"""What is made again: nothing, what a touched file leads to, and what a killed workflow left unfinished."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edgc.errors import UserError
from experiments.common.figures import FIGURES, MODULES
from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from tests.integration.launching import ENDS_WITHIN_SECONDS
from tests.workflow.checkout_copy import Checkout, planned
from workflows.jobs import is_launcher, marked
from workflows.program import lock

WORKFLOW = "workflows.program"


# The smallest study that trains, and those that simulate: thirty plans of all take minutes.
STUDIES = ("rank_sweep", "break_even", "gpt2_345m", "gpt2_2p5b_v100", "gpt2_12p1b_h100")


# Over 20 s: a whole workflow of stand-ins is made, and each plan reads all studies and fingerprints all code.
@pytest.fixture(scope="module")
def finished(checkout: Checkout) -> Checkout:
    """A checkout of a few studies in which everything has been made."""
    gone = [*(checkout.path / "experiments" / "studies").glob("*.yaml")]
    gone = [path for path in gone if path.stem not in STUDIES]
    drawn = {MODULES[name] for name, needed in FIGURES.items() if set(needed) <= set(STUDIES)}
    figures = {MODULES[name] for name in FIGURES} - drawn
    for path in [*gone, *(checkout.path / f"{name.replace('.', '/')}.py" for name in figures)]:
        path.unlink()
    result = checkout.run(WORKFLOW, "--cores", "4")
    assert result.returncode == 0, result.stdout
    words = result.stdout.splitlines()[-7:]
    assert f"runs     {all_runs()} ok" in words
    assert "report   results/ci/report.html" in words
    assert "claims   results/ci/claims.csv" in words
    return checkout


def wait_for(condition: Callable[[], object], seconds: float = 600.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def training(folder: Path) -> list[int]:
    """Process ids of the stand-ins that are training."""
    return [process.pid for process in marked(folder) if is_launcher(process)]


@contextmanager
def edited(path: Path, old: str, new: str) -> Iterator[None]:
    """A file in which ``old`` has become ``new``; afterwards as it was, its time too."""
    before, text = path.stat(), path.read_text()
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1))
    try:
        yield
    finally:
        path.write_text(text)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def followed_by_report(plan: dict[str, int]) -> dict[str, int]:
    """A plan without the report, which follows from everything."""
    assert {plan.pop("report_html"), plan.pop("all")} == {1}
    return plan


def all_runs() -> int:
    return len(matrix.runs("rank_sweep", "ci"))


def test_nothing_is_made_twice_nor_after_comments_and_times(finished: Checkout) -> None:
    experiments = finished.path / "experiments"
    with (
        edited(experiments / "scales" / "ci.yaml", "scale: ci", "# A comment.\nscale: ci"),
        edited(experiments / "scales" / "ci.yaml", "title: CI", "title: Continuous integration"),
        edited(
            experiments / "scales" / "ci.yaml",
            "eval_batches: 16",
            "eval_batches: 16\n    checkpoint_interval: 50",
        ),
        edited(experiments / "training" / "train.py", '"""', '"""Another docstring. '),
        edited(finished.path / "edgc" / "engine.py", "\nimport", "\n# A comment.\nimport"),
    ):
        for path in (*experiments.glob("s*/*.yaml"), *finished.path.glob("paper_figures/*.py")):
            path.touch()
        assert finished.plan(["all"]) == [{}]


def test_a_title_a_figure_and_a_variant_train_nothing_that_is_there(finished: Checkout) -> None:
    """Of the three studies 0, 0 and 1 runs."""
    studies = finished.path / "experiments" / "studies"
    figure = finished.path / "paper_figures" / "mine.py"
    figure.write_text('TABLES = ("rank_sweep/table.csv",)\nCAPTION = "**Mine.**"\n')
    try:
        with edited(studies / "rank_sweep.yaml", "title: Fixed ranks", "title: Ranks that are fixed"):
            plan = followed_by_report(finished.plan(["all"])[0])
        assert plan == {"rank_sweep_tables": 1, "figure": 2}
    finally:
        figure.unlink()
    one = "      r4: {label: rank 4, compression: {method: powersgd, rank: 4}}\n"
    with edited(studies / "rank_sweep.yaml", one, one + one.replace("r4:", "r5:").replace("4}}", "5}}")):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"train": 1, "rank_sweep_tables": 1, "figure": 1}


def test_changed_settings_train_the_runs_that_have_them(finished: Checkout) -> None:
    studies = finished.path / "experiments" / "studies"
    with edited(studies / "rank_sweep.yaml", "iterations: 80, eval", "iterations: 60, eval"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"train": all_runs(), **dict.fromkeys(("rank_sweep_tables", "figure"), 1)}
    # A claim reads the simulated table, and so does the study that goes beyond it, which has two figures.
    with edited(studies / "gpt2_12p1b_h100.yaml", "nodes: {value: 16", "nodes: {value: 32"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"gpt2_12p1b_h100_tables": 1, "break_even_tables": 1, "claims": 1, "figure": 3}
    with edited(studies / "bases" / "gpt2.yaml", "value: 14.0e-6", "value: 15.0e-6"):
        plan = followed_by_report(finished.plan(["all"])[0])
    simulated = [f"gpt2_{name}_tables" for name in ("345m", "2p5b_v100", "12p1b_h100")]
    assert plan == {**dict.fromkeys([*simulated, "break_even_tables", "claims"], 1), "figure": 4}


@pytest.mark.costly
def test_changed_code_makes_again_what_it_computes(finished: Checkout) -> None:
    engine = finished.path / "edgc" / "engine.py"
    code = "from __future__ import annotations\n"
    with edited(engine, code, code + "ANSWER = 42\n"):
        [plan] = finished.plan(["all"])
        assert plan["train"] == all_runs() and "data" not in plan
        assert plan["rank_sweep_tables"] == 1
    with edited(finished.path / "experiments" / "data" / "folder.py", code, code + "ANSWER = 42\n"):
        [plan] = finished.plan(["all"])
        assert plan["train"] == all_runs() and plan["data"] == 1
    figure = finished.path / "paper_figures" / "rank_sweep.py"
    with (
        edited(figure, "from pathlib import Path\n", "from pathlib import Path\nANSWER = 42\n"),
        edited(finished.path / "results" / "paper_claims.yaml", "claims:", "claims:  # ours"),
    ):
        assert followed_by_report(finished.plan(["all"])[0]) == {"figure": 1, "claims": 1}
    with edited(finished.path / "experiments" / "analyse" / "rank_sweep.py", code, code + "ANSWER = 42\n"):
        plan = followed_by_report(finished.plan(["all"])[0])
        assert plan == {"rank_sweep_tables": 1, "figure": 1}


def test_runs_of_other_code_are_kept_on_purpose(finished: Checkout) -> None:
    """A run's record names its code; with keep_runs that is what the run is compared with."""
    code = "from __future__ import annotations\n"
    with edited(finished.path / "edgc" / "engine.py", code, code + "ANSWER = 42\n"):
        calls = (["-n", "rank_sweep", "--config", f"keep_runs={kept}"] for kept in ("true", "false"))
        (_, kept), (_, other) = finished.snakemake(*calls)
    assert planned(kept) == {} and planned(other)["train"] == all_runs()


@contextmanager
def missing(*paths: Path) -> Iterator[None]:
    for path in paths:
        path.rename(path.with_suffix(".away"))
    try:
        yield
    finally:
        for path in paths:
            path.with_suffix(".away").rename(path)


def test_a_missing_file_is_made_again(finished: Checkout) -> None:
    folder = finished.path / "results" / "ci"
    names = "rank_sweep/limits.csv", "gpt2_2p5b_v100/steps.csv", "figures/break_even.pdf"
    with missing(*(folder / name for name in names)):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"rank_sweep_tables": 1, "gpt2_2p5b_v100_tables": 1, "figure": 3}
    with missing(folder / "rank_sweep" / "r4-s1" / "metrics.jsonl"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"train": 1, "rank_sweep_tables": 1, "figure": 1}


def reverse_times(folder: Path) -> None:
    """Every file gets a time of today, the oldest the latest, as a copy in some order may give them."""
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_mtime)
    for age, path in enumerate(files):
        os.utime(path, (time.time() - age / 100,) * 2)


@pytest.mark.costly
def test_results_that_lost_their_times_are_used_as_they_are(finished: Checkout) -> None:
    folder = finished.path / "results" / "ci"
    reverse_times(folder)
    assert finished.plan(["all"], ["rank_sweep", "--config", "keep_runs=true"]) == [{}, {}]
    with edited(folder / "rank_sweep" / "r4-s1" / "run.yaml", "provenance", "# Another time.\nprovenance"):
        assert finished.plan(["rank_sweep"]) == [{"rank_sweep_tables": 1, "figure": 1, "rank_sweep": 1}]
    records = finished.path / ".snakemake" / "metadata"
    away = records.rename(records.with_name("away"))
    try:  # copied without Snakemake's records
        (_, before), (code, text), (_, after) = finished.snakemake(
            ["-n", "all"], ["-c1", "--touch", "all"], ["-n", "all"]
        )
        assert planned(before) and code == 0 and planned(after) == {}, text
    finally:
        shutil.rmtree(records)
        away.rename(records)
    assert finished.plan(["all"]) == [{}]


def test_the_last_line_is_that_of_the_step_that_failed(finished: Checkout) -> None:
    analyse = finished.path / "experiments" / "analyse" / "__main__.py"
    for body, code, said in (
        ("sys.exit('error: a run is damaged (in x); delete it')", 2, "error: a run is damaged (in x); delete it"),
        ("raise ValueError('y')", 1, "failed: rank_sweep_tables: ValueError: y (in results/ci/logs/"),
    ):
        with edited(analyse, "from experiments.spec import matrix", body):
            result = finished.run(WORKFLOW, "--cores", "2", "rank_sweep")
        assert result.returncode == code and "same command" not in result.stdout, result.stdout
        assert result.stdout.splitlines()[-1].startswith(said), result.stdout


@contextmanager
def in_training(finished: Checkout) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A workflow in a process group of its own whose first run is in training, and the folder of that run."""
    folder = finished.path / "results" / "ci"
    run = folder / "rank_sweep" / matrix.runs("rank_sweep", "ci")[0].name
    (run / "status").unlink(missing_ok=True)
    with subprocess.Popen(
        finished.command(WORKFLOW, "--cores", "2", "rank_sweep"),
        cwd=finished.path,
        env=finished.environment(STAND_IN_SECONDS="1200"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            wait_for(lambda: training(folder))
            yield process, run
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.costly
def test_a_workflow_that_is_ended_ends_its_jobs_and_is_continued(finished: Checkout) -> None:
    folder = finished.path / "results" / "ci"
    with in_training(finished) as (process, run):
        [job] = training(folder)
        second = finished.run(WORKFLOW, "rank_sweep")
        assert second.returncode == 2
        assert second.stdout.startswith(f"error: another workflow is running, process {process.pid} ")
        assert len(second.stdout.splitlines()) == 1
        [(code, text)] = finished.snakemake(["-c1", "rank_sweep"])
        assert code == 2 and "another workflow is running" in text.splitlines()[-1], "one started by hand, neither"
        open_files = {os.path.realpath(entry) for entry in Path(f"/proc/{job}/fd").iterdir()}
        assert str(folder / ".workflow.lock") not in open_files
    # Killed, here: another process ends its jobs.
    wait_for(lambda: not marked(folder))
    assert not (run / "status").exists()

    # Snakemake dies with the workflow; the next call clears its lock away.
    with in_training(finished) as (process, _):
        process.terminate()
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
        assert marked(folder) == []

    checkpoint = run / ".checkpoints" / "iter_0000040"
    checkpoint.mkdir(parents=True)
    with in_training(finished) as (process, _):
        before = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=600)
        assert time.monotonic() - before < ENDS_WITHIN_SECONDS
    assert process.returncode == 130
    assert marked(folder) == []
    words = errors.splitlines()[-1]
    whole = sum((folder / study / run.name / "status").is_file() for study, run in everything())
    assert words.startswith(f"interrupted: {whole} of {len(everything())} runs are finished and kept in ")
    assert f"; rank_sweep/{run.name} goes on from iter_0000040; the same command continues" in words
    assert "Terminating processes" not in errors and "Traceback" not in errors and "report" not in output
    assert not list((finished.path / ".snakemake" / "locks").glob("*"))
    checkpoint.rmdir()
    checkpoint.parent.rmdir()
    assert finished.run(WORKFLOW, "--cores", "4").returncode == 0
    assert (run / "status").read_text() == "ok\n"
    assert finished.plan(["all"]) == [{}]


def everything() -> list[tuple[str, RunConfig]]:
    return [(study, run) for study in STUDIES for run in matrix.runs(study, "ci")]


def test_a_workflow_that_was_killed_a_moment_ago_is_waited_for(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    held = (tmp_path / ".workflow.lock").open("a+")
    fcntl.flock(held, fcntl.LOCK_EX)
    print(os.getpid(), file=held, flush=True)
    with pytest.raises(UserError, match=f"another workflow is running, process {os.getpid()}"):
        lock(tmp_path)
    held.truncate(0)
    print(ended.pid, file=held, flush=True)
    threading.Timer(0.5, held.close).start()
    lock(tmp_path).close()
    assert held.closed


def test_unusable_results_and_an_unknown_scale_are_one_line_and_exit_code_2(checkout: Checkout) -> None:
    (checkout.path / "taken").write_text("a file, not a folder\n")
    for option, value, said in (
        ("--results", "taken", "error: results folder is not writable"),
        ("--scale", "huge", "error: unknown scale 'huge'"),
    ):
        result = checkout.run(WORKFLOW, option, value)
        assert result.returncode == 2 and len(result.stdout.splitlines()) == 1
        assert result.stdout.startswith(said)
    assert (checkout.path / "taken").read_text() == "a file, not a folder\n"
    assert not (checkout.path / "results" / "huge").exists()
