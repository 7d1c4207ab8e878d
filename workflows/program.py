"""``python -m workflows.program [TARGET ...]``: what ``make reproduce`` runs around Snakemake.

Stops what a killed workflow left, runs Snakemake, and says where the results are. Options that it does not know go to
Snakemake, which checks settings and targets.

One workflow at a time works in a results folder, also where Snakemake is started by hand: the folder is locked by an
open file that only this process and Snakemake hold, so the kernel drops the lock when both are gone, however they end;
Snakemake is killed when this process is. Jobs do not hold it: those of a killed workflow are stopped at once by a
process that waits for that, and by the next workflow where that was killed, too; with ``--profile slurm`` those that it
has left in the queue are cancelled.
"""

from __future__ import annotations

from experiments.common import interrupts

if __name__ == "__main__":
    interrupts.while_starting()

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

import psutil
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

LINGERS_SECONDS = 20.0
PLACES = {"report": "report.html", "figures": "figures/*.png", "tables": "*/table.csv", "claims": "claims.csv"}
Targets = Annotated[list[str] | None, typer.Argument(help="what to make, default: all; before all options")]


def lock(folder: Path) -> IO[str]:
    """Claim a results folder; the claim lasts as long as the returned file is open in any process.

    Raises:
        UserError: another workflow holds it, or what is left of a killed one does so for ``LINGERS_SECONDS``.
    """
    check_writable(folder)
    path = folder / ".workflow.lock"
    handle = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + LINGERS_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            handle.seek(0)
            owner = handle.read().strip()
            if time.monotonic() > deadline or not owner.isdigit() or psutil.pid_exists(int(owner)):
                what = f"another workflow is running, process {owner or 'unknown'}"
                raise UserError(what, where=path, fix="wait for it or stop it") from None
            time.sleep(0.1)  # it was killed a moment ago, and its Snakemake is being killed
    handle.truncate(0)
    handle.write(f"{os.getpid()}\n")
    handle.flush()
    return handle


def run_snakemake(arguments: list[str], handle: IO[str], folder: Path, on_slurm: bool) -> int:
    """Run Snakemake to its end; after signal n, which ends it and all its jobs, returns 128 + n.

    Ctrl-C does not reach Snakemake, which would report every job that it ends: it is killed, and its jobs are stopped.
    With Slurm it is interrupted by whatever ends this process, for it cancels what it has submitted.
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
        if on_slurm and number != signal.SIGINT:
            process.send_signal(signal.SIGINT)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, stop)
    while process.poll() is None and (on_slurm or not stopped):
        time.sleep(0.2)
    if process.poll() is None:
        process.kill()
    code = process.wait()
    jobs.stop(folder, interrupted=stopped == signal.SIGINT and not on_slurm)
    return 128 + (stopped or -code) if stopped or code < 0 else code


def run_states(folder: Path, scale: str) -> dict[Path, str]:
    """Folder of every run -> its status; "" where it has not ended."""
    paths = [folder / study / run.name for study, runs in matrix.all_runs(scale)[0].items() for run in runs]
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
        if paths := [path for path in folder.glob(pattern) if path.is_file()]:
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
    cores: Annotated[int, typer.Option(help="cores to use", min=1)] = os.cpu_count() or 1,
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
    os.chdir(ROOT)
    validate(PipelineSettings, {"scale": scale, "results": str(results)}, "the command line")
    matrix.load_scale(scale)
    folder = results / scale
    on_slurm = profile is not None and Path(profile).name == "slurm"
    # Under Slurm the number of cores would limit the jobs of all nodes together.
    options = ["--profile", str(profile)] if profile else []
    options += [] if on_slurm else ["--cores", str(cores)]
    options += ["--quiet", "host", "reason"]
    options += ["--config", f"scale={scale}", f"results={results}", f"keep_runs={keep_runs}", *extra]
    with lock(folder) as handle:
        if left := jobs.stop(folder):
            print(f"stopped {left} processes of a killed workflow", file=sys.stderr)
        if on_slurm and (left := slurm.cancel_jobs(ROOT)):
            print(f"cancelled {left} jobs of a killed workflow", file=sys.stderr)
        with jobs.ending_with_this(folder):
            code = run_snakemake([sys.executable, "-m", "snakemake", *options, "--", *wanted], handle, folder, on_slurm)
    if code == interrupts.EXIT:
        print(kept_words(folder, scale), file=sys.stderr)
    elif not code:  # else Snakemake has said it, and why
        print("\n".join(closing_words(folder, scale)), flush=True)
    raise SystemExit(code)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, context_settings={"ignore_unknown_options": True})
    app.command()(main)
    app()
