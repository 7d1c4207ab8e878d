"""What is made again: nothing, what a touched file leads to, and what a killed workflow left unfinished."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from tests.workflow.checkout_copy import Checkout
from workflows.jobs import is_launcher, marked

ENDS_WITHIN_SECONDS = 5.0  # after Ctrl-C, with everything that was started
WORKFLOW = "workflows.program"


@pytest.fixture(scope="module")
def finished(checkout: Checkout) -> Checkout:
    """A checkout in which everything has been made."""
    result = checkout.run(WORKFLOW, "--cores", "4")
    assert result.returncode == 0, result.stdout
    words = result.stdout.splitlines()[-7:]
    made = [study for study in matrix.studies() if "ci" not in matrix.load_study(study).only_by_name]
    runs = sum(len(matrix.runs(study, "ci")) for study in made)
    assert f"runs     {runs} ok" in words
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


def test_report_is_one_file_with_every_figure(finished: Checkout) -> None:
    text = (finished.path / "results" / "ci" / "report.html").read_text()
    assert "Tables" in text
    assert "Claims" in text
    for figure in (finished.path / "results" / "ci" / "figures").glob("*.png"):
        assert figure.name in text
    assert "stage_spread.png" in text
    assert "stages.csv" in text
    assert "a-machine" in text


def test_nothing_to_do_twice_and_touched_study_runs_alone(finished: Checkout) -> None:
    assert finished.plan(["all"]) == [{}]
    studies = finished.path / "experiments" / "studies"
    for study, own in (
        ("rank_sweep", {"train": len(matrix.runs("rank_sweep", "ci")), "table": 1, "figure": 1}),
        # A claim reads its table, and so does the study that goes beyond it, which has three figures.
        ("gpt2_12p1b_h100", {"cluster_model": 1, "claims": 1, "scenarios": 1, "figure": 4}),
        ("gpt2_2p5b_v100", {"cluster_model": 1, "figure": 1}),
    ):
        path = studies / f"{study}.yaml"
        before = path.stat()
        path.touch()
        # By hand and at every call: without the checksums by which Snakemake would skip an unchanged file.
        [plan] = finished.plan(["all"])
        assert plan == own | {"report_html": 1, "all": 1}
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert finished.plan(["all"]) == [{}]


def test_touched_figure_script_draws_that_figure_only(finished: Checkout) -> None:
    path = finished.path / "paper_figures" / "methods.py"
    before = path.stat()
    path.touch()
    [plan] = finished.plan(["figures"])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert plan == {"figure": 1, "figures": 1}


@pytest.mark.slow
def test_killed_workflow_is_continued(finished: Checkout) -> None:
    folder = finished.path / "results" / "ci"
    run = folder / "rank_sweep" / matrix.runs("rank_sweep", "ci")[0].name
    (run / "status").unlink()
    process = subprocess.Popen(
        finished.command(WORKFLOW, "--cores", "2", "rank_sweep"),
        cwd=finished.path,
        env=finished.environment(STAND_IN_SECONDS="1200"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: training(folder))
        [job] = training(folder)

        second = finished.run(WORKFLOW, "rank_sweep")
        assert second.returncode == 2
        assert second.stdout.startswith(f"error: another workflow is running, process {process.pid} ")
        assert len(second.stdout.splitlines()) == 1

        open_files = {os.path.realpath(entry) for entry in Path(f"/proc/{job}/fd").iterdir()}
        assert str(folder / ".workflow.lock") not in open_files
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert training(folder) == [job]  # an orphan, as after every SIGKILL
    assert not (run / "status").exists()

    # Snakemake dies with the workflow; the next call clears its lock and the orphan away.
    wait_for(lambda: finished.run(WORKFLOW, "--cores", "4").returncode == 0)
    assert marked(folder) == []
    assert (run / "status").read_text() == "ok\n"
    assert finished.plan(["all"]) == [{}]


@pytest.mark.slow
def test_terminated_workflow_ends_its_jobs(finished: Checkout) -> None:
    folder = finished.path / "results" / "ci"
    run = folder / "rank_sweep" / matrix.runs("rank_sweep", "ci")[0].name
    (run / "status").unlink()
    process = subprocess.Popen(
        finished.command(WORKFLOW, "--cores", "2", "rank_sweep"),
        cwd=finished.path,
        env=finished.environment(STAND_IN_SECONDS="1200"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: training(folder))
        process.terminate()
        assert process.wait(timeout=600) == 128 + signal.SIGTERM
        assert marked(folder) == []
    finally:
        process.kill()


@pytest.mark.slow
def test_interrupted_workflow_ends_everything_and_says_what_is_kept(finished: Checkout) -> None:
    folder = finished.path / "results" / "ci"
    runs = [folder / "rank_sweep" / run.name for run in matrix.runs("rank_sweep", "ci")]
    (runs[0] / "status").unlink(missing_ok=True)
    checkpoint = runs[0] / ".checkpoints" / "iter_0000040"
    checkpoint.mkdir(parents=True)
    process = subprocess.Popen(
        finished.command(WORKFLOW, "--cores", "2", "rank_sweep"),
        cwd=finished.path,
        env=finished.environment(STAND_IN_SECONDS="1200"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: training(folder))
        before = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=600)
        assert time.monotonic() - before < 2 * ENDS_WITHIN_SECONDS
    finally:
        process.kill()
    assert process.returncode == 130
    assert marked(folder) == []
    words = errors.splitlines()[-1]
    whole = sum((folder / study / run.name / "status").is_file() for study, run in everything())
    assert words.startswith(f"interrupted: {whole} of {len(everything())} runs are finished and kept in ")
    assert f"; rank_sweep/{runs[0].name} goes on from iter_0000040; the same command continues" in words
    assert "Terminating processes" not in errors and "Traceback" not in errors and "report" not in output
    assert not list((finished.path / ".snakemake" / "locks").glob("*"))
    checkpoint.rmdir()
    checkpoint.parent.rmdir()
    assert finished.run(WORKFLOW, "--cores", "4").returncode == 0
    assert finished.plan(["all"]) == [{}]


def everything() -> list[tuple[str, RunConfig]]:
    return [(study, run) for study in matrix.studies() for run in matrix.runs(study, "ci")]


def test_unusable_results_folder_is_one_line_and_exit_code_2(checkout: Checkout) -> None:
    (checkout.path / "taken").write_text("a file, not a folder\n")
    result = checkout.run(WORKFLOW, "--results", "taken")
    assert result.returncode == 2
    assert result.stdout.startswith("error: results folder is not writable")
    assert len(result.stdout.splitlines()) == 1
    assert (checkout.path / "taken").read_text() == "a file, not a folder\n"


def test_unknown_scale_is_one_line_and_exit_code_2(checkout: Checkout) -> None:
    result = checkout.run(WORKFLOW, "--scale", "huge")
    assert result.returncode == 2
    assert result.stdout.startswith("error: unknown scale 'huge'")
    assert len(result.stdout.splitlines()) == 1
    assert not (checkout.path / "results" / "huge").exists()
