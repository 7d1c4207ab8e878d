"""``python -m workflows.program [TARGET ...]``: what ``make reproduce`` runs around Snakemake.

Checks all settings before anything starts, lets one workflow at a time work in a results folder, clears away
what a killed one left (processes and Snakemake's lock), runs Snakemake, and says where the results are.
Options that it does not know go to Snakemake.

The results folder is locked by an open file that only this process and Snakemake hold, so the kernel drops
the lock when both are gone, however they end; Snakemake is killed when this process is. Jobs do not hold it:
those of a killed workflow are found by a mark in their environment, and stopped, at once by a process that waits
for that, and by the next workflow where that was killed, too; with ``--profile slurm`` those that
it has left in the queue are cancelled.
"""

from __future__ import annotations

from experiments.common import interrupts

if __name__ == "__main__":
    interrupts.while_starting()

import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import typer

from edgc.errors import UserError
from experiments.cluster import slurm
from experiments.common.cli import main_guard
from experiments.common.files import ROOT, check_writable
from experiments.common.processes import die_with_parent
from experiments.common.yaml_settings import validate
from experiments.spec import matrix
from experiments.spec.study import PipelineSettings
from experiments.training.outputs import RunFolder
from workflows import jobs
from workflows.targets import check_studies, check_targets

LOCKS = ROOT / ".snakemake" / "locks"
PLACES = {"report": "report.html", "figures": "figures/*.png", "tables": "*/table.csv", "claims": "claims.csv"}
Targets = Annotated[list[str] | None, typer.Argument(help="what to make, default: all; before all options")]


def lock(folder: Path) -> IO[str]:
    """Claim a results folder; the claim lasts as long as the returned file is open in any process.

    Raises:
        UserError: another workflow holds it.
    """
    path = folder / ".workflow.lock"
    handle = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        owner = handle.read().strip() or "unknown"
        fix = "wait for it or stop it"
        raise UserError(f"another workflow is running, process {owner}", where=path, fix=fix) from None
    handle.seek(0)
    handle.truncate()
    handle.write(f"{os.getpid()}\n")
    handle.flush()
    return handle


def unlock(arguments: list[str]) -> None:
    """Remove Snakemake's own lock where a killed Snakemake left one.

    Raises:
        UserError: its owner is alive.
    """
    if not any(LOCKS.glob("*")):
        return
    if owner := jobs.other_snakemake(ROOT):
        fix = "wait for it or stop it"
        raise UserError(f"Snakemake is already running here, process {owner}", where=ROOT, fix=fix)
    print("removing the lock of an interrupted Snakemake", file=sys.stderr)
    subprocess.run([*arguments, "--unlock", "--quiet"], cwd=ROOT, check=True, capture_output=True)


def run_snakemake(arguments: list[str], handle: IO[str], folder: Path, on_slurm: bool) -> int:
    """Run Snakemake to its end; after signal n, which ends it and all its jobs, returns 128 + n.

    Ctrl-C does not reach Snakemake, which would report every job that it ends: it is killed, its jobs are stopped, and
    its lock is removed. With Slurm it is asked to end, for it cancels what it has submitted.
    """
    set_death_signal = die_with_parent(signal.SIGKILL)

    def begin() -> None:
        set_death_signal()
        if not on_slurm:
            interrupts.ignore()

    environment = os.environ | {jobs.MARK: str(folder.resolve())}
    process = subprocess.Popen(arguments, cwd=ROOT, env=environment, pass_fds=[handle.fileno()], preexec_fn=begin)
    stopped = 0

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = number

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    code = None
    while code is None:
        if stopped and not on_slurm:
            process.kill()
            code = process.wait()
            if stopped == signal.SIGINT:
                jobs.stop(folder, signal.SIGINT, jobs.INTERRUPT_SECONDS, jobs.is_launcher)
            shutil.rmtree(LOCKS, ignore_errors=True)
            break
        # Ctrl-C reaches Snakemake and its jobs by itself. Other signals are handed on: SIGINT to Snakemake, for
        # which SIGTERM would mean to wait for what runs, and SIGTERM to the jobs.
        if stopped not in (0, signal.SIGINT):
            process.send_signal(signal.SIGINT)
            jobs.send(signal.SIGTERM, [job for job in jobs.marked(folder) if job.pid != process.pid])
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=0.2)
    jobs.stop(folder)
    if stopped or code < 0:
        return 128 + (stopped or -code)
    return code


def run_states(folder: Path, scale: str) -> dict[Path, str]:
    """Folder of every run -> its status; "" where it has not ended."""
    runs, _ = matrix.all_runs(scale)
    paths = [folder / study / run.name for study, configs in runs.items() for run in configs]
    ended = {path: path / "status" for path in paths}
    return {path: file.read_text(encoding="utf-8").strip() if file.is_file() else "" for path, file in ended.items()}


def kept_words(folder: Path, scale: str) -> str:
    """Sentence on what an interrupted workflow keeps, in one line."""
    states = run_states(folder, scale)
    newest = {path: RunFolder(path).newest_checkpoint() for path, state in states.items() if not state}
    going_on = [f"{p.parent.name}/{p.name} goes on from {n.name}" for p, n in newest.items() if n is not None]
    finished = len(states) - len(newest)
    words = [f"{finished} of {len(states)} runs are finished and kept in {folder}", *going_on]
    return f"interrupted: {'; '.join(words)}; the same command continues"


def closing_words(folder: Path, scale: str) -> list[str]:
    """Sentence on where the results are, and which runs did not end well."""
    lines = []
    for name, pattern in PLACES.items():
        paths = [path for path in folder.glob(pattern) if path.is_file()]
        if paths:
            lines.append(f"{name:8} {paths[0] if len(paths) == 1 else f'{folder / pattern} ({len(paths)})'}")
    states = {f"{path.parent.name}/{path.name}": state for path, state in run_states(folder, scale).items() if state}
    if states:
        counts = sorted(Counter(states.values()).items())
        lines.append(f"{'runs':8} " + ", ".join(f"{count} {state}" for state, count in counts))
    return lines + [f"         {run}: {state}" for run, state in states.items() if state != "ok"]


@main_guard
def main(
    targets: Targets = None,
    scale: Annotated[str, typer.Option(help="file in experiments/scales")] = "ci",
    results: Annotated[Path, typer.Option(help="folder of all results")] = Path("results"),
    cores: Annotated[int, typer.Option(help="cores to use")] = os.cpu_count() or 1,
    keep_runs: Annotated[
        bool, typer.Option("--keep-runs", help="keep runs made by code of an earlier version")
    ] = False,
    profile: Annotated[str | None, typer.Option(help="of Snakemake, e.g. slurm")] = None,
    parent: Annotated[bool, typer.Option("--die-with-parent", help="end when the starting process ends")] = False,
) -> None:
    """Run the workflow: one at a time for a results folder, continuing where an interrupted one stopped.

    Other options go to Snakemake, e.g. -n (plan only).
    """
    words = targets or []
    # Options that are not known here, and what follows the first of them.
    first = next((index for index, word in enumerate(words) if word.startswith("-")), len(words))
    wanted, extra = words[:first] or ["all"], words[first:]
    if parent:
        die_with_parent(signal.SIGTERM)()
    if cores < 1:
        raise UserError(f"--cores {cores} is not valid", fix="use 1 or more")
    os.chdir(ROOT)
    validate(PipelineSettings, {"scale": scale, "results": str(results)}, "the command line")
    _, broken = matrix.all_runs(scale)
    check_studies(broken, wanted)
    folder = results / scale
    check_targets(wanted, scale, folder)
    on_slurm = profile is not None and Path(profile).name == "slurm"
    if profile is not None:
        extra = ["--profile", profile, *extra]
    if on_slurm and not slurm.only_looks(extra):
        slurm.require()
    check_writable(folder)
    snakemake = [sys.executable, "-m", "snakemake"]
    parallel = ["--cores", str(cores)]
    config = ["--config", f"scale={scale}", f"results={results}", f"keep_runs={keep_runs}"]
    with lock(folder) as handle:
        if left := jobs.stop(folder):
            print(f"stopped {left} processes of a killed workflow", file=sys.stderr)
        unlock([*snakemake, *parallel, *config])
        if on_slurm and (left := slurm.cancel_jobs(ROOT)):
            print(f"cancelled {left} jobs of a killed workflow", file=sys.stderr)
        settings = ["--quiet", "host", "reason", *config]
        # Under Slurm it would limit the jobs of all nodes together.
        arguments = [*snakemake, *([] if on_slurm else parallel), *settings, *extra, "--", *wanted]
        with jobs.ending_with_this(folder):
            code = run_snakemake(arguments, handle, folder, on_slurm)
    if code == interrupts.EXIT:
        print(kept_words(folder, scale), file=sys.stderr)
        raise SystemExit(code)
    if not code:  # else Snakemake has said it, and why
        print("\n".join(closing_words(folder, scale)), flush=True)
    raise SystemExit(code)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"ignore_unknown_options": True})
    app.command()(main)
    app()
