"""EDGC beside its own ranks in another order, in every setting that has tables."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.common.written_tables import kept
from paper_figures import inputs, style, texts
from paper_figures.edgc_course import course
from paper_figures.hero import SAME, SEEDS
from paper_figures.policies import differences, seeds

STUDIES = {
    "policies": "GPT, one stage",
    "policies_late": "warm-up 20 %, rate doubled",
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
# A setting is drawn where its tables are; the target of this figure makes those of all.
OPTIONAL = ("policies_late", "policies_two_stages", "policies_four_replicas", "policies_bert")
CAPTION = """\
**The same question in every setting.** A panel a setting that has tables; those that have none yet are named below the
figure. Validation loss of EDGC less that of each rival, paired by seed (nats; left of zero EDGC is better); bars are
95 % t intervals, small dots seeds. *Placebos*: the mean of EDGC's own ranks reversed and shuffled; *falling*:
the same ranks sorted. Within the margin: the 90 % interval, narrower than the bars, lies in
the shaded band. Cannot tell: the rival costs less than twice the margin against no compression. Open markers
are int8 factors, shown where there are at least five seeds."""
RIVALS = ("no compression", "fixed rank", "placebos", "falling")


def draw(results: Path) -> Figure:
    """A panel a setting: differences from every rival, with the number of seeds."""
    drawn = [study for study in STUDIES if study == "policies" or there(results, study)]
    found = {study: chosen(inputs.read(results, study, "comparisons.csv")) for study in drawn}
    rows = [len(one) for one in found.values()]
    fig, axes = style.figure(len(drawn), 1, height=1.7 + sum(0.42 + 0.2 * n for n in rows), sharex=True,
                             height_ratios=[max(1, n) for n in rows])  # fmt: skip
    for ax, (study, mine) in zip(axes, found.items(), strict=True):
        differences(ax, mine, inputs.read(results, study, "pairs.csv"))
        seeds(ax, mine)
        ax.set_title(f"{STUDIES[study]}: ranks {ranks(inputs.read(results, study, 'curves.csv'))}")
        ax.set_xlabel("")
    axes[-1].set_xlabel("validation loss of EDGC\nless that of the rival (nats)")
    style.plain_linear(axes[-1].xaxis)
    texts.letter(axes, from_the_left=True)
    texts.headline(fig, title(found))
    missing = [words for study, words in STUDIES.items() if study not in drawn]
    texts.annotate(
        fig,
        [n for mine in found.values() for n in mine["n"]] or 0,
        bars="bars: 95 % t interval, dots: seeds",
        scale=results.name,
        extra=f"No tables yet: {', '.join(missing)}." if missing else "",
    )
    return fig


def there(results: Path, study: str) -> bool:
    """Whether all tables of a setting are under ``results``."""
    return all(kept(results / table) for table in TABLES if table.startswith(f"{study}/"))


def chosen(found: pd.DataFrame) -> pd.DataFrame:
    """EDGC against ``RIVALS`` in their order, fp32 factors first; int8 where there are seeds enough."""
    mine = found[found["variant"].isin(["cqm", "cqm_int8"]) & found["rival"].isin(RIVALS)]
    mine = mine[(mine["factor_dtype"] == "fp32") | (mine["n"] >= SEEDS)]
    order = mine["rival"].map(RIVALS.index) + len(RIVALS) * (mine["factor_dtype"] != "fp32")
    return mine.assign(order=order).sort_values("order", kind="stable")


def ranks(curves: pd.DataFrame) -> str:
    """In words: the ranks that EDGC used, all stages and seeds."""
    stages = sorted(int(name.removeprefix("rank_")) for name in curves if name.startswith("rank_"))
    return course(curves[curves["variant"] == "cqm"], stages)


def title(found: dict[str, pd.DataFrame]) -> str:
    """In how many of the settings EDGC beats the fixed rank that sends as many bytes."""
    against = [mine[(mine["rival"] == "fixed rank") & (mine["factor_dtype"] == "fp32")] for mine in found.values()]
    known = [one.iloc[0] for one in against if one["difference_high"].notna().any()]
    if not known:
        return "EDGC against other ways to send as many bytes"
    won = sum(row["difference_high"] < 0 for row in known)
    return f"EDGC beats {SAME} in {won} of {len(known)} settings"
