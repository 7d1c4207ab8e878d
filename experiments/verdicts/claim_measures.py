"""Our value for each claim of the paper, read from the tables of one scale, or the reason why there is none.

A measure returns every value that it finds, one per run where the evidence is a run, and never judges. How many seeds
they are of is ``n``; how many of anything else has a name of its own.
Without evidence it raises :class:`Missing` with the reason.

No value of a simulated grid (bandwidth and recorded entropy) stands for the others, so what is told of one is the
range, where the rule holds, and between which bandwidths the paper's number lies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyse.equivalence import compare
from experiments.analyse.tables import bf16_ratio
from experiments.common import acting, written_tables
from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import CANNOT_TELL, NOT_DECIDED, loss_margin

Place = tuple[str, float]  # recorded entropy, Gbit/s per node
COUNTS = ("runs", "windows", "tasks", "bandwidths", "entropies")
EDGC_CQM = "edgc_cqm"  # the variant that is the paper's method; others are no evidence for its claims
# Rivals of a policy, as analyse/policies.py calls them.
PLAIN, FIXED, ORDERS = "no compression", "fixed rank", ("placebos", "falling")
OPEN = (NOT_DECIDED, CANNOT_TELL)
SHARED = {"policies_four_replicas": "policies"}  # the same seeds, first weights and data: one replication, not two


class Missing(Exception):
    """There is no evidence for a claim; the text says why."""


@dataclass(frozen=True)
class Measured:
    """Values of one claim. ``kind`` is ``measured`` or ``simulated`` as the evidence itself says."""

    values: tuple[float | str, ...]
    evidence: str  # path below the scale's folder
    note: str = ""
    kind: str = "measured"
    extrapolated: bool = False  # to what the claim is about: then a claim is supported in part at best
    acted: bool | None = None  # whether the policy did that the claim is about; None: it is about none
    n: int = 0  # seeds; where settings have different numbers of them, the fewest
    n_most: int | None = None  # and the most, where that is another number
    beside: tuple[str, ...] = ()  # tables that the values are from, too, as ``evidence`` names one
    counts: dict[str, int] = field(default_factory=dict)  # of other things, by ``COUNTS``
    grid: tuple[Place, ...] = ()  # of simulated values: what each is of
    assumed: tuple[tuple[float, float], ...] = ()  # (bandwidth, value) at the mean rank that is assumed
    things: str = "runs"  # what each of the values is of
    also: str = ""  # values of another reading of the claim, as a range
    others: tuple[float, ...] = ()  # these values
    gap: tuple[float, float, float] | None = None  # of words that judge one: its mean and 95 % t interval, nats


def read(root: Path, relative: str) -> pd.DataFrame:
    """A table below the folder of a scale; ``Missing`` where there is none or it has no rows."""
    path = root / relative
    if not path.is_file():
        raise Missing(f"{relative} does not exist")
    frame = written_tables.read(path)
    if frame.empty:
        raise Missing(f"{relative} has no rows")
    return frame


def join(*parts: str) -> str:
    """One note of several, some of them perhaps empty."""
    return "; ".join(part for part in parts if part)


def numbers(column: pd.Series) -> tuple[float, ...]:
    """The finite values of a column."""
    return tuple(float(v) for v in column if math.isfinite(v))


def _runs(root: Path, relative: str) -> tuple[pd.DataFrame, str]:
    """The finished runs of a table, and a remark about the others."""
    return _finished(read(root, relative), relative)


def _finished(frame: pd.DataFrame, relative: str) -> tuple[pd.DataFrame, str]:
    """The rows of finished runs, and a remark about the others: they are named, never silently dropped."""
    other = frame[frame["status"] != "ok"]
    fine = frame[frame["status"] == "ok"]
    if fine.empty:
        raise Missing(f"no finished run in {relative}")
    lost = ", ".join(
        f"{v}-s{s} {status}" for v, s, status in other[["variant", "seed", "status"]].drop_duplicates().values
    )
    return fine, f"not counted: {lost}" if lost else ""


def _runs_of(rows: pd.DataFrame) -> dict[str, Any]:
    """Of a row per run: how many seeds and how many runs."""
    return {"n": rows["seed"].nunique(), "counts": {"runs": len(rows)}}


def _acted(rows: pd.DataFrame, relative: str) -> tuple[bool, str]:
    """Whether the policy of finished runs acted, and why that is said; what is not known counts as not."""
    if not acting.recorded(rows):
        return False, f"{relative} does not say whether the policy acted"
    did = acting.acted(rows) is True
    return did, ("" if did else "the policy did not act: ") + acting.account(rows)


def entropy_cost(root: Path) -> Measured:
    """Percent change of the seconds per step spent on entropy at alpha 0.1, beta 0.25 against reading everything."""
    relative = "sampling_ablation/timings.csv"
    fine, lost = _runs(root, relative)
    rows = fine[(fine["alpha"].round(6) == 0.1) & (fine["beta"].round(6) == 0.25)]
    values = numbers(rows["change_percent"])
    if not values:
        raise Missing(f"no finished run at alpha 0.1 and beta 0.25 with a twin at alpha = beta = 1 in {relative}")
    share = fine.loc[(fine["alpha"] == 1) & (fine["beta"] == 1), "share_of_step"].mean()
    # These runs read everything once more, for the record: that is part of the measured step, and of no other.
    note = f"reading everything takes {100 * share / (1 - share):.2g} % of the time of a step without it here"
    return Measured(values, relative, join(note, lost), **_runs_of(rows))


def _window(root: Path, span: str) -> Measured:
    relative = "window_ablation/correlation.csv"
    fine, lost = _runs(root, relative)
    summary = read(root, "window_ablation/correlation_summary.csv")
    mine, means = (t[(t["stage"] == 0) & (t["span"] == span) & (t["alpha"] == 0.1)] for t in (fine, summary))
    # The paper's window has 100 samples. Where one was measured it counts, else what shorter ones are extrapolated to.
    rows = mine[mine["samples"] == 100].sort_values("kind", ascending=False).drop_duplicates("seed")
    values = numbers(rows.sort_values("seed")["cc"])
    if not values:
        raise Missing(
            f"no run is long enough to measure a window of 100 samples, or to extrapolate to it, in {relative}"
        )
    said = []
    for (kind, length), group in rows.groupby(["kind", "from_window"], sort=False):
        over = means[(means["kind"] == kind) & (means["samples"] == 100)].iloc[0]
        limits = f"{over['cc_low']:.4f} to {over['cc_high']:.4f}" if over["n"] > 1 else "one seed"
        said.append(f"{kind} at 100 samples: mean {over['cc_mean']:.4f} ({limits})")
        said[-1] += f" from {int(group['windows'].min())} windows of {int(length)} iterations"
        if kind == "extrapolated":
            base = means[(means["window"] == length) & (means["kind"] == "measured")].iloc[0]
            said[-1] += f" ({int(base['samples'])} of them sampled, CC {base['cc_mean']:.2f})"
    counts = {"runs": len(rows), "windows": int(rows["windows"].min())}
    note, beyond = join("alpha = 0.1", *said, lost), "extrapolated" in set(rows["kind"])
    return Measured(values, relative, note, extrapolated=beyond, n=rows["seed"].nunique(), counts=counts)


def window_correlation(root: Path) -> Measured:
    """CC of stage 0 over the windows after warm-up, at the paper's alpha and samples in a window, a value per seed."""
    return _window(root, "after warm-up")


def window_correlation_whole_run(root: Path) -> Measured:
    """The same over all windows of the run."""
    return _window(root, "whole run")


def edgc_gap(root: Path) -> Measured:
    """Whether EDGC (cqm) is on par with the uncompressed runs of the same seeds; the paper's factors are fp32."""
    relative = "methods/table.csv"
    frame = read(root, relative)
    rows = frame[(frame["method"] == "edgc") & (frame["policy"] == "cqm") & (frame["factor_dtype"] == "fp32")]
    if rows.empty:
        raise Missing(f"no EDGC (cqm) run in {relative}")
    fine, lost = _finished(rows, relative)
    values = numbers(fine["gap_nats"])
    if not values:
        raise Missing(f"no uncompressed run of the same seeds in {relative}")
    share = 100 * fine["bytes_ratio"].mean()
    acted, account = _acted(fine, relative)
    margin = loss_margin()
    found = compare(values, margin)
    note = (
        f"mean gap {found['difference_nats']:+.4f} nats ({min(values):.4f} to {max(values):.4f} over seeds), "
        f"p of {margin:g} or more {found['p_equal']:.2g}, at {share:.1f} % of the bytes of fp32, "
        f"{bf16_ratio(share):.1f} % of bf16's"
    )
    if acted and found["verdict"] == NOT_DECIDED:
        raise Missing(join("too few seeds to decide", account, note, lost))
    gap = (found["difference_nats"], found["difference_low"], found["difference_high"])
    note = join(account, note, _blank(root), lost)
    return Measured((found["verdict"],), relative, note, acted=acted, gap=gap, **_runs_of(fine))


def _blank(root: Path) -> str:
    """What the comparison of methods shows of bf16, which changes rounding alone, and how many methods it judges."""
    try:
        table = read(root, "methods/summary.csv").set_index("variant")
    except Missing:
        return ""
    if "bf16" not in table.index:
        return ""
    row, judged = table.loc["bf16"], int(table["verdict"].notna().sum())
    limits = f"{row['gap_nats_low']:+.4f} to {row['gap_nats_high']:+.4f}"
    return (
        f"bf16, which changes rounding alone, has {limits} nats here: less than that this study cannot see, and of "
        f"{judged} methods judged one is expected to be worse or better by chance"
    )


def zero_shot_on_par(root: Path) -> Measured:
    """Verdict of the equivalence test on every task's first metric, EDGC (cqm); tasks at chance do not count.

    A model at chance is on par with any other at chance, which says nothing of compression. Whether the policy acted is
    told by the table of the study that trained the models.
    """
    relative = "zero_shot/summary.csv"
    frame = read(root, relative)
    edgc = frame[frame["variant"] == EDGC_CQM]
    if edgc.empty:
        raise Missing(f"no EDGC run in {relative}")
    rows = edgc[(edgc["primary"].astype(str) == "True") & edgc["verdict"].notna()]
    if rows.empty:
        raise Missing(f"no finished EDGC run with an uncompressed one of its seed in {relative}")
    seen = rows[rows["above_chance"].astype(str) == "True"]
    lost = ", ".join(dict.fromkeys(rows.loc[~rows.index.isin(seen.index), "task"]))
    at_chance = f"not above chance without compression, not counted: {lost}" if lost else ""
    if seen.empty:
        raise Missing(at_chance)
    note = [
        f"{word}: " + ", ".join(f"{r['task']} {r['gap']:+.2g} of {r['margin']:g}" for _, r in group.iterrows())
        for word in ("on par", "different", "not decided")
        if not (group := seen[seen["verdict"] == word]).empty
    ]
    acted, account = _trained(root, edgc)
    if acted and set(seen["verdict"]) == {"not decided"}:
        raise Missing(join("too few documents", *note, at_chance))
    found = tuple(str(v) for v in seen["verdict"])
    counts = {"tasks": len(seen)}
    return Measured(
        found, relative, join(account, *note, at_chance), acted=acted, n=int(seen["n_seeds"].min()), counts=counts,
        things="tasks",
    )  # fmt: skip


def _trained(root: Path, models: pd.DataFrame) -> tuple[bool, str]:
    """Whether the policy of the runs that made these models acted."""
    relative = f"{models['study'].iloc[0] if 'study' in models else 'methods'}/table.csv"
    try:
        runs, _ = _runs(root, relative)
    except Missing as reason:
        return False, f"whether the policy acted is not known: {reason}"
    return _acted(runs[runs["variant"] == EDGC_CQM], relative)


def _trend(root: Path, architecture: str) -> Measured:
    relative = "entropy_trend/table.csv"
    frame = read(root, relative)
    fine, lost = _finished(frame[frame["architecture"] == architecture], relative)
    described = (fine["estimator"] == "histogram") & (fine["group"] == "<all>")
    rows = fine[described & (fine["verdict"] != "too few probes")]
    if rows.empty:
        raise Missing(f"no {architecture} run with enough histogram probes in {relative}")
    notes = [
        f"{name}: {r['start'].mean():.2f} nats at the start, {r['end'].mean():.2f} at the end"
        for name, r in rows.groupby("variant", sort=False)
    ]
    return Measured(tuple(str(v) for v in rows["verdict"]), relative, join(*notes, lost), **_runs_of(rows))


def entropy_trend_gpt(root: Path) -> Measured:
    """Verdict on the trajectory of the mean entropy over parameters (histogram estimator), GPT."""
    return _trend(root, "gpt")


def entropy_trend_bert(root: Path) -> Measured:
    """The same for BERT."""
    return _trend(root, "bert")


def _moments(root: Path) -> tuple[pd.DataFrame, str, str]:
    relative = "entropy_trend/moments.csv"
    fine, lost = _runs(root, relative)
    return fine[fine["group"] == "<all>"], relative, lost


def zero_centring(root: Path) -> Measured:
    """Whether the share of entries near zero grew, per run."""
    rows, relative, lost = _moments(root)
    rows = rows.dropna(subset=["centring"])
    if rows.empty:
        raise Missing(f"no share near zero in {relative}")
    notes = [
        f"{name}: {100 * r['near_zero_start'].mean():.2g} % at the start, "
        f"{100 * r['near_zero_end'].mean():.2g} % at the end, {', '.join(r['centring'].unique())}"
        for name, r in rows.groupby("variant", sort=False)
    ]
    return Measured(tuple(str(v) for v in rows["centring"]), relative, join(*notes, lost), **_runs_of(rows))


def _early_over_late(root: Path, architecture: str) -> Measured:
    rows, relative, lost = _moments(root)
    rows = rows[(rows["architecture"] == architecture) & rows["correlation_layers_early"].notna()]
    rows = rows[rows["correlation_layers_late"] > 0]
    if rows.empty:
        raise Missing(f"no correlation between layers of a {architecture} run in {relative}")
    notes = [
        f"{name}: {r['correlation_layers_early'].mean():.3f} early, {r['correlation_layers_late'].mean():.3f} late"
        for name, r in rows.groupby("variant", sort=False)
    ]
    ratio = rows["correlation_layers_early"] / rows["correlation_layers_late"]
    return Measured(numbers(ratio), relative, join(*notes, lost), **_runs_of(rows))


def correlation_early_over_late_gpt(root: Path) -> Measured:
    """Mean |Pearson| between same-shaped matrices of different layers of GPT: first third of training over last."""
    return _early_over_late(root, "gpt")


def correlation_early_over_late_bert(root: Path) -> Measured:
    """The same for BERT."""
    return _early_over_late(root, "bert")


def edgc_gap_acting(root: Path) -> Measured:
    """EDGC (cqm) against uncompressed training: a verdict for every setting in which the policy acted."""
    return _by_setting(root, PLAIN)


def entropy_beats_fixed_rank(root: Path) -> Measured:
    """EDGC (cqm) against one fixed rank of exactly its bytes: a verdict for every setting in which the policy acted.

    ``better`` alone says that following the entropy bought anything; beside it stand the same ranks in other orders.
    """
    return _by_setting(root, FIXED, ORDERS)


def _by_setting(root: Path, rival: str, beside: Sequence[str] = ()) -> Measured:
    """The verdict against ``rival`` in each study; the note tells it, and those against the rivals ``beside`` it."""
    found, notes = {}, []
    for path in sorted(root.glob("policies*/comparisons.csv")):
        relative = path.relative_to(root).as_posix()
        table = read(root, relative)
        mine = table[(table["variant"] == "cqm") & (table["n"] > 0)].set_index("rival")
        if rival not in mine.index:
            continue
        row = mine.loc[rival]
        said = [
            f"against {name} {one['difference_nats']:+.4f} nats ({one['difference_low']:.4f} to "
            f"{one['difference_high']:.4f}), {one['verdict']}{_room(one)}"
            for name, one in mine.iterrows()
            if name in (rival, *beside)
        ]
        share = 100 * float(row["bytes_over_rival"])
        sent = f" at {share:.1f} % of the bytes of fp32, {bf16_ratio(share):.1f} % of bf16's" if rival == PLAIN else ""
        looked = f" (looked at with {row['looked_at']})" if "," in str(row.get("looked_at", "")) else ""
        about = f"n = {row['n']}{looked}, acted in {row['seeds_acted']}"
        notes.append(f"{path.parent.name}, {about}: {', '.join(said)}{sent}")
        if row["verdict"] != NOT_TESTED:
            found[relative] = row
    if not notes:
        raise Missing(f"no study of policies has EDGC (cqm) against {rival}")
    studies = {Path(relative).parent.name for relative in found}
    notes += [f"{one} shares seeds and data with {two}" for one, two in SHARED.items() if {one, two} <= studies]
    decided = {relative: row for relative, row in found.items() if row["verdict"] not in OPEN}
    if found and not decided:
        raise Missing(join("nothing is decided", *notes))
    if not decided:
        return Measured((NOT_TESTED,), "policies/comparisons.csv", join(*notes), acted=False)
    relative, most = max(decided.items(), key=lambda item: item[1]["difference_nats"])
    gap = (most["difference_nats"], most["difference_low"], most["difference_high"])
    words, seeds = tuple(str(row["verdict"]) for row in found.values()), [int(row["n"]) for row in found.values()]
    # The interval is that of the setting that the evidence names, the one with the largest difference.
    return Measured(
        words, relative, join(*notes), acted=True, gap=gap, things="settings",
        beside=tuple(name for name in found if name != relative),
        n=min(seeds), n_most=max(seeds) if max(seeds) > min(seeds) else None,
    )  # fmt: skip


def _room(row: pd.Series) -> str:
    """What the rival costs against no compression, which is what there was to win."""
    gap = row.get("rival_gap_nats")
    return "" if pd.isna(gap) else f", which costs {gap:+.4f}"


def _cluster(root: Path, column: str, *others: tuple[str, str]) -> Measured:
    """Percent change, a value for each bandwidth and recorded entropy; ``others`` are columns told in the note."""
    relative = "gpt2_12p1b_h100/traces.csv"
    frame = read(root, relative).dropna(subset=[column])
    grid = tuple(zip(frame["entropy"].astype(str), frame["gbits_per_second"].astype(float), strict=True))
    values = numbers(-frame[column])
    medians: dict[str, list[str]] = {}
    for name, median in (-frame[column]).groupby(frame["entropy"], sort=False).median().sort_values().items():
        medians.setdefault(f"{median:.2g}", []).append(str(name))
    note = join(
        "median over bandwidths " + ", ".join(f"{median} ({', '.join(names)})" for median, names in medians.items()),
        *(f"{what} {extent(numbers(-frame[other]))} %" for what, other in others),
    )
    counts = {"bandwidths": frame["gbits_per_second"].nunique(), "entropies": frame["entropy"].nunique()}
    return Measured(values, relative, note, "simulated", counts=counts, grid=grid)


def _assumed(root: Path, relative: str, where: Mapping[str, object], column: str) -> tuple[tuple[float, float], ...]:
    """(bandwidth, value) at the mean rank that is assumed half-way between the limits."""
    frame = read(root, relative)
    rows = frame[(frame[list(where)] == pd.Series(where)).all(axis=1)]
    return tuple(zip(rows["gbits_per_second"].astype(float), numbers(-rows[column]), strict=True))


def cluster_communication(root: Path) -> Measured:
    """Change of the slowest stage's time for communication under the ranks that EDGC's controller takes.

    The slowest stage counts even where DAC leaves it uncompressed. Beside it stands the other thing that the claim may
    mean: the change of a step's exposed time, that of reductions which nothing hides.
    """
    column = "reduction_communication_percent"
    found = _cluster(root, column, ("compression included", "reduction_with_compress_percent"))
    at, exposed = {"method": "edgc", "stage": "slowest"}, _exposed(root)
    also = f"or of the exposed time {extent(exposed)}"
    return replace(found, assumed=_assumed(root, "gpt2_12p1b_h100/table.csv", at, column), also=also, others=exposed)


def _exposed(root: Path) -> tuple[float, ...]:
    """Percent change of the exposed time of a step, reductions after backward: what the step saves, as a share of what
    is exposed of an uncompressed one."""
    frame, steps = (read(root, f"gpt2_12p1b_h100/{name}.csv") for name in ("traces", "steps"))
    plain = steps[(steps["method"] == "none") & ~steps["overlap"].astype(bool)].set_index("gbits_per_second")
    share = plain["seconds_exposed"] / plain["seconds_step"]
    return numbers(-frame["reduction_time_percent"] / frame["gbits_per_second"].map(share))


def cluster_training_time(root: Path) -> Measured:
    """Change of the simulated step under the ranks that EDGC's controller takes, reductions after backward."""
    column = "reduction_time_percent"
    found = _cluster(root, column, ("reductions beside backward", "reduction_time_overlap_percent"))
    at = {"method": "edgc", "overlap": False}
    return replace(found, assumed=_assumed(root, "gpt2_12p1b_h100/steps.csv", at, column))


def extent(values: Sequence[float]) -> str:
    """From the most that is saved to the least: ``-40 to -0.47``."""
    return f"{min(values):.4g} to {max(values):.4g}"


def by_entropy(values: Sequence[float], grid: Sequence[Place]) -> dict[str, list[tuple[float, float]]]:
    """(bandwidth, value), ascending in the bandwidth, by recorded entropy."""
    found: dict[str, list[tuple[float, float]]] = {}
    for value, (name, gbits) in zip(values, grid, strict=True):
        found.setdefault(name, []).append((gbits, value))
    return {name: sorted(points) for name, points in found.items()}


def crossed(points: Sequence[tuple[float, float]], number: float) -> list[str]:
    """Between which neighbouring bandwidths ``number`` lies, in words; ``points`` ascend in the bandwidth."""
    return [
        f"between {a:g} and {b:g} Gbit/s"
        for (a, first), (b, second) in pairwise(points)
        if (first - number) * (second - number) <= 0
    ]


def alike(found: Mapping[str, str]) -> list[str]:
    """``a, b words`` for each of the words that entropies have, in the order in which they come."""
    names: dict[str, list[str]] = {}
    for name, words in found.items():
        names.setdefault(words, []).append(name)
    return [f"{', '.join(which)} {words}" for words, which in names.items() if words]


def account(values: Sequence[float], grid: Sequence[Place], holds: Callable[[float], bool], number: float) -> str:
    """Where the rule holds, and where ``number`` itself lies, in words."""
    found = by_entropy(values, grid)
    where = {name: [f"{gbits:g}" for gbits, value in points if holds(value)] for name, points in found.items()}
    named = alike({name: f"at {', '.join(gbits)} Gbit/s" if gbits else "" for name, gbits in where.items()})
    between = alike({name: ", ".join(crossed(points, number)) for name, points in found.items()})
    holding = f"the rule holds for {sum(map(holds, values))} of {len(values)} values"
    if named:
        holding += f": {', and '.join(named)}"
    return f"{holding}; {number:g} % itself: {', and '.join(between) or 'at no bandwidth'}"


def beside(assumed: Sequence[tuple[float, float]], number: float) -> str:
    """The range at the mean rank that is assumed, and where ``number`` lies in it, in words; empty without any."""
    if not assumed:
        return ""
    where = ", ".join(crossed(sorted(assumed), number)) or "at no bandwidth"
    return f"at a mean rank assumed half-way {extent([value for _, value in assumed])} %, {number:g} % {where}"


MEASURES: dict[str, Callable[[Path], Measured]] = {
    function.__name__: function
    for function in (
        cluster_communication, cluster_training_time, entropy_cost, window_correlation,
        window_correlation_whole_run, edgc_gap, edgc_gap_acting, entropy_beats_fixed_rank, zero_shot_on_par,
        entropy_trend_gpt, entropy_trend_bert, zero_centring, correlation_early_over_late_gpt,
        correlation_early_over_late_bert,
    )
}  # fmt: skip
