"""Our values for the claims that are about ranks that move, read from the studies `policies*` of one scale."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.analyse.tables import bf16_ratio
from experiments.common.acting import NOT_TESTED
from experiments.common.equivalence import NOT_DECIDED
from experiments.verdicts.evidence import Measured, Missing, join, read

# Rivals of a policy, as analyse/policies.py calls them.
PLAIN, FIXED, ORDERS = "no compression", "fixed rank", ("placebos", "falling")


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
            f"{one['difference_high']:.4f}), {one['verdict']}"
            for name, one in mine.iterrows()
            if name in (rival, *beside)
        ]
        share = 100 * float(row["bytes_over_rival"])
        sent = f" at {share:.1f} % of the bytes of fp32, {bf16_ratio(share):.1f} % of bf16's" if rival == PLAIN else ""
        notes.append(f"{path.parent.name}, n = {row['n']}, acted in {row['seeds_acted']}: {', '.join(said)}{sent}")
        if row["verdict"] != NOT_TESTED:
            found[relative] = row
    if not notes:
        raise Missing(f"no study of policies has EDGC (cqm) against {rival}")
    decided = {relative: row for relative, row in found.items() if row["verdict"] != NOT_DECIDED}
    if found and not decided:
        raise Missing(join("too few seeds to decide", *notes))
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
