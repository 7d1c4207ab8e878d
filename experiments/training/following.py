"""What a run takes over from another one of its study: ranks, or the warm-up. Imports no torch.

Whether ranks that follow the entropy are worth more than others is asked of the same ranks in another order: they send
the same bytes, at other times, and follow nothing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edgc.config import EDGCConfig
from edgc.control.controller import Controller
from edgc.errors import UserError
from experiments.spec.settings import FollowsConfig, RunConfig, resolve
from experiments.training import outputs


def ranks_of(folder: Path, window: int, iterations: int) -> list[tuple[int, int]]:
    """Ranks of a finished run's windows after warm-up, each with the iteration that it came into force after.

    Raises:
        UserError: a file of the run is missing or damaged, it compressed nothing, or its stages had different ranks.
    """
    found = []
    log = outputs.read_log(folder, outputs.read_status(folder))
    decisions = [event for event in log if event["event"] == "decision"]
    for event in outputs.window_decisions(decisions, window, before=iterations):
        iteration, ranks = int(event["iteration"]), set(event["ranks"])
        if len(ranks) != 1 or None in ranks:
            what = f"its stages had the ranks {event['ranks']} after iteration {iteration}; one rank can be followed"
            raise UserError(what, where=folder, fix="set compression.alignment: off for the run that is followed")
        found.append((iteration, int(ranks.pop())))
    if not found:
        raise UserError("it compressed nothing that could be followed", where=folder, fix="train it longer")
    return found


def in_order(ranks: Sequence[int], follows: FollowsConfig, seed: int) -> list[int]:
    """``ranks`` in the order that ``follows`` asks for; their sum, and so the bytes, stay the same."""
    if follows.order == "reversed":
        return list(ranks)[::-1]
    if follows.order == "shuffled":
        shuffled = list(ranks)
        random.Random(f"{seed} {follows.shuffle}").shuffle(shuffled)
        return shuffled
    if follows.order == "falling":
        return sorted(ranks, reverse=True)
    # Two neighbouring ranks, the higher one wherever the running sum has fallen behind the mean.
    total, count = sum(ranks), len(ranks)
    return [total * (place + 1) // count - total * place // count for place in range(count)]


def reason_not_to(run: RunConfig, results: Path) -> str | None:
    """Why ``run`` cannot be trained although nothing is wrong with it: a run that it needs came to nothing."""
    for name in run.needs:
        folder = results / run.scale / run.study / name
        if (status := outputs.read_status(folder)) == outputs.UNFINISHED:
            fix = f"train it first: snakemake -c2 {run.study}"
            raise UserError(f"{run.name} needs run {name}, which has not ended", where=folder, fix=fix)
        if status != "ok":
            return f"run {name}, which it needs, is {status}"
    return None


def with_ranks(run: RunConfig, results: Path) -> RunConfig:
    """``run`` with the schedule that it follows; itself where it follows none.

    Raises:
        UserError: see :func:`ranks_of`.
    """
    if run.follows is None or run.edgc.to_dict()["policy"] == "schedule":
        return run
    folder = results / run.scale / run.study / f"{run.follows.variant}-s{run.seed}"
    iterations = run.train.iterations
    at, ranks = zip(*ranks_of(folder, run.edgc.window, iterations), strict=True)
    rows = zip(at, in_order(ranks, run.follows, run.seed), strict=True)
    policy = {"policy": "schedule", "schedule": [[iteration / iterations, rank] for iteration, rank in rows]}
    compression: dict[str, Any] = EDGCConfig.usable({**run.compression, **policy})
    return resolve({**run.model_dump(mode="json"), "compression": compression}, folder)


def of_branch(events: Sequence[Mapping[str, Any]], trunk: str, controller: Controller) -> list[dict[str, Any]]:
    """The log of the warm-up that a run branches from, as its own.

    The start is left out, for the run has written one; the decision that ended warm-up gets the run's own ranks.

    Args:
        events: of run ``trunk`` until then.
        controller: of the run that goes on, its state loaded.
    """
    found = [dict(event) for event in events if event["event"] != "start"]
    last = max(place for place, event in enumerate(found) if event["event"] == "decision")
    why = f"{found[last]['reason']} in {trunk}, from which this run branches with ranks {list(controller.ranks)}"
    limits = {"r_min": controller.r_min, "r_max": controller.r_max}
    found[last] |= {"reason": why, "ranks": controller.ranks, **limits}
    return found
