"""Policies that follow something, beside the same ranks in another order and beside a fixed rank of as many bytes.

A *placebo* of a policy is its own ranks in an order that follows nothing: reversed in time or shuffled. It sends the
same bytes, so a policy that is worth following beats it. ``falling`` puts the same ranks in descending order, which
follows nothing either but is known to be a good order. ``fixed rank`` stands still at the policy's bytes. ``fp32
factors`` is the same policy without quantised factors; it sends more bytes.

A difference is the policy's validation loss less its rival's, of the same seed, in nats: below 0 the policy is better.
Shuffles of a seed are averaged first. Beside it stands what there was to win: the rival's gap to no compression. The
verdict is that of :func:`experiments.analyse.equivalence.compare`; ``cannot tell`` where a rival of the same bytes
costs less than twice the margin (:func:`experiments.analyse.equivalence.worth`); ``not tested`` where the policy did
not act (:mod:`experiments.analyse.acting`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.control.settings import GivenConfig
from experiments.analyse import methods
from experiments.analyse.acting import acting
from experiments.analyse.anchors import anchors
from experiments.analyse.equivalence import compare, power_of_equality, seeds_needed, worth
from experiments.analyse.runs import Run
from experiments.analyse.tables import identity, write_tables
from experiments.analyse.windows import first_compressed
from experiments.common.acting import NOT_TESTED, acted, seeds_acted
from experiments.common.equivalence import BETTER, EQUAL, NOT_DECIDED, loss_margin

RESULTS = (
    "table.csv",
    "summary.csv",
    "time_to_target.csv",
    "timings.csv",
    "pairs.csv",
    "comparisons.csv",
    "anchors.csv",
)
DETAILS = ("curves.csv",)
FP32 = "fp32"
RIVALS = {"even": "fixed rank", "reversed": "reversed", "shuffled": "shuffled", "falling": "falling"}
PLACEBOS = ("reversed", "shuffled")
PLAIN, WIDER = "no compression", "fp32 factors"  # they send more bytes
PAIR = ["variant", "label", "policy", "factor_dtype", "rival", "seed", "status", "difference_nats", "rival_gap_nats"]
PAIR += ["bytes_over_rival", "same_start", "acted", "ranks_used", "windows_inside"]
# Numbers of seeds at which a comparison had been looked at before more were trained, by study and variant: those of the
# committed tables.
LOOKS: dict[str, dict[str, tuple[int, ...]]] = {
    "policies": {"cqm": (3,), "cqm_int8": (3,)},
    "policies_late": {"cqm": (3,), "cqm_int8": (3,)},
    "policies_four_replicas": {"cqm": (3, 6)},
    "policies_two_stages": dict.fromkeys(("loss", "loss_int8", "spectral", "spectral_int8"), (2,)),
    "policies_long": {"cqm": (1,)},
}


def analyse(runs: list[Run], out: Path) -> list[Path]:
    """Write the tables of :mod:`experiments.analyse.methods`, ``pairs.csv`` (a policy, a rival and a seed a row) and
    ``comparisons.csv`` (over seeds), and ``anchors.csv`` (:mod:`experiments.analyse.anchors`)."""
    written = methods.analyse(runs, out)
    rows = pd.DataFrame([row for run in runs if follows_something(run) for row in pairs(run, runs)], columns=PAIR)
    rows_of = {"pairs": rows, "comparisons": comparisons(rows, out.name), "anchors": list(anchors(runs))}
    return written + write_tables(out, rows_of)


def follows_something(run: Run) -> bool:
    return run.policy is not None and not isinstance(run.edgc, GivenConfig)


def pairs(run: Run, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """``run`` beside uncompressed training, beside every run of its seed that follows it, shuffles averaged, and beside
    the one that differs from it in its factors alone."""
    of_seed = [other for other in runs if other.seed == run.seed]
    plain = [other for other in of_seed if other.plain]
    base = _mean([other.number("validation_loss") for other in plain if other.ok])
    rivals = {PLAIN: plain}
    for other in of_seed:
        follows = other.config.get("follows") or {}
        if follows.get("variant") == run.variant:
            rivals.setdefault(RIVALS[follows["order"]], []).append(other)
    placebos = [rivals[name] for name in PLACEBOS if name in rivals]
    if len(placebos) > 1:
        rivals["placebos"] = [other for group in placebos for other in group]
    settings, dtype = _but_factors(run)
    wider = [other for other in of_seed if _but_factors(other) == (settings, FP32)]
    if dtype != FP32 and wider:
        rivals[WIDER] = wider
    for name, group in rivals.items():
        fine = [other for other in group if other.ok] if run.ok else []
        losses = [other.number("validation_loss") for other in fine]
        sent = [other.number("bytes_total") for other in fine]
        yield identity(run) | {
            "policy": run.policy,
            "factor_dtype": getattr(run.edgc, "factor_dtype", None),
            "rival": name,
            "difference_nats": run.number("validation_loss") - _mean(losses),
            "rival_gap_nats": None if name == PLAIN else _mean(losses) - base,
            "bytes_over_rival": run.number("bytes_total") / _mean(sent),
            "same_start": all(same_start(run, other) for other in fine) if fine else None,
            **acting(run),
        }


def _but_factors(run: Run) -> tuple[dict[str, Any], str]:
    """A run's compression without its type of factors, and that type."""
    settings = dict(run.compression)
    return settings, str(settings.pop("factor_dtype", FP32))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def same_start(run: Run, other: Run) -> bool:
    """Whether both had the same losses, to the last bit, until ``run`` began to compress."""
    begin = first_compressed(run)
    one, two = (of.steps.loc[~(of.steps["iteration"] >= begin), ["iteration", "loss"]] for of in (run, other))
    return one.equals(two)


def comparisons(rows: pd.DataFrame, study: str = "") -> list[dict[str, Any]]:
    """Per policy and rival: over the seeds of which both have a result, the difference, what there was to win, what
    that says, at which numbers of seeds it was looked at, in how many seeds the policy acted, and how many would show
    equality."""
    found, by, margin = [], ["variant", "label", "policy", "factor_dtype", "rival"], loss_margin()
    for key, mine in rows.groupby(by, sort=False):
        both = mine[mine["difference_nats"].notna()]
        differences = both["difference_nats"]
        compared, gap = compare(differences.tolist(), margin), float(both["rival_gap_nats"].mean())
        row: dict[str, Any] = {**dict(zip(by, key, strict=True)), **compared, **_spread(differences)}
        verdict = compared["verdict"] if row["rival"] in (PLAIN, WIDER) else worth(compared, gap, margin)
        row |= {
            "rival_gap_nats": gap,
            "looked_at": looked_at(study, row["variant"], compared["n"]),
            "margin_nats": margin,
            "seeds_acted": seeds_acted(both) or 0,
            "bytes_over_rival": mine["bytes_over_rival"].mean(),
            "same_start": bool(mine["same_start"].dropna().all()),
            "verdict": NOT_TESTED if acted(both) is False else _of_all(mine, verdict),
        }
        found.append(row)
    return found


def looked_at(study: str, variant: str, n: int) -> str:
    """The numbers of seeds at which a comparison that now has ``n`` was judged: ``3, 6, 10``."""
    earlier = LOOKS.get(study, {}).get(variant, ())
    return ", ".join(map(str, [*(seeds for seeds in earlier if seeds < n), n]))


def _of_all(rows: pd.DataFrame, verdict: str) -> str:
    """``verdict``, which rests on the seeds that have a result; nothing good is said where one has none."""
    lost = bool(rows["difference_nats"].isna().any())
    return NOT_DECIDED if lost and verdict in (*EQUAL, BETTER) else verdict


def _spread(differences: pd.Series) -> Mapping[str, float]:
    sd = float(differences.std()) if len(differences) > 1 else math.nan
    needed = math.nan if math.isnan(sd) else seeds_needed(power_of_equality, sd, loss_margin())
    return {"sd_nats": sd, "seeds_to_show_equality": needed}
