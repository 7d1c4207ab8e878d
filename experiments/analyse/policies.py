"""Policies that follow something, beside the same ranks in another order and beside a fixed rank of as many bytes.

A *placebo* of a policy is its own ranks in an order that follows nothing: reversed in time or shuffled. It sends the
same bytes, so a policy that is worth following beats it. ``falling`` puts the same ranks in descending order, which
follows nothing either but is known to be a good order. ``fixed rank`` stands still at the policy's bytes. ``fp32
factors`` is the same policy without quantised factors; it sends more bytes.

A difference is the policy's validation loss less its rival's, of the same seed, in nats: below 0 the policy is better.
Shuffles of a seed are averaged first. Beside it stands what there was to win: the rival's gap to no compression. The
verdict is that of :func:`experiments.common.equivalence.compare`; ``cannot tell`` where a rival of the same bytes
costs less than twice the margin (:func:`experiments.common.equivalence.worth`); ``not tested`` where the policy did
not act (:mod:`experiments.analyse.acting`).

Every rank of a run hangs on one number, the entropy at the end of warm-up, so ``anchors`` says what EDGC would have
asked for had warm-up ended elsewhere: its controller, fed with a run's recorded entropies. They are of the gradients
before compression; that the ranks in use leave them as they are is assumed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from edgc.config import EDGCConfig
from edgc.control.adaptive import make_controller
from edgc.control.policies.cqm import CQMConfig
from edgc.control.settings import GivenConfig
from edgc.measurement.report import Report
from experiments.analyse import methods
from experiments.analyse.acting import acting, decisions_acting
from experiments.analyse.runs import Run, as_float
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
from experiments.spec.settings import layer_matrices

RESULTS = ("table.csv", "summary.csv", "time_to_target.csv", "timings.csv", "pairs.csv", "comparisons.csv",
           "anchors.csv")  # fmt: skip
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
SHARES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
"""Shares of a run at which warm-up may end; the paper's is 0.1."""
DECISION = ("iteration", "phase", "ranks", "r_min", "r_max", "target")


def tables(runs: list[Run]) -> dict[str, Any]:
    """The tables of :mod:`experiments.analyse.methods`, ``pairs`` (a policy, a rival and a seed a row), ``comparisons``
    (over seeds) and ``anchors``."""
    following = [run for run in runs if run.policy is not None and not isinstance(run.edgc, GivenConfig)]
    rows = pd.DataFrame([row for run in following for row in pairs(run, runs)], columns=PAIR)
    study = str(runs[0].config.get("study", ""))
    return methods.tables(runs) | {
        "pairs": rows,
        "comparisons": comparisons(rows, study),
        "anchors": list(anchors(runs)),
    }


def pairs(run: Run, runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """``run`` beside uncompressed training, beside every run of its seed that follows it, shuffles averaged, and beside
    the one that differs from it in its factors alone."""
    same_seed = [other for other in runs if other.seed == run.seed]
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


def comparisons(rows: pd.DataFrame, study: str = "") -> list[dict[str, Any]]:
    """Per policy and rival: over the seeds of which both have a result, the difference, what there was to win, what
    that says, at which numbers of seeds it was looked at, in how many seeds the policy acted, and how many would show
    equality. Nothing good is said where a seed has no result."""
    compared, by, margin = [], ["variant", "label", "policy", "factor_dtype", "rival"], loss_margin()
    for key, group in rows.groupby(by, sort=False):
        both = group[group["difference_nats"].notna()]
        gap, sd = float(both["rival_gap_nats"].mean()), float(both["difference_nats"].std())
        row: dict[str, Any] = dict(zip(by, key, strict=True)) | compare(both["difference_nats"].tolist(), margin)
        verdict = row["verdict"] if row["rival"] in (PLAIN, WIDER) else worth(row, gap, margin)
        if len(both) < len(group) and verdict in (*EQUAL, BETTER):
            verdict = NOT_DECIDED
        looks = [seeds for seeds in LOOKS.get(study, {}).get(row["variant"], ()) if seeds < row["n"]]
        compared.append(
            row
            | {"sd_nats": sd}
            | {"seeds_to_show_equality": sd if math.isnan(sd) else seeds_needed(power_of_equality, sd, margin)}
            | {"rival_gap_nats": gap, "looked_at": ", ".join(map(str, [*looks, row["n"]])), "margin_nats": margin}
            | {"seeds_acted": seeds_acted(both) or 0, "bytes_over_rival": group["bytes_over_rival"].mean()}
            | {"same_start": bool(group["same_start"].dropna().all())}
            | {"verdict": NOT_TESTED if acted(both) is False else verdict}
        )
    return compared


def anchors(runs: Sequence[Run]) -> Iterator[dict[str, Any]]:
    """A row per run of policy ``cqm``, kind of parameters and end of warm-up (stage 0).

    ``parameters``: what the entropy is of (:attr:`edgc.sections.EntropyConfig.parameters`). ``target_low`` and
    ``target_high``: the ranks asked for, before limits. The rest as in :mod:`experiments.analyse.acting`.
    """
    for run in runs:
        if not (isinstance(run.edgc, CQMConfig) and run.ok and run.config["parallel"].get("tensor", 1) == 1):
            continue
        if not run.decisions or run.decisions[-1].get("r_max") is None:
            continue
        for parameters, shapes in matrices(run).items():
            windows = [(int(event["iteration"]), *entropy(event, parameters)) for event in run.decisions]
            for share in SHARES:
                if round(share * run.iterations, 6) >= windows[0][0]:
                    about = identity(run) | {"parameters": parameters, "warm_up_share": share}
                    yield about | replay(run, shapes, windows, share)


def matrices(run: Run) -> dict[str, list[tuple[int, int]]]:
    """Shapes of the matrices of the first stage: its ``layers``, and ``all`` with its embeddings."""
    model, stages = run.config["model"], int(run.config["parallel"].get("pipeline", 1))
    width = int(model["hidden"])
    layers = list(layer_matrices(width, model.get("ffn_hidden"))) * (int(model["layers"]) // stages)
    words = int((run.config.get("data") or {}).get("vocab_size") or 0)
    return {"layers": layers, "all": [*layers, (words, width), (int(model["sequence_length"]), width)]}


def entropy(event: Mapping[str, Any], parameters: str) -> tuple[float, float]:
    """Entropy of stage 0 in the window that a decision ended, in nats, and its standard error."""
    keys = ("entropy_layers", "entropy_embeddings", "embedding_share", "entropy_error")
    layers, embeddings, share, error = (as_float((event.get(key) or [None])[0]) for key in keys)
    return layers if parameters == "layers" else (1 - share) * layers + share * embeddings, error


def replay(
    run: Run, shapes: list[tuple[int, int]], windows: Sequence[tuple[int, float, float]], share: float
) -> dict[str, Any]:
    """The ranks of one controller whose warm-up ends at ``share`` of the run."""
    limits = {key: run.decisions[-1][key] for key in ("r_min", "r_max")}  # which may have been searched
    ends = {"warmup_fraction": share, "warmup_limit_fraction": share, "stability_tolerance": 1e9}
    config = EDGCConfig.from_dict(EDGCConfig.usable(run.edgc.to_dict() | ends | limits | {"alignment": "off"}))
    controller = make_controller(config, [shapes], run.iterations)
    reports = [(at, Report((value,), entropy_error=(error,), loss=math.nan)) for at, value, error in windows]
    answers = [decision for at, report in reports if (decision := controller.observe(at, report)) is not None]
    decisions = [{name: getattr(decision, name) for name in DECISION} for decision in answers]
    targets = [decision["target"] for decision in decisions if decision["target"] is not None]
    active = [decision for decision in decisions if decision["phase"] == "active"]
    return {
        "warm_up_ended": active[0]["iteration"] if active else math.nan,
        "target_low": min(targets, default=math.nan),
        "target_high": max(targets, default=math.nan),
        **decisions_acting(decisions, config.window, run.iterations),
        "ranks_stage0": ">".join(str(decision["ranks"][0]) for decision in active),
    }
