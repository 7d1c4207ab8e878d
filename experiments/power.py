"""Number of seeds that a study needs: ``python -m experiments.power --study policies --effect 0.005``.

From the kept runs of a study (``results/reference``) it takes, for every two variants, how much their difference in
validation loss varies over seeds, and says how many seeds would show with 80 % probability that they differ by
``--effect`` nats if they do, or that they are equal within it if they are.
"""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer

from edgc.errors import UserError
from experiments.common import written_tables
from experiments.common.cli import main_guard
from experiments.common.equivalence import MOST, power_of_difference, power_of_equality, seeds_needed
from experiments.spec import matrix

LEAST_SEEDS = 3  # of a pair, to know a deviation


def pairs(table: pd.DataFrame, effect: float, base: str | None = None) -> pd.DataFrame:
    """Per two variants the deviation of their paired difference, and the seeds needed to resolve ``effect`` nats.

    Args:
        table: a study's ``table.csv``.
        base: only pairs with this variant.
    """
    losses = table[table["status"] == "ok"].pivot_table(
        index="seed", columns="variant", values="validation_loss", sort=False
    )
    rows: list[dict[str, Any]] = []
    for variant, other in itertools.combinations(losses.columns, 2):
        if base is not None and base not in (variant, other):
            continue
        differences = (losses[other] - losses[variant]).dropna()
        if len(differences) >= LEAST_SEEDS:
            sd = float(differences.std())
            rows.append(
                {"variant": other, "against": variant, "seeds": len(differences), "difference_nats": differences.mean()}
                | {"sd_nats": sd, "seeds_to_see_difference": seeds_needed(power_of_difference, sd, effect)}
                | {"seeds_to_show_equality": seeds_needed(power_of_equality, sd, effect)}
            )
    return pd.DataFrame(rows)


@main_guard
def main(
    study: Annotated[str, typer.Option(help="name of a file in experiments/studies")],
    effect: Annotated[float, typer.Option(help="nats of validation loss to be resolved", min=1e-9)] = 0.005,
    scale: Annotated[str, typer.Option(help="name of a file in experiments/scales")] = "workstation",
    against: Annotated[str, typer.Option(help="only pairs with this variant")] = "",
    results: Annotated[Path, typer.Option(help="results folder")] = Path("results/reference"),
) -> None:
    """Say how many seeds resolve a difference between the variants of a study."""
    matrix.load_study(study)
    path = results / scale / study / "table.csv"
    if not path.is_file():
        raise UserError("there is no table of kept runs", where=path, fix=f"run the study: snakemake -c2 {study}")
    table = pairs(written_tables.read(path), effect, against or None)
    if table.empty:
        fix = "train more seeds, or name another variant"
        raise UserError(f"no two variants have {LEAST_SEEDS} seeds in common", where=path, fix=fix)
    for column in ("seeds_to_see_difference", "seeds_to_show_equality"):
        table[column] = [f"{number:.0f}" if math.isfinite(number) else f"> {MOST}" for number in table[column]]
    print(f"{study}, {scale}: seeds for 80 % power at {effect:g} nats")
    print(table.to_string(index=False, float_format="{:+.4f}".format))


if __name__ == "__main__":
    typer.run(main)
