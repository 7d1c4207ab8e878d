"""Study `protocol`: planted spreads come out under their estimate, and no other; pairs are those of one start."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from experiments.analyse import protocol, ranges
from experiments.analyse.runs import Run, load_run
from experiments.analyse.tables import write_table
from experiments.common.equivalence import power_of_difference
from experiments.common.files import ROOT
from experiments.spec import matrix
from experiments.training.outputs import window_decisions
from experiments.verdicts import archive
from paper_figures import protocol as figure
from paper_figures import saving
from tests.unit.invented_runs import run

WORKSTATION = ROOT / "results" / "reference" / "workstation"
FEW, ALL = 1_000, 6_000  # tokens
SEEDS = range(1, 7)
# Differences over six seeds of mean 0, and deviation 1.
SHAPE = np.array([-1.0, 1.0, -1.0, 1.0, 0.0, 0.0]) / math.sqrt(0.8)


def ended(variant: str, seed: int, losses: dict[int, list[float]], mean: dict[int, float], **more: Any) -> Run:
    """A run with these losses of its last weights, one an evaluation, and this one of their mean, by tokens."""
    rows = [{"iteration": 180 + 10 * k, "weights": "last", "tokens": tokens, "loss": loss}
            for tokens, values in losses.items() for k, loss in enumerate(values)]  # fmt: skip
    rows += [{"iteration": 200, "weights": "mean", "tokens": tokens, "loss": loss} for tokens, loss in mean.items()]
    train = {"iterations": 200, "lr": 1e-3, "final": {"evaluations": 3, "every": 10, "batches": 6}}
    return run(variant, seed, events={"final": rows}, train=train, **more)


RANK = {"method": "edgc", "policy": "fixed", "rank": 8, "window": 20}
PLAIN = {"losses": {tokens: [5.2, 5.1, 5.0] for tokens in (FEW, ALL)}, "mean": {FEW: 4.9, ALL: 4.9}}


def planted() -> list[Run]:
    """Rank 8 costs 0.02 nats, 0.03 in the means of evaluations, with deviations of their own by estimate."""
    runs = [ended("none", seed, **PLAIN) for seed in SEEDS]
    for seed, shape in zip(SEEDS, SHAPE, strict=True):
        # In the mean of the three evaluations the deviation of the last one is a third, on all tokens none is left.
        losses = {FEW: [5.225, 5.145, 5.02 + 0.006 * shape], ALL: [5.22 - 0.003 * shape, 5.15, 5.02 + 0.003 * shape]}
        mean = {FEW: 4.92 + 0.001 * shape, ALL: 4.92 + 0.0005 * shape}
        runs.append(ended("r8", seed, losses, mean, compression=RANK, label="rank 8"))
    return runs


def spread_of(runs: list[Run], variant: str = "r8", against: str = "none") -> pd.DataFrame:
    rows = pd.DataFrame(protocol.tables(runs)["spread"])
    return rows[(rows["variant"] == variant) & (rows["against"] == against)].set_index(["tokens", "end"])


@pytest.mark.parametrize(
    ("tokens", "end", "mean", "sd"),
    [
        (FEW, "last", 0.02, 0.006),
        (FEW, "evaluations", 0.03, 0.002),
        (FEW, "weights", 0.02, 0.001),
        (ALL, "last", 0.02, 0.003),
        (ALL, "evaluations", 0.03, 0.0),
        (ALL, "weights", 0.02, 0.0005),
    ],
)
def test_a_planted_spread_is_found_under_its_estimate(tokens: int, end: str, mean: float, sd: float) -> None:
    row = spread_of(planted()).loc[(tokens, end)]
    assert row["n"] == 6 and row["difference_nats"] == pytest.approx(mean)
    assert row["sd_nats"] == pytest.approx(sd, abs=1e-9) and row["sd_of_today"] == pytest.approx(sd / 0.006, abs=1e-6)
    assert row["sd_low"] <= row["sd_nats"] <= row["sd_high"]


def test_seeds_are_those_of_the_deviation() -> None:
    rows = spread_of(planted())
    assert rows.loc[(ALL, "weights"), ["seeds_to_see_difference", "seeds_to_show_equality"]].tolist() == [3, 3]
    # Two-sided t tests at 5 % see 0.0025 at a deviation of 0.006 with 80 % probability from 48 seeds on.
    assert rows.loc[(FEW, "last"), "seeds_to_see_difference"] == 48


def test_a_seed_without_a_result_is_no_difference_and_an_unfinished_run_no_estimate() -> None:
    runs = [item for item in planted() if (item.variant, item.seed) != ("none", 2)]
    diverged = next(item for item in runs if (item.variant, item.seed) == ("r8", 5))
    diverged.status = "diverged"
    rows = spread_of(runs)
    assert set(rows["n"]) == {4}
    assert rows.loc[(FEW, "last"), "difference_nats"] == pytest.approx(0.02 + 0.006 * SHAPE[[0, 2, 3, 5]].mean())
    table = pd.DataFrame(protocol.tables(runs)["table"])
    assert len(table) == len(runs) and list(table.loc[table["status"] == "diverged", "variant"]) == ["r8"]
    short = next(item for item in runs if (item.variant, item.seed) == ("r8", 6))
    short.events["final"].pop(0)  # of three evaluations
    rows = spread_of(runs)
    assert rows.loc[(FEW, "evaluations"), "n"] == 3 and rows.loc[(ALL, "evaluations"), "n"] == 4


def test_a_variant_of_which_no_seed_has_a_result_stays_with_no_deviation() -> None:
    runs = planted()
    for item in runs:
        if item.variant == "r8":
            item.status = "failed"
            item.events.clear()
    rows = spread_of(runs)
    assert len(rows) == 6 and set(rows["n"]) == {0} and rows["sd_nats"].isna().all()


def test_pairs_have_one_rate_and_no_compression_or_one_start() -> None:
    def item(variant: str, lr: float, **more: Any) -> Run:
        return run(variant, train={"iterations": 200, "lr": lr}, **more)

    rank = {"compression": RANK}
    runs = [item("first", 1e-3, compression={"method": "powersgd", "rank": 8}), item("none", 1e-3)]
    runs += [item("r16", 1e-3, **rank), item("r8", 1e-3, **rank), item("slow_none", 5e-4)]
    runs += [item("slow_r8", 5e-4, **rank)]
    found = {(one.variant, other.variant) for one, other in protocol.pairs(runs)}
    against_none = {("first", "none"), ("r16", "none"), ("r8", "none"), ("slow_r8", "slow_none")}
    assert found == against_none | {("r8", "r16")}


def test_the_study_has_a_pair_for_everything_that_is_asked() -> None:
    """The ways to start, both rates, a difference of nothing, and three ranks."""
    runs = [run(c.variant, c.seed, label=c.label, **_settings(c)) for c in matrix.runs("protocol", "workstation")]
    found = {(one.variant, other.variant) for one, other in protocol.pairs(runs)}
    for rate in ("", "slow_"):
        asked = {(f"{rate}{name}", f"{rate}none") for name in ("r8", "r16", "r24", "r16_redrawn")}
        assert asked | {(f"{rate}r16_redrawn", f"{rate}r16")} <= found
    assert ("slow_r16_first", "slow_none") in found and ("slow_r16_first", "slow_r16") not in found


def test_the_figure_shows_pairs_of_many_seeds_and_names_the_estimate_that_varies_least(tmp_path: Path) -> None:
    few = [ended("r4", seed, **PLAIN, compression=RANK, label="rank 4") for seed in SEEDS[:3]]
    write_table(tmp_path / "protocol" / "spread.csv", protocol.tables([*planted(), *few])["spread"])
    fig = figure.draw(tmp_path)
    [panel] = fig.axes
    labels = [text.get_text() for legend in fig.legends for text in legend.get_texts()]
    assert labels == ["rank 8 minus none"] and len(panel.containers) == 1
    assert saving.heading(fig) == "Mean of losses, 6k tokens: 0 % of the spread so far"
    limit = figure.resolved()
    power = [power_of_difference(sd, figure.EFFECT, figure.SEEDS) for sd in (limit, 1.02 * limit)]
    assert power[0] == pytest.approx(0.8) and power[1] < 0.8
    plt.close(fig)


def _settings(config: Any) -> dict[str, Any]:
    return {key: value for key, value in config.model_dump().items() if key in ("train", "compression")}


def test_the_ranks_that_edgc_would_take_are_those_it_took(tmp_path: Path) -> None:
    """Told the entropies of its own run, whose settings it has."""
    for name, content in archive.read(WORKSTATION / "policies", "one_cqm-s15").items():
        (tmp_path / name).write_bytes(content)
    edgc = load_run(tmp_path)
    taken = window_decisions(edgc.decisions, edgc.edgc.window, before=edgc.iterations)
    asked = ranges.course(edgc, taken[0]["r_min"], taken[0]["r_max"])
    assert [event["ranks"] for event in asked] == [event["ranks"] for event in taken]
    assert len({rank for event in asked for rank in event["ranks"]}) > 2


def test_ranks_that_move_cost_what_the_bend_of_the_price_says() -> None:
    price = ranges.price_of_moving(pd.Series({16: 0.01, 8: 0.04}))
    assert price("16>8>16") == pytest.approx(0.025 - 0.02)  # rank 12 costs the geometric mean
    assert price("8>8>16") == pytest.approx(0) and price("32>16>8") > 0
