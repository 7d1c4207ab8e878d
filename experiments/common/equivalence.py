"""Two one-sided t tests: that a difference is smaller than a margin, which no test of "no difference" can show.

The margins stand in ``equivalence.yaml`` beside this file, and nowhere else.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from experiments.common.yaml_settings import Settings, load_yaml, validate

PATH = Path(__file__).with_name("equivalence.yaml")
BETTER, WORSE, ON_PAR, NOT_DECIDED = "better", "worse", "on par", "not decided"
BETTER_WITHIN, WORSE_WITHIN = f"{BETTER} within the margin", f"{WORSE} within the margin"
EQUAL = (ON_PAR, BETTER_WITHIN, WORSE_WITHIN)  # shown to be less than the margin, the last two with a direction
CANNOT_TELL = "cannot tell"  # of two compressed runs, where the other costs too little for anything to be won
LEAST_SEEDS = 3  # of a verdict of equality
Scale = Literal["difference", "log_ratio"]


class Margin(Settings):
    """Largest gap of one metric that counts as none, on the scale on which it is measured."""

    margin: float = Field(gt=0)
    scale: Scale


class Equivalence(Settings):
    """The file ``equivalence.yaml``."""

    significance: float = Field(gt=0, lt=0.5)
    margins: dict[str, Margin]


def load_equivalence(path: Path = PATH) -> Equivalence:
    """The stated margins; ``UserError`` names the key at fault."""
    margins: Equivalence = validate(Equivalence, load_yaml(path), path)
    return margins


def loss_margin() -> float:
    """Of the validation loss, in nats."""
    return load_equivalence().margins["validation_loss"].margin


def equivalence_p(centre: float, error: float, margin: float, freedom: float) -> float:
    """The larger p value of two one-sided t tests: of a gap at most -margin, and of one at least margin.

    Below a level a, the 1 - 2a t interval of the gap lies inside the margin (Schuirmann, 1987).
    """
    from scipy import stats

    if error == 0:
        return 0.0 if abs(centre) < margin else 1.0
    return float(stats.t.sf((margin - abs(centre)) / error, freedom))
