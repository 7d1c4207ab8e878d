"""The sampling study's grid: what the probe records of noise of known entropy, and what is made of it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from experiments.analyse import sampling_ablation
from experiments.analyse.runs import Run
from experiments.spec.settings import ProbeConfig
from experiments.training.probes import SamplingProbe

ITERATIONS, WINDOW = 120, 10
SHAPES = {"a": (64, 48), "b": (32, 64)}
RATES = (0.25, 0.05)
SETTINGS = EDGCConfig(method="edgc", window=WINDOW, r_max=16, r_min=4, stability_tolerance=10.0, warmup_fraction=0.1)


def log_sigma(iteration: int) -> float:
    """A slow rise and fall, enough for CQM to move."""
    return -5.0 + 0.6 * math.sin(2 * math.pi * iteration / ITERATIONS)


@pytest.fixture(scope="module")
def probe() -> SamplingProbe:
    """Normal entries whose sigma is known, a vector that is not described, and a skipped iteration."""
    config = ProbeConfig(every=1, entry_rates=RATES)
    made = SamplingProbe(config, EDGCConfig(min_compression_elements=64), 0, reports=True)
    for iteration in range(1, ITERATIONS + 1):
        generator = torch.Generator().manual_seed(iteration)
        sigma = math.exp(log_sigma(iteration))
        gradients = [Gradient(n, sigma * torch.randn(shape, generator=generator)) for n, shape in SHAPES.items()]
        made.observe(iteration, [*gradients, Gradient("bias", torch.ones(500))])
        made.end_iteration(iteration, skipped=False)
    made.observe(ITERATIONS + 1, [Gradient("a", torch.full((64, 48), math.nan))])
    made.end_iteration(ITERATIONS + 1, skipped=True)
    return made


@pytest.fixture(scope="module")
def run(probe: SamplingProbe) -> Run:
    config: dict[str, Any] = {"variant": "grid", "seed": 1, "train": {"iterations": ITERATIONS}}
    made = Run(Path("grid-s1"), "ok", config)
    made.__dict__["samplings"] = pd.DataFrame(probe.rows)
    made.__dict__["steps"] = pd.DataFrame({"seconds": [0.1] * ITERATIONS})
    return made


def test_every_rule_reads_every_matrix_at_every_iteration(probe: SamplingProbe) -> None:
    table = pd.DataFrame(probe.rows)
    rules = 1 + 2 * (1 + 3 * len(RATES))  # the squares; per estimator all entries, and three rules at each rate
    assert len(table) == ITERATIONS * len(SHAPES) * rules
    assert set(table["parameter"]) == set(SHAPES)
    assert (table["seconds"] >= 0).all()
    whole = table[table["rule"] == "all"].pivot(index=["iteration", "parameter"], columns="estimator", values="entropy")
    # Zero mean: the mean square is the variance.
    assert (whole["square_sum"] - whole["gaussian"]).abs().max() < 0.01
    again = SamplingProbe(probe.config, probe.edgc, 0, reports=True)
    again.load_state_dict(probe.state_dict())
    assert again.rows == probe.rows


def test_error_of_a_sample_is_the_formulas(run: Run) -> None:
    found = pd.DataFrame(sampling_ablation.sampling_error(run)).set_index(["rule", "rate", "estimator"])
    for rule in ("diagonal", "strided", "random"):
        for rate in RATES:
            row = found.loc[(rule, rate, "gaussian")]
            n = 64 * 48  # sd of log sigma from k of n normal entries: sqrt((1 - k/n) / 2k)
            expected = math.sqrt((1 - rate) / (2 * rate * n))
            assert row["formula_nats"] == pytest.approx(expected, rel=0.15)
            assert row["measured_over_formula_median"] == pytest.approx(1, abs=0.2)
            assert abs(row["bias_nats"]) < 0.02
    assert (
        found.loc[("diagonal", 0.05, "gaussian"), "measured_nats"]
        > found.loc[("diagonal", 0.25, "gaussian"), "measured_nats"]
    )


def test_fidelity_counts_ranks_unlike_those_of_all_entries(run: Run) -> None:
    found = pd.DataFrame(sampling_ablation.grid(run, SETTINGS))
    keyed = found.set_index(["rule", "beta", "estimator", "alpha"])
    full = keyed.loc[("all", 1.0, "histogram", 1.0)]
    assert (full["cc"], full["rmse_nats"], full["ranks_differing"]) == (pytest.approx(1), 0, 0)
    assert full["ranks_compared"] == full["windows"] == ITERATIONS // WINDOW
    rare = keyed.loc[("diagonal", 0.05, "gaussian", 0.1)]
    assert 0 < rare["rmse_nats"] < 0.3
    assert 0.5 < rare["cc"] < 1
    assert (found["ranks_differing"] <= found["ranks_compared"]).all()
    assert keyed["ranks_differing"].max() > 0, "or the test shows nothing"
    assert "square_sum" not in set(found["estimator"])
    entropies = pd.Series({i: log_sigma(i) for i in range(1, 4 * WINDOW + 1)})
    means = sampling_ablation.window_means(entropies, WINDOW, 6 * WINDOW)
    assert [math.isnan(mean) for mean in means] == [False] * 4 + [True] * 2
    decided = sampling_ablation.decided_ranks(SETTINGS, list(SHAPES.values()), 6 * WINDOW, means)
    assert decided[-1] == decided[-2] == decided[3], "a window without a measurement leaves the rank"


def test_correlation_by_rule_starts_where_a_controller_ends_warm_up(run: Run) -> None:
    found = pd.DataFrame(sampling_ablation.correlations(run, SETTINGS))
    assert set(found["estimator"]) == {"histogram"}
    assert set(zip(found["rule"], found["rate"], strict=True)) == {
        ("all", 1.0), *((rule, rate) for rule in ("diagonal", "strided", "random") for rate in RATES)
    }  # fmt: skip
    measured = found[found["kind"] == "measured"]
    # A tenth of the run ends inside the second window of 10, so warm-up ends with it: 100 iterations are left.
    assert measured[measured["window"] == 10]["windows"].unique().tolist() == [10]
    assert set(found["alpha"]) == {0.1}
    cc = measured[measured["window"] == 10].set_index(["rule", "rate"])["cc"]
    assert cc["diagonal", 0.05] <= cc["all", 1.0]


def test_cost_is_relative_to_the_histogram_of_all_entries(run: Run) -> None:
    found = pd.DataFrame(sampling_ablation.grid_timings(run)).set_index(["rule", "rate", "estimator"])
    assert found.loc[("all", 1.0, "histogram"), "of_histogram"] == 1
    assert (found["of_step"] * 0.1).to_numpy() == pytest.approx(found["seconds"].to_numpy())
