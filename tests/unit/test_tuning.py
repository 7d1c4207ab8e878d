"""The study of learning rates: the best one, and whether its neighbours show that it is."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd
import pytest

from experiments.analyse import tuning
from experiments.analyse.__main__ import analyse
from tests.unit.synthetic_runs import write_tuning

RATES = (0.001, 0.002, 0.004)


def table(losses: dict[tuple[float, int], float | None]) -> pd.DataFrame:
    """Trials of one method; None: diverged."""
    rows = [
        {
            "label": "a",
            "lr": rate,
            "seed": seed,
            "status": "diverged" if loss is None else "ok",
            "validation_loss": loss,
        }
        for (rate, seed), loss in losses.items()
    ]
    return pd.DataFrame(rows).astype({"validation_loss": float})


def test_the_best_rate_has_worse_neighbours() -> None:
    trials = table(
        {(rate, seed): loss + seed for rate, loss in zip(RATES, (4.2, 4.0, 4.5), strict=True) for seed in (1, 2)}
    )
    [found] = tuning.best(tuning.rates(trials))
    assert found["lr"] == 0.002 and found["found"] and found["n"] == 2
    assert found["validation_loss"] == pytest.approx(5.5)
    assert (found["lower_costs_nats"], found["higher_costs_nats"]) == pytest.approx((0.2, 0.5))


@pytest.mark.parametrize(("losses", "rate"), [((4.0, 4.1, 4.2), 0.001), ((4.2, 4.1, 4.0), 0.004)])
def test_a_rate_at_the_end_of_those_tried_is_not_found(losses: tuple[float, ...], rate: float) -> None:
    [found] = tuning.best(tuning.rates(table({(r, 1): loss for r, loss in zip(RATES, losses, strict=True)})))
    assert found["lr"] == rate and not found["found"]


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


def test_only_seeds_that_every_rate_has_count() -> None:
    losses = {(0.001, 1): 4.0, (0.002, 1): 3.9, (0.002, 2): 1.0, (0.004, 1): 3.8}
    [found] = tuning.best(tuning.rates(table(dict(losses))))
    assert found["lr"] == 0.004 and found["n"] == 1


def test_rates_without_a_common_seed_are_listed_and_none_is_found() -> None:
    """A study that has only begun."""
    found = tuning.rates(table({(0.001, 1): 4.0, (0.002, 2): 3.9}))
    assert found["lr"].tolist() == [0.001, 0.002] and found["n"].tolist() == [0, 0]
    [chosen] = tuning.best(found)
    assert math.isnan(chosen["lr"]) and not chosen["found"]


def test_nothing_is_found_where_everything_diverged() -> None:
    [found] = tuning.best(tuning.rates(table({(rate, 1): None for rate in RATES})))
    assert math.isnan(found["lr"]) and not found["found"]


def test_tables_of_runs(tmp_path: Path) -> None:
    written = analyse("tuning", write_tuning(tmp_path) / "tuning")
    assert [path.name for path in written] == [*tuning.RESULTS, *tuning.DETAILS]
    rates, best = (pd.read_csv(tmp_path / "tuning" / name) for name in ("rates.csv", "best.csv"))
    assert rates["n_ok"].tolist() == [2, 2, 1]
    assert best["lr"].tolist() == [0.002] and best["validation_loss"][0] == pytest.approx(5.015)
