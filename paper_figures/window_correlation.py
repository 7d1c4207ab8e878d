"""CC of sampled and full entropy against the number of samples in a window, to the paper's 100."""

from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from paper_figures import inputs, style, texts

TABLES = ("window_ablation/correlation.csv", "window_ablation/correlation_summary.csv")
CAPTION = """\
**Sampled against full entropy, by the number of samples in a window.** Pearson correlation (CC) over windows
between the mean of the sampled entropies and the mean of the full entropy at every iteration, stage 0. The
paper's window has 100 samples (a tenth of 1000 iterations; dotted lines: 100, and its CC of 0.94), ours have
few. Filled: a tenth of the iterations sampled; open: other shares. Solid: measured, mean over seeds; bars: 95 % t
interval by Fisher's z. Dashed: extrapolated from the longest window of which a run has ten, by CC = √(V / (V +
s² / k)) with k samples, their variance s² and the variance V of the window means, which longer windows are
taken to keep (``experiments/analyse/correlation.py``). It says what more samples do to this run's course of
entropy, nothing about another model's. Over the whole run the largest errors are those of the steep start, which
is no noise: there the model falls short of what is measured."""
PAPER_CC, PAPER_SAMPLES, ALPHA = 0.94, 100, 0.1
COLOUR, OTHER = "#0072B2", "#888888"
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500)


def draw(results: Path) -> Figure:
    """A panel for the windows after warm-up and one for the whole run: CC against samples in a window."""
    runs, means = (inputs.read(results, *name.split("/")).query("stage == 0") for name in TABLES)
    spans = list(dict.fromkeys(runs["span"])) or ["after warm-up"]
    fig, axes = style.figure(len(spans), 1, height=0.8 + 2.1 * len(spans), sharex=True, sharey=True)
    for ax, span in zip(axes, spans, strict=True):
        panel(ax, runs[runs["span"] == span], means[means["span"] == span])
        ax.set(title=span, ylabel="CC (Pearson, no unit)")
    axes[-1].set_xlabel("samples in a window")
    measured = runs[(runs["alpha"] == ALPHA) & (runs["kind"] == "measured")]
    seeds = list(measured.groupby(["span", "samples"])["seed"].nunique()) or 0
    extra = "" if len(runs) else "No run has enough windows."
    note = texts.count_note(seeds, extra, bars="dots: runs, bars: 95 % t interval", scale=results.name)
    return texts.finish(fig, axes, finding(means), note, style.handles(*axes))


def finding(means: pd.DataFrame) -> str:
    """In words: whether CC grew with the samples in a window, where that was measured at ``ALPHA``."""
    rows = means[(means["alpha"] == ALPHA) & (means["kind"] == "measured")].sort_values(["span", "samples"])
    courses = [span["cc_mean"].dropna() for _, span in rows.groupby("span")]
    if any(len(course) > 1 for course in courses) and all(course.is_monotonic_increasing for course in courses):
        return "The more samples in a window, the better sampled and full entropy agree"
    return "Agreement of sampled and full entropy by samples in a window"


def panel(ax: Axes, runs: pd.DataFrame, means: pd.DataFrame) -> None:
    """One span: what was measured at the paper's share of the iterations and at others, and the extrapolation."""
    if runs.empty:
        texts.message(ax, "no run has enough windows")
    measured, extrapolated = (runs[runs["kind"] == kind] for kind in ("measured", "extrapolated"))
    others, usual = measured[measured["alpha"] != ALPHA], measured[measured["alpha"] == ALPHA]
    look: dict[str, Any] = {"color": OTHER, "markerfacecolor": "white", "markersize": 3}
    ax.plot(others["samples"], others["cc"], "s", label="measured, other α", **look)
    ax.plot(usual["samples"], usual["cc"], ".", color=COLOUR, markersize=4, alpha=0.6)
    means = means[means["alpha"] == ALPHA].sort_values("samples")
    solid, dashed = (means[means["kind"] == kind] for kind in ("measured", "extrapolated"))
    error = [solid["cc_mean"] - solid["cc_low"], solid["cc_high"] - solid["cc_mean"]]
    ax.errorbar(solid["samples"], solid["cc_mean"], yerr=error, color=COLOUR, marker="o", label="measured, α = 0.1")
    start = solid[solid["window"] == extrapolated["from_window"].min()]
    samples, values = (
        pd.concat([start[first], dashed[then]]) for first, then in (("samples",) * 2, ("cc_model_mean", "cc_mean"))
    )
    ax.plot(samples, values, "--", color=COLOUR, label="extrapolated, α = 0.1")
    ax.plot(extrapolated["samples"], extrapolated["cc"], ".", color=COLOUR, markersize=2.5, alpha=0.6)
    if dashed["cc_low"].notna().any():
        ax.fill_between(dashed["samples"], dashed["cc_low"], dashed["cc_high"], color=COLOUR, alpha=0.15, linewidth=0)
    dotted: dict[str, Any] = {"color": "#444444", "linewidth": 0.9, "linestyle": ":"}
    ax.axhline(PAPER_CC, label="paper: 0.94 at 100 samples", **dotted)
    ax.axvline(PAPER_SAMPLES, **dotted)
    style.log_x(ax, TICKS)
    ax.set_ylim(top=1.02)
