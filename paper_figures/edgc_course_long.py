"""Entropy and rank over the longest runs."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import edgc_course

TABLES = ("policies_long/curves.csv", "policies_long/table.csv")
CAPTION = """\
**Entropy and the rank that follows it, over eight million tokens.** Above: mean of the sampled entropies over the last
window (nats), per stage. Below: the rank in use; grey: no rank is in use yet; thin grey lines: r_max and r_min. The
paper says that the entropy of gradients falls through training; CQM then lowers the rank. The paper's own courses are
described here, not drawn: this project has no numbers of them."""


def draw(results: Path) -> Figure:
    """Two panels per variant, as in ``edgc_course``."""
    return edgc_course.draw(results, "policies_long")
