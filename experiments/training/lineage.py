"""Lineage of a run, which it takes over: another run's ranks or warm-up, or its own checkpoint. Imports no torch.

Whether ranks that follow the entropy are worth more than others is asked of the same ranks in another order: they send
the same bytes, at other times, and follow nothing.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from edgc.checks import dotted
from edgc.config import EDGCConfig
from edgc.control.controller import Controller
from edgc.errors import UserError
from experiments.spec.settings import FollowsConfig, RunConfig, resolve
from experiments.training import outputs

# Settings that change nothing of what a run computes, and those that change nothing before compression begins.
FREE = ("label", "train.checkpoint_interval", "train.keep_warm_up")
FREE_IN_WARM_UP = (*FREE, "variant", "branch", "follows", "compression")


# ------------------------------------------------------------------ ranks of another run


def blocked_reason(run: RunConfig, results: Path) -> str | None:
    """Reason for which a run that is right cannot be trained: a run that it needs came to nothing; else None.

    Raises:
        UserError: a run that it needs has not ended.
    """
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
        UserError: a file of the run that it follows is missing or damaged, that run compressed nothing, or its stages
            had different ranks and those of ``run`` are not aligned.
    """
    if run.follows is None or run.edgc.to_dict()["policy"] == "schedule":
        return run
    folder = results / run.scale / run.study / f"{run.follows.variant}-s{run.seed}"
    iterations = run.train.iterations
    at, ranks = zip(*_ranks(folder, run.edgc, iterations), strict=True)
    rows = zip(at, in_order(ranks, run.follows, run.seed), strict=True)
    policy = {"policy": "schedule", "schedule": [[iteration / iterations, rank] for iteration, rank in rows]}
    compression: dict[str, Any] = EDGCConfig.usable({**run.compression, **policy})
    return resolve({**run.model_dump(mode="json"), "compression": compression}, folder)


def _ranks(folder: Path, config: EDGCConfig, iterations: int) -> list[tuple[int, int]]:
    """Ranks of a finished run's windows after warm-up, each with the iteration that it came into force after.

    Args:
        config: of the run that follows; where it aligns stages, the first one's ranks are all that it needs.
    """
    aligned = getattr(config, "alignment", "off") != "off"
    pairs = []
    outputs.check(folder, (outputs.LOG,))
    log = outputs.read_log(folder, outputs.read_status(folder))
    decisions = [event for event in log if event["event"] == "decision"]
    for event in outputs.window_decisions(decisions, config.window, before=iterations):
        iteration, ranks = int(event["iteration"]), set(event["ranks"][:1] if aligned else event["ranks"])
        if len(ranks) != 1 or None in ranks:
            message = f"its stages had the ranks {event['ranks']} after iteration {iteration}; one rank can be followed"
            raise UserError(message, where=folder, fix="set compression.alignment: off for the run that is followed")
        pairs.append((iteration, int(ranks.pop())))
    if not pairs:
        raise UserError("it compressed nothing that could be followed", where=folder, fix="train it longer")
    return pairs


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
    total, count = sum(ranks), len(ranks)

    def so_far(place: int) -> int:
        """Sum of the first ranks, rounded down, so that no rank falls behind by a whole one."""
        if follows.order == "line":
            return total * place * (4 * count - place) // (3 * count * count)
        return total * place // count

    steps = [so_far(place + 1) - so_far(place) for place in range(count)]
    return sorted(steps, reverse=True) if follows.order == "line" else steps  # rounding alone may have let one rise


# ------------------------------------------------------------------ a checkpoint, or another run's warm-up


def checkpoint_settings(run: RunConfig, fingerprint: str | None) -> dict[str, Any]:
    """Settings of a run, in JSON's types, with the fingerprint of its prepared data."""
    settings = run.model_dump(mode="json")
    settings["data"]["fingerprint"] = fingerprint
    return settings


def refuse_other(
    saved: Mapping[str, Any], settings: Mapping[str, Any], checkpoint: Path, free: Collection[str] = FREE
) -> None:
    """Raise ``UserError`` for the first setting, with both values, in which ``checkpoint`` and a run differ.

    Args:
        saved, settings: :func:`checkpoint_settings` of the checkpoint and of the run that is to go on from it.
        free: settings, or whole sections, that may differ.
    """
    old, new = dotted(saved), dotted(settings)
    keys = [key for key in {**old, **new} if not {key, key.partition(".")[0]}.intersection(free)]
    other = [key for key in keys if (key in old, old.get(key)) != (key in new, new.get(key))]
    if other:
        key = other[0]
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        message = f"{key} = {new.get(key)!r}, but the run's checkpoint has {old.get(key)!r}{more}"
        fix = "restore the setting, or start anew with `python -m experiments.training.launch ... --fresh`"
        raise UserError(message, where=checkpoint / "run.yaml", fix=fix)


def branched_log(events: Sequence[Mapping[str, Any]], trunk: str, controller: Controller) -> list[dict[str, Any]]:
    """The log of the warm-up that a run branches from, as that of the new run.

    The start is left out, for the new run has written one; the decision that ended warm-up gets the new run's ranks.

    Args:
        events: of run ``trunk`` until then.
        controller: of the run that goes on, its state loaded.
    """
    log = [dict(event) for event in events if event["event"] != "start"]
    last = [event for event in log if event["event"] == "decision"][-1]
    reason = f"{last['reason']} in {trunk}, from which this run branches with ranks {list(controller.ranks)}"
    last |= {"reason": reason, "ranks": controller.ranks, "r_min": controller.r_min, "r_max": controller.r_max}
    return log
