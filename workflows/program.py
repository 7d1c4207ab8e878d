"""``python -m workflows.program [TARGET ...]``: what ``make reproduce`` runs around Snakemake.

Checks all settings before anything starts, lets one pipeline at a time work in a results folder, clears away
what a killed one left (processes and Snakemake's lock), runs Snakemake, and says where the results are.
Options that it does not know go to Snakemake.

The results folder is locked by an open file that only this process and Snakemake hold, so the kernel drops
the lock when both are gone, however they end; Snakemake is killed when this process is. Jobs do not hold it:
those of a killed pipeline are found by a mark in their environment, and stopped; with ``--profile slurm`` those that
it has left in the queue are cancelled.
"""

from __future__ import annotations

from experiments.common import interrupts

if __name__ == "__main__":
    interrupts.while_starting()

import argparse
import contextlib
import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO

from edgc.errors import UserError
from experiments.cluster import slurm
from experiments.common.cli import main_guard
from experiments.common.files import check_writable
from experiments.common.processes import die_with_parent
from experiments.spec import matrix
from experiments.training.run_folder import RunFolder
from workflows.targets import check_targets

ROOT = Path(__file__).resolve().parents[1]
MARK = "EDGC_PIPELINE"  # environment variable of every job: the results folder of its pipeline
INTERRUPT_SECONDS = 3.0  # from Ctrl-C until what is left of a pipeline is killed
STOP_SECONDS = 10.0  # from asking a process to end until it is killed


def check_inputs(scale: str) -> None:
    """Read the scale and every study at it, so that a mistake ends the pipeline before it has started.

    Raises:
        UserError: naming the key, the file and the fix.
    """
    matrix.load_scale(scale)
    for study in matrix.studies():
        matrix.runs(study, scale)


def lock(folder: Path) -> IO[str]:
    """Claim a results folder; the claim lasts as long as the returned file is open in any process.

    Raises:
        UserError: another pipeline holds it.
    """
    path = folder / ".pipeline.lock"
    handle = path.open("a+", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        handle.seek(0)
        owner = handle.read().strip() or "unknown"
        fix = "wait for it or stop it"
        raise UserError(f"another pipeline is running, process {owner}", where=path, fix=fix) from None
    handle.seek(0)
    handle.truncate()
    handle.write(f"{os.getpid()}\n")
    handle.flush()
    return handle


def _processes() -> Iterator[Path]:
    """``/proc/<pid>`` of all processes but this one and those it was started by; nothing without /proc."""
    lineage, pid = set(), os.getpid()
    while pid > 1:
        lineage.add(str(pid))
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    for entry in Path("/proc").glob("[0-9]*"):
        if entry.name not in lineage:
            yield entry


def marked(folder: Path) -> list[int]:
    """Process ids of the jobs of a pipeline in ``folder``."""
    mark = f"{MARK}={folder.resolve()}".encode()
    found = []
    for entry in _processes():
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def send(number: int, pids: list[int]) -> None:
    """Send a signal to processes, some of which may have ended."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stop_jobs(folder: Path) -> int:
    """Stop what is left of a pipeline in ``folder``, gently first; returns how many processes there were."""
    first = marked(folder)
    deadline = time.monotonic() + STOP_SECONDS
    left, number = first, signal.SIGTERM
    while left:
        send(number, left)
        time.sleep(0.1)
        left = marked(folder)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
        if time.monotonic() > deadline + STOP_SECONDS:
            raise UserError(
                f"processes of a killed pipeline do not end: {left}", where=folder, fix="stop them"
            )
    return len(first)


def other_snakemake() -> int | None:
    """Process id of a Snakemake that somebody started by hand in this repository, if there is one."""
    for entry in _processes():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            here = (entry / "cwd").samefile(ROOT)
        except OSError:
            continue
        # `python snakemake ...` or `python -m snakemake ...`; jobs on a cluster node have a --mode.
        named = any(word.rpartition(b"/")[2] == b"snakemake" for word in words[:3])
        if here and named and b"--mode" not in words:
            return int(entry.name)
    return None


def unlock(arguments: list[str]) -> None:
    """Remove Snakemake's own lock where a killed Snakemake left one.

    Raises:
        UserError: its owner is alive.
    """
    locks = ROOT / ".snakemake" / "locks"
    if not any(locks.glob("*")):
        return
    owner = other_snakemake()
    if owner is not None:
        fix = "wait for it or stop it"
        raise UserError(f"Snakemake is already running here, process {owner}", where=ROOT, fix=fix)
    print("removing the lock of an interrupted Snakemake", file=sys.stderr)
    subprocess.run([*arguments, "--unlock", "--quiet"], cwd=ROOT, check=True, capture_output=True)


def run_snakemake(arguments: list[str], handle: IO[str], folder: Path, on_slurm: bool) -> int:
    """Run Snakemake to its end; after signal n, which ends it and all its jobs, returns 128 + n.

    Ctrl-C does not reach Snakemake, which would report every job that it ends: it is killed, its jobs are stopped, and
    its lock is removed. With Slurm it is asked to end, for it cancels what it has submitted.
    """
    mortal = die_with_parent(signal.SIGKILL)

    def begin() -> None:
        mortal()
        if not on_slurm:
            interrupts.ignore()

    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=os.environ | {MARK: str(folder.resolve())},
        pass_fds=[handle.fileno()],
        preexec_fn=begin,
    )
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
                interrupt_jobs(folder)
            remove_locks()
            break
        # Ctrl-C reaches Snakemake and its jobs by itself. Other signals are handed on: SIGINT to Snakemake, for
        # which SIGTERM would mean to wait for what runs, and SIGTERM to the jobs.
        if stopped not in (0, signal.SIGINT):
            process.send_signal(signal.SIGINT)
            send(signal.SIGTERM, [pid for pid in marked(folder) if pid != process.pid])
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(timeout=0.2)
    stop_jobs(folder)
    if stopped or code < 0:
        return 128 + (stopped or -code)
    return code


def interrupt_jobs(folder: Path) -> None:
    """End all jobs of a pipeline within a few seconds: launchers as Ctrl-C does, what is left then at once."""
    deadline = time.monotonic() + INTERRUPT_SECONDS
    launchers = [pid for pid in marked(folder) if is_launcher(pid)]
    send(signal.SIGINT, launchers)
    while any(pid in launchers for pid in marked(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left := marked(folder):
        send(signal.SIGKILL, left)
        time.sleep(0.02)


def is_launcher(pid: int) -> bool:
    """Whether a process is a run's launcher, which throws its attempt away when it is interrupted."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"experiments.training.launch" in words and words[0].rpartition(b"/")[2].startswith(b"python")


def remove_locks() -> None:
    """Remove the lock of a Snakemake that this process has killed."""
    shutil.rmtree(ROOT / ".snakemake" / "locks", ignore_errors=True)


def kept_words(folder: Path, scale: str) -> str:
    """What an interrupted pipeline keeps, in one line."""
    paths = [folder / study / run.name for study in matrix.studies() for run in matrix.runs(study, scale)]
    finished = sum((path / "status").is_file() for path in paths)
    newest = {path: RunFolder(path).newest_checkpoint() for path in paths if not (path / "status").is_file()}
    going_on = [f"{p.parent.name}/{p.name} goes on from {n.name}" for p, n in newest.items() if n is not None]
    words = [f"{finished} of {len(paths)} runs are finished and kept in {folder}", *going_on]
    return f"interrupted: {'; '.join(words)}; the same command continues"


def closing_words(folder: Path, scale: str) -> list[str]:
    """Where the results are, and which runs did not end well."""
    places = {
        "report": [folder / "report.html"],
        "figures": sorted((folder / "figures").glob("*.png")),
        "tables": sorted(folder.glob("*/table.csv")),
        "claims": [folder / "claims.csv"],
    }
    lines = []
    for name, paths in places.items():
        there = [path for path in paths if path.is_file()]
        if len(there) == 1:
            lines.append(f"{name:8} {there[0]}")
        elif there:
            pattern = there[0].parent / "*.png" if name == "figures" else folder / "*" / "table.csv"
            lines.append(f"{name:8} {pattern} ({len(there)})")
    states: dict[str, str] = {}
    for study in matrix.studies():
        for run in matrix.runs(study, scale):
            path = folder / study / run.name / "status"
            if path.is_file():
                states[f"{study}/{run.name}"] = path.read_text(encoding="utf-8").strip()
    if states:
        counts = Counter(states.values())
        lines.append(
            f"{'runs':8} " + ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
        )
    lines += [f"         {run}: {state}" for run, state in states.items() if state != "ok"]
    return lines


@main_guard
def main(arguments: list[str] | None = None) -> None:
    """Run the pipeline: one at a time for a results folder, continuing where an interrupted one stopped."""
    parser = argparse.ArgumentParser(
        prog="python -m workflows.program",
        description=main.__doc__,
        epilog="Other options go to Snakemake, e.g. -n (plan only); targets stand before them.",
        allow_abbrev=False,
    )
    parser.add_argument("targets", nargs="*", default=["all"], metavar="TARGET", help="default: all")
    parser.add_argument("--scale", default="ci", help="file in experiments/scales (default: ci)")
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder of all results")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="cores to use (default: all)")
    parser.add_argument(
        "--keep-runs", action="store_true", help="keep runs made by code of an earlier version"
    )
    parser.add_argument("--profile", metavar="NAME", help="of Snakemake, e.g. slurm")
    parser.add_argument("--die-with-parent", action="store_true", help="end when the starting process ends")
    options, extra = parser.parse_known_args(arguments)
    if options.die_with_parent:
        die_with_parent(signal.SIGTERM)()
    if options.cores < 1:
        raise UserError(f"--cores {options.cores} is not valid", fix="use 1 or more")
    os.chdir(ROOT)
    check_inputs(options.scale)
    folder = options.results / options.scale
    check_targets(options.targets, options.scale, folder)
    on_slurm = options.profile is not None and Path(options.profile).name == "slurm"
    if options.profile is not None:
        extra = ["--profile", options.profile, *extra]
    if on_slurm and not slurm.only_looks(extra):
        slurm.require()
    check_writable(folder)
    snakemake = [sys.executable, "-m", "snakemake"]
    cores = ["--cores", str(options.cores)]
    config = [
        "--config",
        f"scale={options.scale}",
        f"results={options.results}",
        f"keep_runs={options.keep_runs}",
    ]
    with lock(folder) as handle:
        left = stop_jobs(folder)
        if left:
            print(f"stopped {left} processes of a killed pipeline", file=sys.stderr)
        unlock([*snakemake, *cores, *config])
        left = slurm.cancel_jobs(ROOT) if on_slurm else 0
        if left:
            print(f"cancelled {left} jobs of a killed pipeline", file=sys.stderr)
        settings = ["--rerun-incomplete", "--quiet", "host", "reason", *config]
        # Under Slurm it would limit the jobs of all nodes together.
        arguments = [*snakemake, *([] if on_slurm else cores), *settings, *extra, "--", *options.targets]
        code = run_snakemake(arguments, handle, folder, on_slurm)
    if code == interrupts.EXIT:
        print(kept_words(folder, options.scale), file=sys.stderr)
        raise SystemExit(code)
    print("\n".join(closing_words(folder, options.scale)))
    if code:
        print(f"not finished (Snakemake ended with {code}); the same command continues", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()
