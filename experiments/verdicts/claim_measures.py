"""Our value for each claim of the paper, read from the tables of one scale, or the reason why there is none.

A measure returns every value that it finds, one per run where the evidence is a run, and never judges. How many seeds
they are of is ``n``; how many of anything else has a name of its own.
Without evidence it raises :class:`Missing` with the reason.

What is simulated is read by :mod:`experiments.verdicts.simulated_claims`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.analyse.tables import bf16_ratio
from experiments.common import acting
from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import CANNOT_TELL, NOT_DECIDED, compare, loss_margin
from experiments.verdicts import simulated_claims
from experiments.verdicts.measured import Measured, Missing, join, numbers, read

EDGC_CQM = "edgc_cqm"  # the variant that is the paper's method; others are no evidence for its claims
# Rivals of a policy, as analyse/policies.py calls them.
PLAIN, FIXED, ORDERS = "no compression", "fixed rank", ("placebos", "falling")
# The same seeds, first weights and data: one replication, not two.
SHARED = {"policies_four_replicas": "policies_one_stage"}


def _finished(root: Path, relative: str, **where: object) -> tuple[pd.DataFrame, str]:
    """The finished runs of a table ``where`` columns have these values, and a remark that names the others."""
    frame = read(root, relative)
    for column, value in where.items():
        frame = frame[frame[column] == value]
    fine, other = frame[frame["status"] == "ok"], frame[frame["status"] != "ok"]
    if fine.empty:
        raise Missing(f"no finished run in {relative}" + f" of {', '.join(map(str, where.values()))}" * bool(where))
    names = [f"{v}-s{s} {status}" for v, s, status in other[["variant", "seed", "status"]].drop_duplicates().values]
    return fine, f"not counted: {', '.join(names)}" if names else ""


def _of_runs(values: Sequence[float | str], relative: str, rows: pd.DataFrame, *notes: str, **more: Any) -> Measured:
    """Values of a row per run."""
    counts = {"runs": len(rows)}
    return Measured(tuple(values), relative, join(*notes), n=rows["seed"].nunique(), counts=counts, **more)


def _by_variant(rows: pd.DataFrame, text: Callable[[pd.DataFrame], str]) -> list[str]:
    return [f"{name}: {text(group)}" for name, group in rows.groupby("variant", sort=False)]


def _acted(rows: pd.DataFrame) -> tuple[bool, str]:
    """True if the policy of finished runs acted, with the reason; what is not known counts as not."""
    did = acting.acted(rows) is True
    return did, ("" if did else "the policy did not act: ") + acting.account(rows)


def entropy_cost(root: Path) -> Measured:
    """Percent change of the seconds per step spent on entropy at alpha 0.1, beta 0.25 against reading everything."""
    relative = "sampling_ablation/timings.csv"
    fine, lost = _finished(root, relative)
    rows = fine[(fine["alpha"].round(6) == 0.1) & (fine["beta"].round(6) == 0.25)]
    values = numbers(rows["change_percent"])
    if not values:
        raise Missing(f"no finished run at alpha 0.1 and beta 0.25 with a twin at alpha = beta = 1 in {relative}")
    share = fine.loc[(fine["alpha"] == 1) & (fine["beta"] == 1), "share_of_step"].mean()
    # These runs read everything once more, for the record: that is part of the measured step, and of no other.
    note = f"reading everything takes {100 * share / (1 - share):.2g} % of the time of a step without it here"
    return _of_runs(values, relative, rows, note, lost)


def window_correlation(root: Path, span: str) -> Measured:
    """CC of stage 0 over the windows of ``span``, at the paper's alpha and samples in a window, a value per seed.

    The paper's window has 100 samples. Where one was measured it counts, else what shorter ones are extrapolated to.
    """
    relative = "window_ablation/correlation.csv"
    fine, lost = _finished(root, relative)
    summary = read(root, "window_ablation/correlation_summary.csv")
    cells, means = (t[(t["stage"] == 0) & (t["span"] == span) & (t["alpha"] == 0.1)] for t in (fine, summary))
    rows = cells[cells["samples"] == 100].sort_values("kind", ascending=False).drop_duplicates("seed")
    values = numbers(rows.sort_values("seed")["cc"])
    if not values:
        problem = "no run is long enough to measure a window of 100 samples, or to extrapolate to it"
        raise Missing(f"{problem}, in {relative}")
    notes = []
    for (kind, length), group in rows.groupby(["kind", "from_window"], sort=False):
        over = means[(means["kind"] == kind) & (means["samples"] == 100)].iloc[0]
        limits = f"{over['cc_low']:.4f} to {over['cc_high']:.4f}" if over["n"] > 1 else "one seed"
        note = f"{kind} at 100 samples: mean {over['cc_mean']:.4f} ({limits})"
        note += f" from {int(group['windows'].min())} windows of {int(length)} iterations"
        if kind == "extrapolated":
            base = means[(means["window"] == length) & (means["kind"] == "measured")].iloc[0]
            note += f" ({int(base['samples'])} of them sampled, CC {base['cc_mean']:.2f})"
        notes.append(note)
    found = _of_runs(
        values, relative, rows, "alpha = 0.1", *notes, lost, extrapolated="extrapolated" in set(rows["kind"])
    )
    return replace(found, counts=found.counts | {"windows": int(rows["windows"].min())})


def edgc_gap(root: Path) -> Measured:
    """Verdict on whether EDGC (cqm) is on par with uncompressed runs of its seeds; the paper's factors are fp32."""
    relative = "methods/table.csv"
    fine, lost = _finished(root, relative, method="edgc", policy="cqm", factor_dtype="fp32")
    values = numbers(fine["gap_nats"])
    if not values:
        raise Missing(f"no uncompressed run of the same seeds in {relative}")
    share, margin = 100 * fine["bytes_ratio"].mean(), loss_margin()
    acted, account = _acted(fine)
    tested = compare(values, margin)
    note = (
        f"mean gap {tested['difference_nats']:+.4f} nats ({min(values):.4f} to {max(values):.4f} over seeds), "
        f"p of {margin:g} or more {tested['p_equal']:.2g}, at {share:.1f} % of the bytes of fp32, "
        f"{bf16_ratio(share):.1f} % of bf16's"
    )
    if acted and tested["verdict"] == NOT_DECIDED:
        raise Missing(join("too few seeds to decide", account, note, lost))
    gap = (tested["difference_nats"], tested["difference_low"], tested["difference_high"])
    return _of_runs((tested["verdict"],), relative, fine, account, note, _blank(root), lost, acted=acted, gap=gap)


def _blank(root: Path) -> str:
    """Sentence on bf16 among the methods, which changes rounding alone, and on how many methods are judged."""
    try:
        table = read(root, "methods/summary.csv").set_index("variant")
    except Missing:
        return ""
    if "bf16" not in table.index:
        return ""
    limits = "{gap_nats_low:+.4f} to {gap_nats_high:+.4f}".format_map(table.loc["bf16"])
    return (
        f"bf16, which changes rounding alone, has {limits} nats here: less than that this study cannot see, and of "
        f"{table['verdict'].notna().sum()} methods judged one is expected to be worse or better by chance"
    )


def zero_shot_on_par(root: Path) -> Measured:
    """Verdict of the equivalence test on every task's first metric, EDGC (cqm); tasks at chance do not count.

    A model at chance is on par with any other at chance, which says nothing of compression. Whether the policy acted is
    told by the table of the study that trained the models.
    """
    relative = "zero_shot/summary.csv"
    frame = read(root, relative)
    frame = frame[frame["variant"] == EDGC_CQM]
    rows = frame[(frame["primary"].astype(str) == "True") & frame["verdict"].notna()]
    if rows.empty:
        raise Missing(f"no finished EDGC run with an uncompressed one of its seed in {relative}")
    above = rows["above_chance"].astype(str) == "True"
    lost, rows = ", ".join(dict.fromkeys(rows.loc[~above, "task"])), rows[above]
    at_chance = f"not above chance without compression, not counted: {lost}" if lost else ""
    if rows.empty:
        raise Missing(at_chance)
    notes = [
        f"{word}: " + ", ".join(f"{r['task']} {r['gap']:+.2g} of {r['margin']:g}" for _, r in group.iterrows())
        for word in ("on par", "different", NOT_DECIDED)
        if not (group := rows[rows["verdict"] == word]).empty
    ]
    study = f"{frame['study'].iloc[0] if 'study' in frame else 'methods'}/table.csv"
    try:
        acted, account = _acted(_finished(root, study, variant=EDGC_CQM)[0])
    except Missing as reason:
        acted, account = False, f"whether the policy acted is not known: {reason}"
    if acted and set(rows["verdict"]) == {NOT_DECIDED}:
        raise Missing(join("too few documents", *notes, at_chance))
    note, counts = join(account, *notes, at_chance), {"tasks": len(rows)}
    seeds, verdicts = int(rows["n_seeds"].min()), tuple(map(str, rows["verdict"]))
    return Measured(verdicts, relative, note, acted=acted, n=seeds, counts=counts, things="tasks")


def entropy_trend(root: Path, architecture: str) -> Measured:
    """Verdict on the trajectory of the mean entropy over parameters (histogram estimator), a run each."""
    relative = "entropy_trend/table.csv"
    fine, lost = _finished(root, relative, architecture=architecture)
    described = (fine["estimator"] == "histogram") & (fine["group"] == "<all>")
    rows = fine[described & (fine["verdict"] != "too few probes")]
    if rows.empty:
        raise Missing(f"no {architecture} run with enough histogram probes in {relative}")
    text = "{0[start]:.2f} nats at the start, {0[end]:.2f} at the end"
    notes = _by_variant(rows, lambda group: text.format(group[["start", "end"]].mean()))
    return _of_runs(list(map(str, rows["verdict"])), relative, rows, *notes, lost)


def zero_centring(root: Path) -> Measured:
    """Verdict on whether the share of entries near zero grew, per run."""
    relative = "entropy_trend/moments.csv"
    rows, lost = _finished(root, relative, group="<all>")
    rows = rows.dropna(subset=["centring"])
    if rows.empty:
        raise Missing(f"no share near zero in {relative}")
    notes = _by_variant(
        rows,
        lambda group: (
            f"{100 * group['near_zero_start'].mean():.2g} % at the start, "
            f"{100 * group['near_zero_end'].mean():.2g} % at the end, {', '.join(group['centring'].unique())}"
        ),
    )
    return _of_runs(list(map(str, rows["centring"])), relative, rows, *notes, lost)


def early_over_late(root: Path, architecture: str) -> Measured:
    """Mean |Pearson| between same-shaped matrices of different layers: first third of training over the last."""
    relative = "entropy_trend/moments.csv"
    rows, lost = _finished(root, relative, group="<all>")
    early, late = rows["correlation_layers_early"], rows["correlation_layers_late"]
    rows = rows[(rows["architecture"] == architecture) & early.notna() & (late > 0)]
    if rows.empty:
        raise Missing(f"no correlation between layers of a {architecture} run in {relative}")
    text = "{0[correlation_layers_early]:.3f} early, {0[correlation_layers_late]:.3f} late"
    columns = ["correlation_layers_early", "correlation_layers_late"]
    notes = _by_variant(rows, lambda group: text.format(group[columns].mean()))
    return _of_runs(numbers((early / late)[rows.index]), relative, rows, *notes, lost)


def against(root: Path, rival: str, others: Sequence[str] = ()) -> Measured:
    """EDGC (cqm) against ``rival``: a verdict for every setting in which the policy acted.

    Against one fixed rank of exactly its bytes ``better`` alone says that following the entropy bought anything;
    the note tells the verdicts against the rivals ``others``, such as the same ranks in other orders, too.
    """
    tested, notes = dict[str, pd.Series](), []
    for path in sorted(root.glob("policies*/comparisons.csv")):
        table = read(root, path.relative_to(root).as_posix())
        settings = table["variant"].str.extract(r"^(?:(.+)_)?cqm$", expand=False).fillna("")
        edgc = table["variant"].str.fullmatch("(.+_)?cqm") & (table["n"] > 0)
        for setting, rows in table[edgc].set_index("rival").groupby(settings[edgc].to_numpy(), sort=False):
            if rival not in rows.index:
                continue
            row, name = rows.loc[rival], f"{path.parent.name}{f', {setting}' if setting else ''}"
            told = ", ".join(_against(str(name), one) for name, one in rows.iterrows() if name in (rival, *others))
            if rival == PLAIN:
                share = 100 * float(row["bytes_over_rival"])
                told += f" at {share:.1f} % of the bytes of fp32, {bf16_ratio(share):.1f} % of bf16's"
            looked = f" (looked at with {row['looked_at']})" if "," in str(row.get("looked_at", "")) else ""
            notes.append(f"{name}, n = {row['n']}{looked}, acted in {row['seeds_acted']}: {told}")
            if row["verdict"] != NOT_TESTED:
                tested[name] = row
    if not notes:
        raise Missing(f"no study of policies has EDGC (cqm) against {rival}")
    notes += [
        f"{name} shares seeds and data with {same}" for name, same in SHARED.items() if {name, same} <= set(tested)
    ]
    decided = {name: row for name, row in tested.items() if row["verdict"] not in (NOT_DECIDED, CANNOT_TELL)}
    if tested and not decided:
        raise Missing(join("nothing is decided", *notes))
    if not decided:
        return Measured((NOT_TESTED,), "policies/comparisons.csv", join(*notes), acted=False)
    # The interval is that of the setting that the evidence names, the one with the largest difference.
    name, most = max(decided.items(), key=lambda item: item[1]["difference_nats"])
    words, seeds = tuple(str(row["verdict"]) for row in tested.values()), [int(row["n"]) for row in tested.values()]
    evidence = dict.fromkeys(f"{other.partition(',')[0]}/comparisons.csv" for other in (name, *tested))
    return Measured(
        words, next(iter(evidence)), join(*notes), acted=True, things="settings", n=min(seeds),
        gap=(most["difference_nats"], most["difference_low"], most["difference_high"]),
        more_evidence=tuple(evidence)[1:],
        n_most=max(seeds) if max(seeds) > min(seeds) else None,
    )  # fmt: skip


def _against(name: str, row: pd.Series) -> str:
    """Difference and verdict in words, and what the rival costs against no compression: what there was to win."""
    gap = row.get("rival_gap_nats")
    costs = "" if pd.isna(gap) else f", which costs {gap:+.4f}"
    limits = "{difference_nats:+.4f} nats ({difference_low:.4f} to {difference_high:.4f}), {verdict}".format_map(row)
    return f"against {name} {limits}{costs}"


MEASURES: dict[str, Callable[[Path], Measured]] = {
    "cluster_communication": simulated_claims.cluster_communication,
    "cluster_training_time": simulated_claims.cluster_training_time,
    "entropy_cost": entropy_cost,
    "window_correlation": partial(window_correlation, span="after warm-up"),
    "window_correlation_whole_run": partial(window_correlation, span="whole run"),
    "edgc_gap": edgc_gap,
    "edgc_gap_acting": partial(against, rival=PLAIN),
    "entropy_beats_fixed_rank": partial(against, rival=FIXED, others=ORDERS),
    "zero_shot_on_par": zero_shot_on_par,
    "entropy_trend_gpt": partial(entropy_trend, architecture="gpt"),
    "entropy_trend_bert": partial(entropy_trend, architecture="bert"),
    "zero_centring": zero_centring,
    "correlation_early_over_late_gpt": partial(early_over_late, architecture="gpt"),
    "correlation_early_over_late_bert": partial(early_over_late, architecture="bert"),
}
