"""Our value for each claim of the paper, read from the tables of one scale.

A measure returns every value that it finds, one per run where the evidence is a run, and never judges. How many seeds
they are of is ``n``; how many of anything else has a name of its own.
Without evidence it raises :class:`Missing` with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyse.equivalence import compare
from experiments.analyse.tables import bf16_ratio
from experiments.common import acting
from experiments.common.equivalence import NOT_DECIDED, loss_margin
from experiments.verdicts.cluster_measures import cluster_communication, cluster_training_time
from experiments.verdicts.evidence import Measured, Missing, join, numbers, read
from experiments.verdicts.policy_measures import edgc_gap_acting, entropy_beats_fixed_rank

EDGC_CQM = "edgc_cqm"  # the variant that is the paper's method; others are no evidence for its claims
FIXED, ORDERS = (
    "fixed rank",
    ("placebos", "falling"),
)  # rivals of a policy at its bytes, as analyse/policies.py calls them


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
    return Measured((found["verdict"],), relative, join(account, note, lost), acted=acted, gap=gap, **_runs_of(fine))


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


MEASURES: dict[str, Callable[[Path], Measured]] = {
    function.__name__: function
    for function in (
        cluster_communication, cluster_training_time, entropy_cost, window_correlation,
        window_correlation_whole_run, edgc_gap, edgc_gap_acting, entropy_beats_fixed_rank, zero_shot_on_par,
        entropy_trend_gpt, entropy_trend_bert, zero_centring, correlation_early_over_late_gpt,
        correlation_early_over_late_bert,
    )
}  # fmt: skip
