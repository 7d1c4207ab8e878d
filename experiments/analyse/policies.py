"""Policies that follow something, beside the same ranks in another order and beside a fixed rank of as many bytes.

A *placebo* of a policy is its own ranks in an order that follows nothing: reversed in time or shuffled. It sends the
same bytes, so a policy that is worth following beats it. ``falling`` puts the same ranks in descending order, which
follows nothing either but is known to be a good order; ``line`` is a straight line down at the policy's bytes, whose
shape was chosen beforehand. ``fixed rank`` stands still at the policy's bytes. ``fp32 factors`` is the same policy
without quantised factors; it sends more bytes.

A difference is the policy's validation loss minus its rival's, of the same seed, in nats: below 0 the policy is better.
Shuffles of a seed are averaged first. Beside it stands what there was to win: the rival's gap to no compression. The
verdict is that of :func:`experiments.common.equivalence.compare`; ``cannot tell`` where a rival of the same bytes
costs less than twice the margin (:func:`experiments.common.equivalence.worth`); ``not tested`` where the policy did
not act (:mod:`experiments.analyse.acting`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from edgc.control.settings import GivenConfig
from experiments.analyse import methods
from experiments.analyse.acting import acting
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity
from experiments.common.acting import NOT_TESTED, acted, seeds_acted
from experiments.common.equivalence import (
    BETTER,
    EQUAL,
    NOT_DECIDED,
    compare,
    loss_margin,
    power_of_equality,
    seeds_needed,
    worth,
)

RESULTS = ("table.csv", "summary.csv", "timings.csv", "pairs.csv", "comparisons.csv")
DETAILS = ("curves.csv",)
FP32 = "fp32"
RIVALS = {"even": "fixed rank", "reversed": "reversed", "shuffled": "shuffled", "falling": "falling", "line": "line"}
PLACEBOS = ("reversed", "shuffled")
PLAIN, WIDER = "no compression", "fp32 factors"  # they send more bytes
PAIR = ["variant", "label", "policy", "factor_dtype", "rival", "seed", "status", "difference_nats", "rival_gap_nats"]
PAIR += ["bytes_over_rival", "same_start", "acted", "ranks_used", "windows_inside", "warm_up_ended", "warm_up_ended_by"]
PAIR += ["entropy_change_before", "entropy_change_after"]


def tables(runs: list[Run]) -> dict[str, Any]:
    """The tables of :mod:`experiments.analyse.methods`, ``pairs`` (a policy, a rival and a seed a row) and
    ``comparisons`` (over seeds)."""
    following = [run for run in runs if run.policy is not None and not isinstance(run.edgc, GivenConfig)]
    rows = pd.DataFrame([row for run in following for row in pairs(run, runs)], columns=PAIR)
    return methods.tables(runs) | {"pairs": rows, "comparisons": comparisons(rows)}


def pairs(run: Run, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """``run`` beside uncompressed training, beside every run of its seed that follows it, shuffles averaged, and beside
    the one that differs from it in its factors alone."""
    same_seed = [other for other in runs if other.peers == run.peers]
    rivals = {PLAIN: [other for other in same_seed if other.plain]}
    base = _mean([other.number("validation_loss") for other in rivals[PLAIN] if other.ok])
    for other in same_seed:
        follows = other.config.get("follows") or {}
        if follows.get("variant") == run.variant:
            rivals.setdefault(RIVALS[follows["order"]], []).append(other)
    placebos = [rivals[name] for name in PLACEBOS if name in rivals]
    if len(placebos) > 1:
        rivals["placebos"] = [other for group in placebos for other in group]
    settings, dtype = _but_factors(run)
    wider = [other for other in same_seed if _but_factors(other) == (settings, FP32)]
    if dtype != FP32 and wider:
        rivals[WIDER] = wider
    for name, group in rivals.items():
        finished = [other for other in group if other.ok] if run.ok else []
        loss, sent = (_mean([other.number(key) for other in finished]) for key in ("validation_loss", "bytes_total"))
        yield identity(run) | {
            "policy": run.policy,
            "factor_dtype": getattr(run.edgc, "factor_dtype", None),
            "rival": name,
            "difference_nats": run.number("validation_loss") - loss,
            "rival_gap_nats": None if name == PLAIN else loss - base,
            "bytes_over_rival": run.number("bytes_total") / sent,
            "same_start": all(same_start(run, other) for other in finished) if finished else None,
            **acting(run),
            "warm_up_ended": run.first_compressed - 1,
            "warm_up_ended_by": _ended_by(run),
            **_around_end(run),
        }


def _ended_by(run: Run) -> str:
    """What ended warm-up, as the decision says it: ``entropy stable``, or ``warmup_limit_fraction reached``."""
    reasons = [str(event.get("reason")) for event in run.decisions if event.get("phase") == "active"]
    found = re.match(r"warm-up ends: (.*?)(?: within [0-9.]+ nats)?;", reasons[0]) if reasons else None
    return found[1] if found else ""


def _around_end(run: Run) -> dict[str, float]:
    """Change of the first stage's entropy in the window before the last one of warm-up, and the furthest that it went
    from that one afterwards (nats): whether it was at rest there."""
    means = [float((event.get("entropy") or [math.nan])[0] or math.nan) for event in run.decisions]
    last = next((i for i, event in enumerate(run.decisions) if event.get("phase") == "active"), 0)
    later = [mean - means[last] for mean in means[last + 1 :]]
    return {
        "entropy_change_before": means[last - 1] - means[last - 2] if last > 1 else math.nan,
        "entropy_change_after": max(later, key=abs, default=math.nan),
    }


def _but_factors(run: Run) -> tuple[dict[str, Any], str]:
    """A run's compression without its type of factors, and that type."""
    settings = run.compression
    return settings, str(settings.pop("factor_dtype", FP32))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def same_start(run: Run, other: Run) -> bool:
    """True if both had the same losses, to the last bit, until ``run`` began to compress."""
    begin = run.first_compressed
    first, second = (r.steps.loc[~(r.steps["iteration"] >= begin), ["iteration", "loss"]] for r in (run, other))
    return first.equals(second)


def comparisons(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """Per policy and rival: over the seeds of which both have a result, the difference, what there was to win, what
    that says, in how many seeds the policy acted, and how many would show equality. Nothing good is said where a seed
    has no result."""
    compared, by, margin = [], ["variant", "label", "policy", "factor_dtype", "rival"], loss_margin()
    for key, group in rows.groupby(by, sort=False):
        both = group[group["difference_nats"].notna()]
        gap, sd = float(both["rival_gap_nats"].mean()), float(both["difference_nats"].std())
        row: dict[str, Any] = dict(zip(by, key, strict=True)) | compare(both["difference_nats"].tolist(), margin)
        verdict = row["verdict"] if row["rival"] in (PLAIN, WIDER) else worth(row, gap, margin)
        if len(both) < len(group) and verdict in (*EQUAL, BETTER):
            verdict = NOT_DECIDED
        compared.append(
            row
            | {"sd_nats": sd}
            | {"seeds_to_show_equality": sd if math.isnan(sd) else seeds_needed(power_of_equality, sd, margin)}
            | {"rival_gap_nats": gap, "margin_nats": margin}
            | {"seeds_acted": seeds_acted(both) or 0, "bytes_over_rival": group["bytes_over_rival"].mean()}
            | {"same_start": bool(group["same_start"].dropna().all())}
            | {"verdict": NOT_TESTED if acted(both) is False else verdict}
        )
    return compared
