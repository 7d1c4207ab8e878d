"""Two one-sided tests on paired differences, and how many seeds they need."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from experiments import power
from experiments.common import equivalence

VALUES = st.lists(st.floats(-0.02, 0.02), min_size=2, max_size=8)


@settings(deadline=None)
@given(VALUES)
def test_equality_is_a_90_percent_interval_inside_the_margin(values: list[float]) -> None:
    sd, n = float(np.std(values, ddof=1)), len(values)
    half = stats.t.ppf(0.95, n - 1) * sd / math.sqrt(n)
    inside = np.mean(values) - half > -0.005 and np.mean(values) + half < 0.005
    p = equivalence.two_one_sided(values, 0.005)
    assert equivalence.two_one_sided([-value for value in values], 0.005) == pytest.approx(p)
    if abs(p - equivalence.ALPHA) > 1e-9:
        assert (p < equivalence.ALPHA) == inside


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.0001, -0.0002, 0.0], "on par"),
        ([0.0011, 0.0010, 0.0012], "worse within the margin"),
        ([-0.0011, -0.0010, -0.0012], "better within the margin"),
        ([0.0001, 0.0002], "not decided"),  # two seeds show no equality
        ([0.002] * 9 + [0.06], "worse"),  # ten of ten, where the interval holds zero
        ([0.002] * 5, "worse within the margin"),
        ([0.002] * 4 + [0.06], "not decided"),  # five of five are too few
        ([0.020, 0.021, 0.022], "worse"),
        ([-0.020, -0.021, -0.022], "better"),
        ([-0.02, 0.02, 0.0], "not decided"),
        ([0.001], "not decided"),
        ([], "not decided"),
    ],
)
def test_verdicts(differences: list[float], verdict: str) -> None:
    found = equivalence.compare(differences, 0.005)
    assert found["verdict"] == verdict
    assert verdict.startswith(found["direction"]) or verdict == "not decided"
    assert found["seeds_worse"] == sum(value > 0 for value in differences)


def test_a_difference_far_above_its_deviation_is_seen_for_certain() -> None:
    found = [equivalence.power_of_difference(sd, 0.0025, 3) for sd in np.linspace(0.0002, 0.0006, 100)]
    assert np.all(np.diff(found) <= 1e-9) and found[-1] > 0.9, "nothing is missing"


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_smallest_difference_seen_is_seen_four_times_of_five(seeds: int) -> None:
    effect = equivalence.smallest_seen(0.004, seeds)
    drawn = np.random.default_rng(seeds).normal(effect, 0.004, (20000, seeds))
    assert np.mean(stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.01)


def test_the_interval_of_a_deviation_holds_the_true_one_in_95_of_100_samples() -> None:
    random = np.random.default_rng(0)
    held = [low < 0.003 < high for low, high in map(equivalence.sd_interval, random.normal(0.1, 0.003, (1500, 6)))]
    assert np.mean(held) == pytest.approx(0.95, abs=0.015)
    assert all(map(math.isnan, equivalence.sd_interval([0.1, math.nan])))


@settings(deadline=None)
@given(VALUES, st.floats(-0.01, 0.03))
def test_where_nothing_is_to_be_won_only_a_difference_beyond_the_margin_is_told(
    values: list[float], gap: float
) -> None:
    found = equivalence.compare(values, 0.005)
    beyond = found["difference_low"] > 0.005 or found["difference_high"] < -0.005
    assert equivalence.worth(found, gap, 0.005) == (found["verdict"] if beyond or gap >= 0.01 else "cannot tell")
    assert equivalence.worth(found, math.nan, 0.005) == found["verdict"], "no compression was not run"


@pytest.mark.parametrize(("sd", "seeds"), [(0.002, 3), (0.004, 5), (0.004, 10), (0.01, 10)])
def test_power_is_that_of_simulated_studies(sd: float, seeds: int) -> None:
    rng = np.random.default_rng(1)
    drawn = rng.normal(0, sd, (4000, seeds))
    errors = drawn.std(axis=1, ddof=1) / math.sqrt(seeds)
    room = 0.005 - stats.t.ppf(0.95, seeds - 1) * errors
    equal = np.mean(np.abs(drawn.mean(axis=1)) < room)
    assert equivalence.power_of_equality(sd, 0.005, seeds) == pytest.approx(equal, abs=0.03)
    shifted = stats.ttest_1samp(drawn + 0.005, 0, axis=1).pvalue
    assert equivalence.power_of_difference(sd, 0.005, seeds) == pytest.approx(np.mean(shifted < 0.05), abs=0.03)


def test_the_fewest_seeds_reach_the_power_and_one_less_does_not() -> None:
    for power_of in (equivalence.power_of_equality, equivalence.power_of_difference):
        needed = int(equivalence.seeds_needed(power_of, 0.004, 0.005))
        assert power_of(0.004, 0.005, needed) >= equivalence.POWER > power_of(0.004, 0.005, needed - 1)
        assert equivalence.seeds_needed(power_of, 1.0, 0.005) == math.inf
        assert equivalence.seeds_needed(power_of, 0.0, 0.005) == 3


def table() -> pd.DataFrame:
    rng = np.random.default_rng(2)
    rows = []
    for seed in range(1, 5):
        common = rng.normal(0, 0.1)  # seeds differ far more than variants of one seed
        for variant, gap in (("none", 0.0), ("a", 0.01), ("b", 0.02)):
            loss = 4 + common + gap + rng.normal(0, 0.001)
            rows.append({"variant": variant, "seed": seed, "status": "ok", "validation_loss": loss})
    rows.append({"variant": "c", "seed": 1, "status": "ok", "validation_loss": 4.0})
    return pd.DataFrame(rows)


def test_pairs_are_of_equal_seeds() -> None:
    found = power.pairs(table(), 0.005)
    assert [*zip(found["variant"], found["against"], strict=True)] == [("a", "none"), ("b", "none"), ("b", "a")]
    assert found["sd_nats"].max() < 0.005, "what seeds have in common is gone"
    assert found["difference_nats"].tolist() == pytest.approx([0.01, 0.02, 0.01], abs=0.003)
    assert found["seeds_to_show_equality"].max() < 10
    assert len(power.pairs(table(), 0.005, "a")) == 2


def test_the_program_reads_kept_runs_and_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "ci" / "policies"
    folder.mkdir(parents=True)
    table().to_csv(folder / "table.csv", index=False)
    power.main("policies", 0.005, "ci", "", tmp_path)
    output = capsys.readouterr().out
    assert "seeds for 80 % power" in output and len(output.splitlines()) == 2 + 3
    for study, against, line in (
        ("policy", "", "did you mean policies"), ("methods", "", "no table of kept"), ("policies", "c", "in common")
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            power.main(study, 0.005, "ci", against, tmp_path)
        assert stop.value.code == 2 and line in " ".join(capsys.readouterr().err.split())
