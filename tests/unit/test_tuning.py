"""The study of learning rates: the best one, and whether its neighbours show that it is."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from experiments.analyse import tuning

RATES = (0.001, 0.002, 0.004)


def table(losses: dict[tuple[float, int], float | None]) -> pd.DataFrame:
    """Trials of one method; None: diverged."""
    rows = [(rate, seed, "diverged" if loss is None else "ok", loss) for (rate, seed), loss in losses.items()]
    table = pd.DataFrame(rows, columns=["lr", "seed", "status", "validation_loss"]).assign(label="a")
    return table.astype({"validation_loss": float})


@pytest.mark.parametrize(
    ("losses", "rate", "costs"),
    [
        ((4.2, 4.0, 4.5), 0.002, (0.2, 0.5)),
        ((4.0, 4.1, 4.2), 0.001, (math.nan, 0.1)),  # at the end of those tried: not found
        ((4.2, 4.1, 4.0), 0.004, (0.1, math.nan)),
    ],
)
def test_the_best_rate_has_worse_neighbours(losses: tuple[float, ...], rate: float, costs: tuple[float, float]) -> None:
    trials = table({(r, seed): loss + seed for r, loss in zip(RATES, losses, strict=True) for seed in (1, 2)})
    [found] = tuning.best(tuning.rates(trials))
    assert (found["lr"], found["found"], found["n"]) == (rate, rate == 0.002, 2)
    assert found["validation_loss"] == pytest.approx(5.5)
    assert (found["lower_costs_nats"], found["higher_costs_nats"]) == pytest.approx(costs, nan_ok=True)


def test_a_rate_at_which_a_run_diverged_is_never_the_best() -> None:
    losses: dict[tuple[float, int], float | None] = {(rate, seed): 4.0 for rate in RATES for seed in (1, 2)}
    losses |= {(0.002, 1): 3.0, (0.002, 2): None, (0.004, 1): 3.9}
    found = tuning.rates(table(losses))
    assert found["n_ok"].tolist() == [2, 1, 2]
    assert math.isnan(found["validation_loss_mean"][1])
    [chosen] = tuning.best(found)
    assert chosen["lr"] == 0.004


def test_what_a_rate_costs_is_paired_by_seed() -> None:
    losses = {(0.001, 1): 5.1, (0.001, 2): 4.12, (0.002, 1): 5.0, (0.002, 2): 4.0, (0.004, 1): 5.2, (0.004, 2): 4.2}
    found = tuning.rates(table(dict(losses))).set_index("lr")
    assert found["costs_nats"].tolist() == pytest.approx([0.11, 0, 0.2])
    # Half-width t(0.975, 1) * sd / sqrt 2 of 0.10 and 0.12, though the losses of the two seeds lie a nat apart.
    assert found.loc[0.001, "costs_high"] - 0.11 == pytest.approx(12.7062 * 0.01, rel=1e-4)
    assert found.loc[0.004, "costs_low"] == pytest.approx(0.2)
    assert not any(name.startswith("validation_loss_") and name.endswith(("low", "high")) for name in found)


@pytest.mark.parametrize(
    ("losses", "rate", "n"),
    [
        ({(0.001, 1): 4.0, (0.002, 1): 3.9, (0.002, 2): 1.0, (0.004, 1): 3.8}, 0.004, 1),  # only common seeds count
        ({(0.001, 1): 4.0, (0.002, 2): 3.9}, math.nan, 0),  # none in common: a study that has only begun
        ({(rate, 1): None for rate in RATES}, math.nan, 1),  # everything diverged
    ],
)
def test_only_seeds_that_every_rate_has_count(
    losses: dict[tuple[float, int], float | None], rate: float, n: int
) -> None:
    found = tuning.rates(table(losses))
    assert set(found["n"]) == {n} and found["lr"].tolist() == sorted({key[0] for key in losses})
    [chosen] = tuning.best(found)
    assert chosen["lr"] == pytest.approx(rate, nan_ok=True) and not chosen["found"]
