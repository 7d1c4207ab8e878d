"""Validation loss against bytes sent, all methods: the main comparison."""

from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import BETTER, BETTER_WITHIN, NOT_DECIDED, ON_PAR, WORSE, WORSE_WITHIN
from paper_figures import inputs, style, texts

TABLES = ("methods/table.csv", "methods/summary.csv")
CAPTION = """\
**Methods compared at equal training length.** The price of compression: validation loss above uncompressed training
of the same seed (nats; 0.01 nats are about 1 % of perplexity) against the gradient bytes that one replica sends in
data-parallel collectives, as a share of an fp32 all-reduce; of a bf16 one, which is what most training sends, they
are twice as much. Left and down is better. Markers are means over seeds, bars 95 % t intervals, small dots the runs;
r is PowerSGD's fixed rank. EDGC's bytes contain its uncompressed warm-up. Where a method is more than 0.3 nats off,
those above 0.075 are named below the figure in place of being drawn. Runs without a result are named below the figure
and stay in ``methods/table.csv``. So are policies that did not act: their runs are those of a fixed rank, and of the
policy nothing was tested. Differences smaller than the bars say nothing, nor do those inside the bar of bf16, which
changes rounding alone."""
TICKS = (0.5, 1, 2, 5, 10, 20, 50, 100)
VERDICTS = (WORSE, WORSE_WITHIN, ON_PAR, BETTER_WITHIN, BETTER, NOT_DECIDED, NOT_TESTED)

# Where the worst method is so far off that the others would lie on one line, it is named below the figure instead.
FAR, NEAR = 0.3, 0.075  # nats


def draw(results: Path) -> Figure:
    """Gap to uncompressed training (mean and 95 % t interval over seeds) against the share of the fp32 bytes sent."""
    runs = inputs.read(results, "methods")
    summary = inputs.read(results, "methods", "summary.csv")
    shown = summary[summary["gap_nats_mean"].notna()]
    near = shown[shown["gap_nats_mean"] < NEAR]
    cut = shown["gap_nats_mean"].max() > FAR and len(near) > 1
    near = near if cut else shown
    fig, (ax,) = style.figure(height=5.6)
    points(ax, near, runs)
    ax.axhline(0, color="#444444", linewidth=0.6)
    low, high = 100 * near["bytes_ratio_mean"].min() / 1.35, 100 * near["bytes_ratio_mean"].max() * 1.35
    style.log_x(ax, [tick for tick in TICKS if low <= tick <= high])
    ax.set(xlim=(low, high), xlabel=texts.SHARE_OF_BYTES, ylabel="validation loss\nabove uncompressed (nats)")
    ax.margins(y=0.14)
    if cut:
        ends = near["gap_nats_low"].fillna(near["gap_nats_min"])
        ax.set_ylim(max(-NEAR / 3, min(-0.05 * NEAR, 1.1 * ends.min())), NEAR)
    else:
        hold(ax, near, runs)
    beyond = shown[~shown["variant"].isin(near["variant"])]
    extra = (blank(shown), off_the_scale(beyond), without_result(runs), texts.untested(runs))
    bars = "bars: 95 % t interval (without a cap: cut off), dots: runs"
    note = texts.count_note(shown["n_ok"], *extra, bars=bars, scale=results.name)
    return texts.finish(fig, [], finding(shown), note, style.handles(ax))


def finding(shown: pd.DataFrame) -> str:
    """Sentence on the method of fewest bytes that loses no more than EDGC; where most are not decided, that alone."""
    rows = shown[shown["method"] != "none"].sort_values("bytes_ratio_mean")
    verdicts, edgc = rows["verdict"], rows[rows["policy"] == "cqm"]
    if 2 * (verdicts == NOT_DECIDED).sum() > len(verdicts) or edgc.empty:
        counts = [(int((verdicts == word).sum()), word) for word in VERDICTS]
        words = ", ".join(f"{n} {word}" for n, word in counts if n or word == ON_PAR)
        return f"Of {len(verdicts)} methods against no compression: {words}"
    label, share, gap = edgc.iloc[0][["label", "bytes_ratio_mean", "gap_nats_mean"]]
    better = rows[(rows["bytes_ratio_mean"] < share) & (rows["gap_nats_mean"] <= gap)]
    if better.empty:
        return f"No method sends fewer bytes than {label} at no more loss"
    percents = f"{100 * better['bytes_ratio_mean'].iloc[0]:.0f} % of the bytes, not {100 * share:.0f} %"
    return f"{better['label'].iloc[0]} loses no more in the mean than {label} and sends {percents}"


def blank(shown: pd.DataFrame) -> str:
    """Limit of what the study can see, in words: the interval of bf16, which changes rounding alone."""
    rows = shown[shown["variant"] == "bf16"]
    if rows.empty or rows["gap_nats_low"].isna().any():
        return ""
    row = rows.iloc[0]
    return (
        f"bf16 changes rounding alone and has {row['gap_nats_low']:+.3f} to {row['gap_nats_high']:+.3f} nats here: "
        "smaller gaps cannot be told from noise."
    )


def hold(ax: Axes, drawn: pd.DataFrame, runs: pd.DataFrame) -> None:
    """Cut bars off that reach further beyond all runs than the runs lie apart: two seeds have intervals that would
    press everything else onto one line."""
    gaps = runs.loc[runs["variant"].isin(drawn["variant"]), "gap_nats"].dropna()
    low, high = gaps.min(), gaps.max()
    apart, room = high - low, 0.5 * (high - low)
    if drawn["gap_nats_low"].min() < low - apart or drawn["gap_nats_high"].max() > high + apart:
        ax.set_ylim(low - room, high + room)


def off_the_scale(rows: pd.DataFrame) -> str:
    """Sentence on the variants that are not drawn, with what they lose and send."""
    words = [f"{row['label']}: {row['gap_nats_mean']:.2f} at {100 * row['bytes_ratio_mean']:.1f}"
             for _, row in rows.sort_values("gap_nats_mean").iterrows()]  # fmt: skip
    return f"Above the scale (nats at % of bytes): {'; '.join(words)}." if words else ""


def points(ax: Axes, summary: pd.DataFrame, runs: pd.DataFrame) -> None:
    """A marker per variant with its interval, the rank beside that of PowerSGD, and a dot per run."""
    for _, row in summary.iterrows():
        of_variant = runs[runs["variant"] == row["variant"]]
        look, fine = style.look(of_variant.iloc[0]), of_variant[of_variant["status"] == "ok"]
        x, y = 100 * row["bytes_ratio_mean"], row["gap_nats_mean"]
        spread = [[y - row["gap_nats_low"]], [row["gap_nats_high"] - y]]
        ax.errorbar(x, y, yerr=spread, markersize=5.5, elinewidth=0.8, label=look.label, **look.marks())
        ax.plot(100 * fine["bytes_ratio"], fine["gap_nats"], ".", color=look.colour, markersize=2.5, alpha=0.6)
        if row["method"] == "powersgd" and len(fine):
            texts.label_point(ax, f"r={fine['rank'].iloc[0]:g}", (x, y), (4, 7), fontsize=style.MIN_FONT)


def without_result(runs: pd.DataFrame) -> str:
    """Runs without a result, in words; of many the first four."""
    lost = texts.failures(runs)
    if not lost:
        return ""
    return "without result: " + ",\n".join(lost[:4]) + (f" and {len(lost) - 4} more" if len(lost) > 4 else "")
