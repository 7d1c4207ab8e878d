"""EDGC beside its own ranks in another order, in every setting that has tables."""

from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from experiments.common.written_tables import kept
from paper_figures import hero, inputs, style, texts
from paper_figures.edgc_course import course
from paper_figures.policies import differences

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
    tables = {study: select(inputs.read(results, study, "comparisons.csv")) for study in drawn}
    counts = [len(rows) for rows in tables.values()]
    height = 1.7 + sum(0.42 + 0.2 * n for n in counts)
    fig, axes = style.figure(len(drawn), 1, height=height, sharex=True, height_ratios=[max(1, n) for n in counts])
    for ax, (study, rows) in zip(axes, tables.items(), strict=True):
        differences(ax, rows, inputs.read(results, study, "pairs.csv"))
        curves = inputs.read(results, study, "curves.csv")
        ax.set(title=f"{STUDIES[study]}: ranks {course(curves[curves['variant'] == 'cqm'])}", xlabel="")
    axes[-1].set_xlabel("validation loss of EDGC\nless that of the rival (nats)")
    style.plain_linear(axes[-1].xaxis)
    texts.letter(axes, from_the_left=True)
    missing = ", ".join(words for study, words in STUDIES.items() if study not in drawn)
    n = [n for rows in tables.values() for n in rows["n"]] or 0
    absent = f"No tables yet: {missing}." if missing else ""
    note = texts.count_note(n, absent, bars="bars: 95 % t interval, dots: seeds", scale=results.name)
    return texts.finish(fig, [], title(tables), note)


def there(results: Path, study: str) -> bool:
    """True where all tables of a setting are under ``results``."""
    return all(kept(results / table) for table in TABLES if table.startswith(f"{study}/"))


def select(comparisons: pd.DataFrame) -> pd.DataFrame:
    """EDGC against ``RIVALS`` in their order, fp32 factors first; int8 where there are seeds enough."""
    rows = comparisons[comparisons["variant"].isin(["cqm", "cqm_int8"]) & comparisons["rival"].isin(RIVALS)]
    rows = rows[(rows["factor_dtype"] == "fp32") | (rows["n"] >= hero.SEEDS)]
    order = rows["rival"].map(RIVALS.index) + len(RIVALS) * (rows["factor_dtype"] != "fp32")
    return rows.assign(order=order).sort_values("order", kind="stable")


def title(tables: dict[str, pd.DataFrame]) -> str:
    """In how many of the settings EDGC beats the fixed rank that sends as many bytes."""
    against = [row for rows in tables.values() if (row := hero.against_fixed_rank(rows)) is not None]
    known = [row for row in against if pd.notna(row["difference_high"])]
    if not known:
        return "EDGC against other ways to send as many bytes"
    won = sum(row["difference_high"] < 0 for row in known)
    return f"EDGC beats {hero.SAME} in {won} of {len(known)} settings"
