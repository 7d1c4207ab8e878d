"""EDGC beside its own ranks in another order, in every setting."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import style
from paper_figures.policies import differences, ranks

STUDIES = {
    "policies": "GPT, one stage",
    "policies_late": "warm-up of 20 %",
    "policies_two_stages": "two stages",
    "policies_four_replicas": "four replicas",
    "policies_bert": "BERT",
}
TABLES = (
    "policies/comparisons.csv",
    "policies/pairs.csv",
    "policies/curves.csv",
    "policies_late/comparisons.csv",
    "policies_late/pairs.csv",
    "policies_late/curves.csv",
    "policies_two_stages/comparisons.csv",
    "policies_two_stages/pairs.csv",
    "policies_two_stages/curves.csv",
    "policies_four_replicas/comparisons.csv",
    "policies_four_replicas/pairs.csv",
    "policies_four_replicas/curves.csv",
    "policies_bert/comparisons.csv",
    "policies_bert/pairs.csv",
    "policies_bert/curves.csv",
)
CAPTION = """\
**The same question in every setting.** Left: ranks of stage 0, EDGC's of every seed and, for the first one, those of
the runs that send its bytes in another order. Right: validation loss of EDGC less that of each rival, paired by seed
(nats; left of zero EDGC is better); filled markers are fp32 factors, open ones int8, and the shaded band is the margin
within which two one-sided tests call both on par."""


def draw(results: Path) -> Figure:
    """A row a setting: ranks, and differences from every rival."""
    fig, axes = style.figure(len(STUDIES), 2, width=style.TEXT, height=2.6 * len(STUDIES), width_ratios=[4, 5])
    counts = []
    for place, (study, title) in enumerate(STUDIES.items()):
        left, right = axes[2 * place : 2 * place + 2]
        found, pairs = (style.read(results, study, f"{name}.csv") for name in ("comparisons", "pairs"))
        mine = found[found["variant"].isin(["cqm", "cqm_int8"]) & (found["rival"] != "no compression")]
        ranks(left, style.read(results, study, "curves.csv"))
        differences(right, mine, pairs)
        left.set(title=f"{title}: rank of stage 0")
        counts += list(mine["n"])
    style.letter(axes)
    drawn, labels = style.handles(axes[0])
    fig.legend(drawn, labels, loc="outside upper center", ncols=5, columnspacing=1.0)
    style.annotate(fig, counts, bars="bars: 95 % t interval of the mean, dots: seeds", scale=results.name)
    return fig
