"""A rank that dies, or stands still, in training: what the others say, and that they end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import warnings
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.soak.cases import Case, case_of, subjects
from tests.soak.traffic import Traffic
from tests.soak.training import Trained

TIMEOUT = timedelta(seconds=5)  # of the group
ENDS_WITHIN_SECONDS = 90.0  # with the start, on a busy machine
HOW = {"dies": signal.SIGKILL, "stands still": signal.SIGSTOP}


def _train(rank: int, case: Case, folder: str, victim: int, at: int, number: int) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", case.world)
    store.set(str(rank), "")
    store.wait([str(each) for each in range(case.world)])  # imports may take some longer than the group waits
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world, timeout=TIMEOUT)
    assert dist.group.WORLD is not None
    trained = Trained(case, dist.group.WORLD, Traffic())
    for step in range(case.steps):
        if (rank, step) == (victim, at):
            os.kill(os.getpid(), number)
        try:
            trained.step(step)
        except RuntimeError as error:
            Path(f"{folder}/{rank}").write_text(str(error), encoding="utf-8")
            raise SystemExit(1) from None


def survivors(seed: int, world: int, subject: str, how: str) -> list[str]:
    """What the other ranks say when one of them, at a step of the seed's, ``dies`` or ``stands still``.

    Raises:
        AssertionError: one of them does not end.
    """
    drawn = case_of(seed, world, 0)
    # Of unused parameters DDP tells the other ranks by itself, and of a lost one in torch's words.
    case = replace(drawn, subject=subjects()[subject], steps=60, scaled=False, masked=False, unused=False)
    victim, at = seed % world, 3 + seed % 7
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_train, args=(rank, case, folder, victim, at, HOW[how])) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        try:
            others = [process for rank, process in enumerate(ranks) if rank != victim]
            for process in others:
                process.join(ENDS_WITHIN_SECONDS)
                assert process.exitcode is not None, f"seed {seed}, {subject}: where a rank {how} another one hangs"
            files = [Path(folder) / str(rank) for rank in range(world) if rank != victim]
            return [file.read_text(encoding="utf-8") if file.exists() else "" for file in files]
        finally:
            for process in ranks:
                process.kill()
                process.join()
