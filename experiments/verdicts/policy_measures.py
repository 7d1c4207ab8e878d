"""Our value for the claim that ranks have to follow the entropy, read from the studies `policies*` of one scale."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import NOT_DECIDED
from experiments.verdicts.evidence import Measured, Missing, join, read

FIXED = "fixed rank"  # rivals of a policy at its bytes, as analyse/policies.py calls them
ORDERS = ("placebos", "falling")


def entropy_beats_fixed_rank(root: Path) -> Measured:
    """EDGC (cqm) against one fixed rank of exactly its bytes: a verdict for every setting in which the policy acted.

    ``better`` alone says that following the entropy bought anything; beside it stand the same ranks in other orders.
    """
    found: dict[str, pd.Series] = {}  # the comparison with the fixed rank, by the table that it stands in
    notes: list[str] = []
    for path in sorted(root.glob("policies*/comparisons.csv")):
        relative = path.relative_to(root).as_posix()
        table = read(root, relative)
        mine = table[(table["variant"] == "cqm") & (table["n"] > 0)].set_index("rival")
        if FIXED not in mine.index:
            continue
        said = [
            f"against {rival} {row['difference_nats']:+.4f} nats ({row['difference_low']:.4f} to "
            f"{row['difference_high']:.4f}), {row['verdict']}"
            for rival, row in mine.iterrows()
            if rival in (FIXED, *ORDERS)
        ]
        notes.append(f"{path.parent.name}, n = {mine.loc[FIXED, 'n']}: {', '.join(said)}")
        if mine.loc[FIXED, "verdict"] != NOT_TESTED:
            found[relative] = mine.loc[FIXED]
    if not notes:
        raise Missing("no study of policies has EDGC (cqm) beside a fixed rank of its bytes")
    decided = {relative: row for relative, row in found.items() if row["verdict"] != NOT_DECIDED}
    if found and not decided:
        raise Missing(join("too few seeds to decide", *notes))
    if not decided:
        return Measured((NOT_TESTED,), "policies/comparisons.csv", join(*notes), acted=False)
    relative, most = max(decided.items(), key=lambda item: item[1]["difference_nats"])
    gap = (most["difference_nats"], most["difference_low"], most["difference_high"])
    words = tuple(str(row["verdict"]) for row in decided.values())
    seeds = min(int(row["n"]) for row in decided.values())
    return Measured(words, relative, join(*notes), acted=True, n=seeds, gap=gap)
