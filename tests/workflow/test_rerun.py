"""What is made again: nothing, what a touched file leads to, and what a killed workflow left unfinished."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments.spec import matrix
from experiments.spec.settings import RunConfig
from tests.integration.launching import ENDS_WITHIN_SECONDS
from tests.workflow.checkout_copy import Checkout
from workflows.jobs import is_launcher, marked

WORKFLOW = "workflows.program"


@pytest.fixture(scope="module")
def finished(checkout: Checkout) -> Checkout:
    """A checkout in which everything has been made."""
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


def test_snakemakes_report_is_one_file_with_every_figure(finished: Checkout) -> None:
    assert (finished.path / "results" / "ci" / "report.html").is_file()
    text = (finished.path / "results" / "ci" / "snakemake_report.html").read_text()
    assert "Tables" in text
    assert "Claims" in text
    for figure in (finished.path / "results" / "ci" / "figures").glob("*.png"):
        assert figure.name in text
    assert "stage_spread.png" in text
    assert "stages.csv" in text
    assert "a-machine" in text


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
    """A plan without the reports, which follow from everything."""
    assert {plan.pop("report_html"), plan.pop("snakemake_report"), plan.pop("all")} == {1}
    return plan


def all_runs() -> int:
    return sum(len(matrix.runs(study, "ci")) for study in main_studies())


def main_studies() -> list[str]:
    return [study for study in matrix.studies() if "ci" not in matrix.load_study(study).only_by_name]


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
        edited(experiments / "studies" / "moe.yaml", "title: Mix", "title: A mix"),  # not part of `all`
    ):
        for path in (*experiments.glob("s*/*.yaml"), *finished.path.glob("paper_figures/*.py")):
            path.touch()
        assert finished.plan(["all"]) == [{}]
    assert finished.plan(["all"]) == [{}]


def test_a_title_a_figure_and_a_variant_train_nothing_that_is_there(finished: Checkout) -> None:
    """Of the three studies 0, 0 and 1 runs."""
    studies = finished.path / "experiments" / "studies"
    with edited(studies / "rank_sweep.yaml", "title: Fixed ranks", "title: Ranks that are fixed"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"rank_sweep_tables": 1, "figure": 1}
    figure = finished.path / "paper_figures" / "mine.py"
    figure.write_text('TABLES = ("rank_sweep/table.csv",)\nCAPTION = "**Mine.**"\n')
    try:
        assert followed_by_report(finished.plan(["all"])[0]) == {"figure": 1}
    finally:
        figure.unlink()
    one = "      r4: {label: rank 4, compression: {method: powersgd, rank: 4}}\n"
    with edited(studies / "rank_sweep.yaml", one, one + one.replace("r4:", "r5:").replace("4}}", "5}}")):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"train": 1, "rank_sweep_tables": 1, "figure": 1, "runs": 1}


def test_changed_settings_train_the_runs_that_have_them(finished: Checkout) -> None:
    studies = finished.path / "experiments" / "studies"
    with edited(studies / "rank_sweep.yaml", "iterations: 80, eval", "iterations: 60, eval"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {
        "train": len(matrix.runs("rank_sweep", "ci")),
        **dict.fromkeys(("rank_sweep_tables", "figure", "runs"), 1),
    }
    # A claim reads the simulated table, and so does the study that goes beyond it, which has three figures.
    with edited(studies / "gpt2_12p1b_h100.yaml", "nodes: {value: 16", "nodes: {value: 32"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"cluster_model": 1, "claims": 1, "scenarios": 1, "figure": 4}
    with edited(studies / "bases" / "gpt2.yaml", "value: 14.0e-6", "value: 15.0e-6"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"cluster_model": 3, "claims": 1, "scenarios": 1, "figure": 5}


def test_changed_code_makes_again_what_it_computes(finished: Checkout) -> None:
    engine = finished.path / "edgc" / "engine.py"
    code = "from __future__ import annotations\n"
    with edited(engine, code, code + "ANSWER = 42\n"):
        [plan] = finished.plan(["all"])
        assert plan["train"] == all_runs() and "data" not in plan
        assert plan["methods_tables"] == plan["runs"] == plan["claims"] == 1
    with edited(finished.path / "experiments" / "data" / "prepare.py", code, code + "ANSWER = 42\n"):
        [plan] = finished.plan(["all"])
        assert plan["train"] == all_runs() and plan["data"] == 1
    with edited(finished.path / "paper_figures" / "rank_sweep.py", code, code + "ANSWER = 42\n"):
        assert followed_by_report(finished.plan(["all"])[0]) == {"figure": 1}
    with edited(finished.path / "experiments" / "analyse" / "rank_limits.py", code, code + "ANSWER = 42\n"):
        plan = followed_by_report(finished.plan(["all"])[0])
        assert plan == {"rank_sweep_tables": 1, "figure": 1}
    with edited(finished.path / "results" / "paper_claims.yaml", "claims:", "claims:  # ours"):
        assert followed_by_report(finished.plan(["all"])[0]) == {"claims": 1}
    assert finished.plan(["all"]) == [{}]


def test_runs_of_other_code_are_kept_on_purpose(finished: Checkout) -> None:
    """A run's record names its code; with keep_runs that is what the run is compared with."""
    code = "from __future__ import annotations\n"
    with edited(finished.path / "edgc" / "engine.py", code, code + "ANSWER = 42\n"):
        [(_, text)] = finished.snakemake(["-n", "rank_sweep", "--config", "keep_runs=true"])
        assert f"keep_runs: {all_runs()} finished runs of other code than today's are kept" in text
        [kept, other] = finished.plan(
            ["rank_sweep", "--config", "keep_runs=true"], ["rank_sweep", "--config", "keep_runs=false"]
        )
        assert kept == {}
        assert other["train"] == len(matrix.runs("rank_sweep", "ci"))


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
    names = "rank_sweep/limits.csv", "gpt2_2p5b_v100/moves.csv", "figures/methods.pdf", "runs.csv"
    with missing(*(folder / name for name in names)):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"rank_sweep_tables": 1, "cluster_model": 1, "runs": 1, "figure": 3}
    with missing(folder / "rank_sweep" / "r4-s1" / "metrics.jsonl"):
        plan = followed_by_report(finished.plan(["all"])[0])
    assert plan == {"train": 1, "rank_sweep_tables": 1, "runs": 1, "figure": 1}
    assert finished.plan(["all"]) == [{}]


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
        assert time.monotonic() - before < ENDS_WITHIN_SECONDS
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
