"""``make soak``: random training of every method and strategy over 2 and 4 ranks, lost ranks, and kills.

Everything follows from the seed, which is printed first, but for the moments at which kills come. A failure is one
line, for a step with the command that does it again. What was done is written to
``RESULTS/soak/<machine>-<seed>.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from experiments.bench import machine
from experiments.common.files import atomic_write
from tests.soak.cases import LONG, subjects
from tests.soak.kills import Killed, Training, Workflow
from tests.soak.lost import HOW, survivors
from tests.soak.training import work
from tests.workers import run_workers

WORLDS = (2, 4)
GROWTH_BYTES = 64 * 2**20  # that memory of a rank may grow by, from a quarter of its cases to its end
SHARES = {"training": 0.7, "workflow": 0.3}  # of the kills
LOST = ("powersgd", "edgc cqm", "int4", "topk", "strategy diloco", "strategy dion", "strategy noloco")


def trained(seed: int, world: int, steps: int, ends: float, *, first: int = 0, longest: int = LONG) -> dict[str, Any]:
    """What ranks of a world count over random cases (:func:`tests.soak.training.work`).

    Raises:
        AssertionError: with one line a failing rank, or one of what stands still.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            ranks = run_workers(world, work, seed, first, steps, longest, ends, folder)
        except AssertionError as error:
            lines = [line for line in str(error).splitlines() if "again: python" in line]
            raise AssertionError(lines[0].partition("Wrong: ")[2] if lines else str(error)) from None
        except mp.ProcessExitedException as error:
            notes = [path.read_text() for path in sorted(Path(folder).glob("*-?"))]
            stacks = [path.read_text() for path in sorted(Path(folder).glob("*.stacks"))]
            raise AssertionError(f"a rank ended or stood still: {error}; {notes[0]}\n{''.join(stacks)}") from None
    memory = [rank["memory"] for rank in ranks]
    growth = max(each[-1] - each[len(each) // 4] for each in memory)
    total = sum(ranks[0]["counts"].values(), Counter[str]())
    counts = {name: dict(count) for name, count in sorted(ranks[0]["counts"].items())}
    if growth > GROWTH_BYTES:
        raise AssertionError(
            f"memory of a rank grew by {growth / 2**20:.0f} MiB over {len(memory[0])} cases (seed {seed})"
        )
    return {"total": dict(total), "growth_bytes": growth, "alive": ranks[0]["alive"], "subjects": counts}


def without_a_rank(seed: int, ends: float) -> list[str]:
    """Lose a rank under each subject of ``LOST``, in turn by either way, among 2 and 4; what its peers have said.

    Raises:
        AssertionError: they do not end, or not with a line.
    """
    said = []
    for number, subject in enumerate(LOST):
        if time.time() > ends:
            break
        how, world = list(HOW)[(seed + number) % 2], WORLDS[(seed + number // 2) % 2]
        for line in survivors(seed + number, world, subject, how):
            assert line and "\n" not in line, f"seed {seed + number}, {subject}: a rank {how}, another says {line!r}"
            said.append(f"{subject}, world {world}, a rank {how}: {line}")
    return said


def killed(kind: Callable[[Path], Killed], kills: int, seed: int, ends: float) -> dict[str, int]:
    """Kills of a program, by what was killed."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        return dict(kind(Path(folder)).soak(kills, random.Random(seed), ends))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1200, help="until when nothing new is begun")
    parser.add_argument("--steps", type=int, default=10_000, help="of training, over all worlds")
    parser.add_argument("--kills", type=int, default=100, help="of a training run and of the workflow, together")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6)
    parser.add_argument("--world", type=int, choices=WORLDS, help="only this number of ranks, and no kills")
    parser.add_argument("--case", type=int, help="only this case (with --world)")
    parser.add_argument("--longest", type=int, default=LONG, help="steps of a case at most (with --world)")
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args()
    os.environ.setdefault("PYTHONWARNINGS", "ignore")  # of what is imported in every process
    seed, began = options.seed, time.time()
    ends = began + options.seconds
    print(f"seed {seed}, {len(subjects())} methods and strategies", flush=True)
    if options.world is not None:
        steps = options.steps if options.case is None else 1
        found = trained(seed, options.world, steps, ends, first=options.case or 0, longest=options.longest)
        print(json.dumps(found["total"]))
        return 0

    def ranks() -> dict[str, Any]:
        lost, each = without_a_rank(seed, ends), options.steps // len(WORLDS)
        # The smaller worlds leave the others their time.
        limits = [began + options.seconds * (index + 1) / len(WORLDS) for index in range(len(WORLDS))]
        found = {str(w): trained(seed, w, each, limit) for w, limit in zip(WORLDS, limits, strict=True)}
        return {"worlds": found, "lost ranks": lost}

    kinds: dict[str, Callable[[Path], Killed]] = {"training": Training, "workflow": Workflow}
    record: dict[str, Any] = {"machine": machine.describe("cpu"), "seed": seed, "kills": {}}
    failures = []
    with ThreadPoolExecutor() as pool:
        tasks = {pool.submit(ranks): "steps"} if options.steps else {}
        for name, program in kinds.items():
            if count := round(options.kills * SHARES[name]):
                tasks[pool.submit(killed, program, count, seed, ends)] = name
        for task in as_completed(tasks):
            name = tasks[task]
            try:
                found = task.result()
            except Exception as error:
                kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
                failures.append(f"{name}: {kind}{error} (seed {seed})")
                print(f"failed: {failures[-1]}", file=sys.stderr, flush=True)
                continue
            record |= found if name == "steps" else {"kills": record["kills"] | {name: found}}
            print(f"{name}: done after {time.time() - began:.0f} s", flush=True)
    record |= {"seconds": round(time.time() - began), "result": failures or "ok"}
    path = options.results / "soak" / f"{record['machine']['slug']}-{seed}.json"
    atomic_write(path, json.dumps(record, indent=1) + "\n")
    print(path)
    return 1 if failures else 0
