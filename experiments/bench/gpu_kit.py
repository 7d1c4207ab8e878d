"""``make gpu``: what is to be tested and measured on a GPU, one part after another, and what came of each.

Of the standard library alone: it runs with whatever Python there is, and makes the environment that the parts run in.
A part that fails or takes too long ends with its processes, and the next one begins. Where there is no GPU the same
parts run on the CPU, small and through the masked path: a rehearsal, whose numbers mean nothing and are kept apart.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from edgc.errors import UserError
from experiments.bench import gpu_environment
from experiments.bench.gpu_environment import ROOT

TOTAL = 25 * 60.0
ENVIRONMENT = "environment"
LIMITS = {ENVIRONMENT: 600.0, "tests": 350.0, "engine": 180.0, "stage": 240.0, "step": 360.0}
FULL = 8  # times the limits of what is measured


@dataclass(frozen=True)
class Part:
    """One part: a program of the chosen Python, and how many seconds it may take."""

    name: str
    arguments: list[str]
    limit: float


@dataclass(frozen=True)
class Outcome:
    """``said`` is the last line of what the part wrote."""

    name: str
    status: str
    seconds: float
    said: str = ""


def parts(gpu: bool, full: bool, folder: Path) -> list[Part]:
    """What follows the environment. ``folder`` is where benchmarks write to."""
    quick = [] if full else ["--quick"]
    if gpu:
        programs = {
            "engine": ["engine", "--model", "gpt2-124m", "--device", "cuda", *quick],
            "stage": ["engine", "--model", "gpt2-2.5b-stage", "--device", "cuda", *quick],
            "step": ["step", "--device", "cuda", *quick],
        }
    else:
        alone = "--ranks 4 --threads 1 --repeats 2 --allocators default --no-gloo --kernels --device cpu"
        model = "--layers 2 --hidden 64 --heads 2 --vocabulary 256 --sequence 32 --batch 2 --device cpu"
        variants = ["--variants", "ddp,torch,powersgd fp32,ddp again", "--rank", "4", "--steps", "2"]
        programs = {
            "engine": ["engine", "--layers", "1", "--hidden", "64", *alone.split()],
            "stage": ["engine", "--model", "gpt2-2.5b-stage", "--layers", "1", *alone.split()],
            "step": ["step", *model.split(), *variants],
        }
    tests = ["-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-p", "no:cacheprovider"]
    listed = [Part("tests", tests, LIMITS["tests"])]
    for name, options in programs.items():
        arguments = ["-m", "experiments.bench", *options, "--results", str(folder)]
        listed.append(Part(name, arguments, LIMITS[name] * (FULL if full else 1)))
    return listed


def carry_out(part: Part, python: str, log: Path, limit: float) -> Outcome:
    """Run one part; all its processes are gone afterwards."""
    # Containers set the first, with which products of fp32 are not those of fp32.
    environment = {key: value for key, value in os.environ.items() if key != "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}
    started = time.monotonic()
    with log.open("w") as file:
        process = subprocess.Popen(
            [python, *part.arguments],
            cwd=ROOT,
            env={**environment, "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit)
            status = "ok" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            status = f"not done after {limit:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return Outcome(part.name, status, time.monotonic() - started, _last_line(log))


def _last_line(log: Path) -> str:
    """The last line with a word in it, without what draws a table."""
    lines = (re.sub(r"[^ -~]+", " ", line) for line in log.read_text(errors="replace").splitlines())
    said = [" ".join(line.split()) for line in lines if re.search(r"[a-z]", line)]
    return said[-1][:160] if said else ""


def follow(
    ready: Callable[[], str], listed: Sequence[Part], folder: Path, total: float, tell: Callable[[str], None]
) -> list[Outcome]:
    """The environment, then every part with what is left of ``total``; without an environment nothing else can run."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    tell(f"{ENVIRONMENT} ...")
    try:
        python = ready()
    except (UserError, OSError) as error:
        failed = Outcome(ENVIRONMENT, "failed", time.monotonic() - began, " ".join(str(error).split()))
        return [failed, *(Outcome(part.name, "not run: no environment", 0.0) for part in listed)]
    outcomes = [Outcome(ENVIRONMENT, "ok", time.monotonic() - began, python)]
    for part in listed:
        log = folder / f"{part.name}.log"
        left = total - (time.monotonic() - began)
        tell(f"{part.name} ... ({log})")
        if left < 1:
            outcomes.append(Outcome(part.name, "not run: no time left", 0.0))
            continue
        outcomes.append(carry_out(part, python, log, min(part.limit, left)))
    return outcomes


def summary(outcomes: Sequence[Outcome], what: str) -> str:
    """A line for each part."""
    lines = [what]
    lines += [f"  {of.name:12} {of.seconds:5.0f} s  {of.status:24} {of.said}".rstrip() for of in outcomes]
    failed = [outcome.name for outcome in outcomes if outcome.status != "ok"]
    lines.append(f"failed: {', '.join(failed)}" if failed else "all parts ended well")
    return "\n".join(lines)


def _described(python: str, device: str) -> dict[str, Any]:
    """Device, versions and commit, as the benchmarks record them; empty if that Python cannot say."""
    code = f"import json; from experiments.bench import machine; print(json.dumps(machine.describe({device!r})))"
    done = subprocess.run([python, "-c", code], cwd=ROOT, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1])) if done.returncode == 0 else {}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make gpu", description=__doc__)
    parser.add_argument("--venv", type=Path, default=Path(".venv"))
    parser.add_argument("--make", default="make")
    parser.add_argument("--python", help="a Python whose torch runs on this GPU, instead of an environment of our own")
    parser.add_argument("--full", action="store_true", help="every engine and variant, all repeats; hours, not minutes")
    parser.add_argument("--minutes", type=float, help="end after so many instead of 25; what is then left is not run")
    parser.add_argument("--only", default="", help=f"parts, with commas, of {', '.join(list(LIMITS)[1:])}")
    parser.add_argument("--results", type=Path, default=Path("results"))
    given = parser.parse_args(arguments)
    try:
        if given.minutes is not None and not given.minutes > 0:
            raise UserError(f"--minutes {given.minutes:g} is no time", fix="give a number above 0, or leave it out")
        gpu = gpu_environment.find_gpu()
        wanted = [name for name in given.only.split(",") if name]
        for name in wanted:
            if name not in list(LIMITS)[1:]:
                raise UserError(f"--only {name!r} is no part", fix=f"use some of {', '.join(list(LIMITS)[1:])}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    rehearsal = gpu is None and given.python is None
    folder = given.results / ("gpu-rehearsal" if rehearsal else "gpu")
    bench = folder / "bench" if rehearsal else given.results / "bench"
    total = given.minutes * 60 if given.minutes is not None else TOTAL * (FULL if given.full else 1)
    listed = [part for part in parts(not rehearsal, given.full, bench) if not wanted or part.name in wanted]
    venv = given.venv.absolute()  # programs are started in other folders
    over = venv.with_name(venv.name + "-gpu")

    def ready() -> str:
        return gpu_environment.prepare(venv, over, given.make, given.python)

    outcomes = follow(ready, listed, folder, total, lambda text: print(f"== {text}", flush=True))
    python = outcomes[0].said if outcomes[0].status == "ok" else sys.executable
    found = _described(python, "cpu" if rehearsal else "cuda") if outcomes[0].status == "ok" else {}
    name = found.get("name") or (gpu.name if gpu else "unknown device")
    version = found.get("versions", {}).get("torch", "unknown")
    what = f"make gpu: {name}, torch {version}"
    if rehearsal:
        what = f"make gpu: no GPU here (no nvidia-smi): rehearsed on the CPU, nothing was measured; torch {version}"
    told = {"what": what, "machine": found, "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / "summary.json").write_text(json.dumps(told, indent=1) + "\n")
    print(summary(outcomes, what), f"logs: {folder}; results: {bench}", sep="\n")
    return 0 if all(outcome.status == "ok" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
