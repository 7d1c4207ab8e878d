"""CC by the number of samples in a window: simulated courses of known noise give what theory says."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from experiments.analyse import correlation
from tests.unit.invented_runs import edgc, run, steps

COURSE, NOISE, ENTRIES = 0.06, 0.06, 0.03  # nats: of the levels between windows, of an iteration, of a sample's entries
BLOCK = 20  # iterations that share a level


def theory(window: int, alpha: float, course: float = COURSE, entries: float = 0.0) -> float:
    """CC of a window inside one level: F = level + noise, the samples have that of their own iterations."""
    samples = window * alpha
    full = course**2 + NOISE**2 / window
    error = NOISE**2 * (1 / samples - 1 / window) + entries**2 / samples
    return math.sqrt(full / (full + error))


def simulated(
    rng: np.random.Generator, count: int, block: int = BLOCK, course: float = COURSE, entries: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Full and sampled entropy of ``count`` blocks of independent levels with independent noise."""
    full = np.repeat(rng.normal(0, course, count), block) + rng.normal(0, NOISE, count * block)
    return full, full + rng.normal(0, entries, full.size)


def by(rows: list[dict[str, object]], **wanted: object) -> float:
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return float(found["cc"])  # type: ignore[arg-type]


def base(windows: int, spread: float, error: float) -> dict[str, float]:
    """The row of measured windows of one level each, of variances in nats squared."""
    about = {"window": BLOCK, "from_window": BLOCK, "alpha": 0.1, "samples": 2, "windows": windows}
    return about | {"spread_nats": math.sqrt(spread), "error_nats": math.sqrt(error)}


@pytest.mark.parametrize("entries", [0.0, ENTRIES])
def test_measured_is_what_theory_says_of_whole_windows(entries: float) -> None:
    rows = correlation.cells(*simulated(np.random.default_rng(1), 4000, entries=entries))
    for alpha in correlation.ALPHAS:
        found = by(rows, window=BLOCK, alpha=alpha, kind="measured")
        assert found == pytest.approx(theory(BLOCK, alpha, entries=entries), abs=0.008)
    rows = correlation.cells(*simulated(np.random.default_rng(5), 10))  # 200 iterations
    measured = [row for row in rows if row["kind"] == "measured"]
    assert {row["window"] for row in measured} == {10, 20}, "50 gives four windows"
    assert not any(row["window"] == 10 and row["alpha"] in (0.25, 0.05) for row in measured), "2.5 samples, and a half"
    far = [row for row in rows if row["kind"] == "extrapolated"]
    assert [row["samples"] for row in far] == [5, 10, 20, 50, 100, 200, 500]
    assert {(row["from_window"], row["windows"]) for row in far} == {(20, 10)}


def test_extrapolated_is_what_long_windows_measure() -> None:
    rng = np.random.default_rng(2)
    full, sampled = simulated(rng, 4000, entries=ENTRIES)
    _, spread, error = correlation.measure(full, sampled, BLOCK, 10)
    row = correlation.extrapolate(base(4000, spread, error), 100)
    assert (row["window"], row["kind"], row["from_window"]) == (1000, "extrapolated", BLOCK)
    long = simulated(rng, 1500, block=1000, entries=ENTRIES)
    measured, *_ = correlation.measure(*long, 1000, 10)
    assert row["cc"] == pytest.approx(measured, abs=0.001)
    assert 1 - row["cc"] == pytest.approx(1 - theory(1000, 0.1, entries=ENTRIES), rel=0.1)
    # Without the correction for the noise in the full means the extrapolation is too good.
    assert 1 - row["cc"] > 1 - math.sqrt(spread / (spread + error * 2 / 100))
    # Without a course only a tenth of what is averaged is common, however long the window.
    _, spread, error = correlation.measure(*simulated(np.random.default_rng(3), 4000, course=0.0), BLOCK, 10)
    for spread_seen in (spread, 0.0):  # the second: chance left less than the noise alone
        found = correlation.extrapolate(base(4000, spread_seen, error), 100)["cc"]
        assert found == pytest.approx(math.sqrt(0.1), abs=0.08)


@pytest.mark.parametrize("kind", ["measured", "extrapolated"])
def test_interval_over_three_seeds_covers(kind: str) -> None:
    assert correlation.combined([0.9, math.nan])["n"] == 1 and correlation.combined([1.0, 1.0])["mean"] > 0.999
    rng, trials, hits, blocks = np.random.default_rng(4), 200, 0, 40
    wanted = {"window": 1000 if kind == "extrapolated" else BLOCK, "alpha": 0.1, "kind": kind}
    truth = theory(int(wanted["window"]), 0.1)  # type: ignore[call-overload]
    for _ in range(trials):
        seeds = []
        for _ in range(3):
            cc, *found = correlation.measure(*simulated(rng, blocks), BLOCK, 10)
            seeds.append(cc if kind == "measured" else correlation.extrapolate(base(blocks, *found), 100)["cc"])
        over = correlation.combined(seeds)
        assert over["n"] == 3
        assert over["low"] < over["mean"] < over["high"]
        hits += over["low"] <= truth <= over["high"]
    assert 0.91 <= hits / trials <= 0.99


def test_one_run_per_seed_that_sampled_the_most_and_intervals_over_seeds() -> None:
    rng, runs = np.random.default_rng(6), []
    for seed in (1, 2, 3):
        events = steps(*simulated(rng, 10, entries=ENTRIES))
        for event in events["step"][:20]:
            event["stages"][0]["rank"] = None
        for name, rate in (("first", 0.1), ("second", 0.1), ("every", 1.0)):
            settings = edgc(20) | {"entropy": {"iteration_rate": rate, "entry_rate": 0.25}}
            runs.append(run(name, seed, compression=settings, events=events))
    table = correlation.table(runs)
    assert sorted(set(zip(table["variant"], table["seed"], strict=True))) == [("every", seed) for seed in (1, 2, 3)]
    rare = correlation.table(run for run in runs if run.variant != "every")
    assert set(rare["variant"]) == {"first"}
    assert set(table["beta"]) == {0.25} and set(rare["beta"]) == {1.0}, "full entropies stood for what was not sampled"
    after = table[(table["span"] == "after warm-up") & (table["window"] == 10)]
    assert set(after["windows"]) == {18}, "20 of 200 iterations were warm-up"
    assert correlation.table([]).columns.tolist() == table.columns.tolist()
    row = correlation.summary(table).iloc[0]
    z = np.arctanh(table[(table[correlation.CELL] == row[correlation.CELL]).all(axis=1)]["cc"])
    assert row["n"] == len(z) == 3
    low, high = stats.t.interval(0.95, 2, z.mean(), stats.sem(z))  # Student's over Fisher's z
    expected = [math.tanh(value) for value in (z.mean(), low, high)]
    assert row[["cc_mean", "cc_low", "cc_high"]].tolist() == pytest.approx(expected)
