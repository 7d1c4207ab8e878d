"""From run folders to tables: planted effects come out, nothing is dropped, the same input gives the same bytes."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from edgc.errors import UserError
from experiments.analyse import entropy_trend, rank_sweep, runs, statistics, trend, windows
from experiments.analyse.__main__ import analyse, main
from experiments.analyse.policies import comparisons
from experiments.common import quickest
from experiments.spec import matrix
from tests.unit import synthetic_runs as synthetic

STUDIES = [study for study in matrix.studies() if matrix.load_study(study).analysis]


@pytest.fixture(scope="module")
def root(synthetic_results: Path) -> Path:
    return synthetic_results


def test_gap_is_taken_against_the_uncompressed_run_of_the_same_seed(root: Path) -> None:
    table = pd.read_csv(root / "methods" / "table.csv").set_index(["variant", "seed"])
    # Uncompressed losses are 5.05 and 5.10; the planted gaps are 0.12 + 0.004 seed.
    assert table.loc[("powersgd_r4", 1), "gap_nats"] == pytest.approx(0.124)
    assert table.loc[("powersgd_r4", 2), "gap_nats"] == pytest.approx(0.128)
    assert table.loc[("none", 2), "gap_nats"] == 0


def test_bytes_are_told_of_fp32_and_of_bf16(root: Path) -> None:
    for study in ("methods", "policies", "moe", "optimus_cc", "rank_sweep", "window_ablation"):
        table = pd.read_csv(root / study / "table.csv")
        sent = table["bytes_total"] / (table["bytes_dense_total"] / 2)
        assert table["bytes_ratio_bf16"].tolist() == pytest.approx(sent.tolist(), nan_ok=True), study


def test_a_policy_is_compared_with_its_own_ranks_in_another_order(root: Path) -> None:
    rows = pd.read_csv(root / "policies" / "pairs.csv").set_index(["variant", "rival", "seed"])
    assert rows.loc[("cqm", "fixed rank", 3), "difference_nats"] == pytest.approx(-0.0008)
    assert rows.loc[("cqm", "shuffled", 2), "difference_nats"] == pytest.approx(0.02 - (0 + 0.04) / 2)
    of_placebos = 0.01 - (0.05 + 0 + 0) / 3
    assert rows.loc[("cqm", "placebos", 1), "difference_nats"] == pytest.approx(of_placebos)
    assert rows.loc[("cqm", "no compression", 2), "difference_nats"] == pytest.approx(0.02)
    assert set(rows.index.get_level_values("variant")) == {"cqm", "loss"}, "what is given its ranks follows nothing"
    assert (rows.loc["cqm", "bytes_over_rival"].drop("no compression") == 1).all()
    assert not rows["same_start"].astype(bool).any(), "their losses are drawn apart"

    found = pd.read_csv(root / "policies" / "comparisons.csv").set_index(["variant", "rival"])
    assert found.loc[("cqm", "fixed rank"), "verdict"] == "better within the margin"
    assert found.loc[("cqm", "fixed rank"), "rival_gap_nats"] == pytest.approx((0.011 + 0.021 + 0.0308) / 3)
    assert found.loc[("cqm", "placebos"), "rival_gap_nats"] > 0.01
    assert pd.isna(found.loc[("cqm", "no compression"), "rival_gap_nats"])
    assert found.loc[("cqm", "reversed"), "verdict"] == "better"
    assert found.loc[("cqm", "no compression"), "verdict"] == "not decided"
    assert found.loc[("cqm", "shuffled"), "verdict"] == "not decided"
    assert (found.loc["cqm", "seeds_acted"] == 3).all()
    assert (found.loc["loss", "verdict"] == "not tested").all(), "certain and far, but the policy never moved"
    assert found.loc[("loss", "fixed rank"), "difference_low"] == pytest.approx(0.02)
    assert (found["n"] == 3).all()


def test_a_policy_is_compared_over_the_seeds_that_it_and_its_rival_have(tmp_path: Path) -> None:
    folder = synthetic.write_policies(tmp_path)
    shutil.rmtree(folder / "even-s1")
    (folder / "reversed-s2" / "status").write_text("failed\n")
    (folder / "reversed-s2" / "summary.json").write_text(json.dumps({"status": "failed"}))
    analyse("policies", folder)
    found = pd.read_csv(folder / "comparisons.csv").set_index(["variant", "rival"])
    expected = {"no compression": 3, "fixed rank": 2, "reversed": 2, "shuffled": 3, "placebos": 3}
    assert found.loc["cqm", "n"].to_dict() == found.loc["cqm", "seeds_acted"].to_dict() == expected
    assert found.loc[("cqm", "reversed"), "difference_nats"] == pytest.approx((0.01 - 0.05 + 0.03 - 0.072) / 2)

    # Of two seeds, the policy did not act in one: not two thirds, whatever it did where its rival is not.
    log = folder / "cqm-s2" / "metrics.jsonl"
    lines = [line for line in log.read_text().splitlines() if json.loads(line)["event"] != "decision"]
    log.write_text("".join(line + "\n" for line in lines))
    analyse("policies", folder)
    found = pd.read_csv(folder / "comparisons.csv").set_index(["variant", "rival"])
    assert found.loc[("cqm", "fixed rank"), ["n", "seeds_acted", "verdict"]].tolist() == [2, 1, "not tested"]
    assert found.loc[("cqm", "reversed"), ["n", "seeds_acted"]].tolist() == [2, 2]
    assert found.loc[("cqm", "reversed"), "verdict"] != "not tested"
    assert found.loc[("cqm", "shuffled"), ["n", "seeds_acted", "verdict"]].tolist() == [3, 2, "not decided"]


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.0001] * 5 + [0.0002] * 5, "worse within the margin"),
        ([0.0001] * 5 + [0.0002] * 4 + [math.nan], "not decided"),  # one of the two diverged
        ([-0.02] * 5 + [-0.021] * 5, "better"),
        ([-0.02] * 5 + [-0.021] * 4 + [math.nan], "not decided"),
        ([0.02] * 5 + [0.021] * 4 + [math.nan], "worse"),
    ],
)
def test_nothing_good_is_said_where_a_seed_has_no_result(differences: list[float], verdict: str) -> None:
    rows = pd.DataFrame({"difference_nats": differences}).assign(
        variant="cqm", label="EDGC (CQM)", policy="cqm", factor_dtype="fp32", rival="fixed rank", status="ok",
        seed=range(10), bytes_over_rival=1.0, same_start=True, acted=True, ranks_used=5, windows_inside=0.5,
        rival_gap_nats=0.02,
    )  # fmt: skip
    [found] = comparisons(rows)
    assert found["verdict"] == verdict
    [found] = comparisons(rows.assign(rival_gap_nats=0.009))
    assert found["verdict"] == (verdict if abs(differences[0]) > 0.005 else "cannot tell")


def test_a_policy_with_quantised_factors_is_compared_with_itself_without(tmp_path: Path) -> None:
    folder = synthetic.write_policies(tmp_path)
    settings = synthetic.edgc() | synthetic.POLICIES["cqm"][0] | {"factor_dtype": "int8"}
    for seed in (1, 2, 3):
        synthetic.write_run(
            folder, study="policies", variant="cqm_int8", seed=seed, loss=4.99, compression=settings, bytes_ratio=0.05
        )
    analyse("policies", folder)
    rows = pd.read_csv(folder / "pairs.csv").set_index(["variant", "rival", "seed"])
    cqm = pd.read_csv(folder / "table.csv").query("variant == 'cqm'").set_index("seed")["validation_loss"]
    for seed in (1, 2, 3):
        row = rows.loc[("cqm_int8", "fp32 factors", seed)]
        assert row["difference_nats"] == pytest.approx(4.99 - cqm[seed])
    assert "fp32 factors" not in rows.loc["cqm"].index and "fp32 factors" not in rows.loc["loss"].index


def test_the_same_start_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    folder = synthetic.write_policies(tmp_path)
    for name in ("even", "reversed"):  # as bred from one warm-up; one of them differs in the last bit of one loss
        for seed in (1, 2, 3):
            log = [json.loads(line) for line in (folder / f"cqm-s{seed}" / "metrics.jsonl").read_text().splitlines()]
            if name == "reversed" and seed == 2:
                step = next(event for event in log if event["event"] == "step" and event["iteration"] == 17)
                step["loss"] = math.nextafter(step["loss"], math.inf)
            text = "".join(json.dumps(event) + "\n" for event in log if event["event"] != "decision")
            (folder / f"{name}-s{seed}" / "metrics.jsonl").write_text(text)
    analyse("policies", folder)
    found = pd.read_csv(folder / "pairs.csv").query("variant == 'cqm'").set_index(["rival", "seed"])["same_start"]
    assert found["fixed rank", 2] and found["reversed", 1] and not found["reversed", 2]
    together = pd.read_csv(folder / "comparisons.csv").set_index(["variant", "rival"])["same_start"]
    assert together["cqm", "fixed rank"] and not together["cqm", "reversed"]


def test_a_run_that_compresses_between_stages_is_no_baseline(root: Path) -> None:
    table = pd.read_csv(root / "optimus_cc" / "table.csv").set_index(["variant", "seed"])
    assert table.loc[("none", 2), "gap_nats"] == 0
    assert table.loc[("backprop", 2), "gap_nats"] == pytest.approx(0.3)
    assert table.loc[("stages", 1), "gap_nats"] == pytest.approx(0.02)
    traffic = pd.read_csv(root / "optimus_cc" / "traffic.csv").set_index(["variant", "seed"])
    assert traffic.loc[("backprop", 1), "stages_ratio"] == pytest.approx(0.25)
    assert traffic.loc[("backprop", 1), "stages_relative_error"] == pytest.approx(0.8)
    assert math.isnan(traffic.loc[("none", 1), "stages_ratio"])


def test_summary_has_mean_sd_and_interval_over_finished_seeds(root: Path) -> None:
    row = pd.read_csv(root / "methods" / "summary.csv").set_index("variant").loc["powersgd_r4"]
    assert (row["n"], row["n_ok"]) == (2, 2)
    assert row["gap_nats_mean"] == pytest.approx(0.126)
    assert row["gap_nats_sd"] == pytest.approx(0.004 / math.sqrt(2))
    # Two values: half-width t(0.975, 1) * sd / sqrt 2 = 12.7062 * 0.002.
    assert row["gap_nats_high"] - row["gap_nats_mean"] == pytest.approx(12.7062 * 0.002, rel=1e-5)
    assert row["verdict"] == "worse", "certainly, and beyond the margin"


def test_every_study_that_trains_has_learning_curves_of_every_run(root: Path) -> None:
    trained = [study for study in matrix.studies() if matrix.load_study(study).analysis]
    for study in trained:
        assert "curves.csv" in matrix.load_study(study).tables, study
    for study in {path.parent.name for path in root.glob("*/curves.csv")}:
        curves, table = (pd.read_csv(root / study / name) for name in ("curves.csv", "table.csv"))
        ended = table[table["status"] == "ok"] if "status" in table else table.head(0)
        assert set(zip(ended["variant"], ended["seed"], strict=True)) <= set(
            zip(curves["variant"], curves["seed"], strict=True)
        ), study


def test_only_differences_paired_by_seed_have_an_interval(root: Path) -> None:
    for study in ("methods", "window_ablation", "sampling_ablation", "moe"):
        columns = pd.read_csv(root / study / "summary.csv").columns
        ends = {name.rpartition("_")[0] for name in columns if name.endswith(("_low", "_high"))}
        assert ends <= {"gap_nats"}, study
        assert ("verdict" in columns) is ("gap_nats_mean" in columns), study


def test_diverged_and_failed_runs_stay_in_every_table(root: Path) -> None:
    for name in ("table.csv", "timings.csv"):
        table = pd.read_csv(root / "methods" / name).set_index(["variant", "seed"])
        assert len(table) == 13
        assert table.loc[("edgc_released", 2), "status"] == "diverged"
        assert table.loc[("powersgd_r2", 1), "status"] == "failed"
    table = pd.read_csv(root / "methods" / "table.csv").set_index(["variant", "seed"])
    assert math.isnan(table.loc[("edgc_released", 2), "validation_loss"])
    assert table.loc[("edgc_released", 2), "error"] == "loss is not finite"
    summary = pd.read_csv(root / "methods" / "summary.csv").set_index("variant")
    assert (summary.loc["edgc_released", "n"], summary.loc["edgc_released", "n_ok"]) == (2, 1)
    assert math.isnan(summary.loc["powersgd_r2", "gap_nats_mean"])
    curves = pd.read_csv(root / "methods" / "curves.csv")
    assert set(curves.loc[curves["status"] == "failed", "variant"]) == {"powersgd_r2"}


def test_curves_accumulate_bytes_and_keep_every_rank_change(root: Path) -> None:
    curves = pd.read_csv(root / "methods" / "curves.csv")
    run = curves[(curves["variant"] == "edgc_cqm") & (curves["seed"] == 1)]
    assert run["bytes"].iloc[-1] == 20 * 1_000_000 + 180 * 200_000
    assert run["rank_0"].isna().sum() == 20
    assert list(run["rank_0"].dropna().unique()) == [24, 20, 16, 12, 8]


def test_a_long_curve_is_thinned_but_keeps_ends_and_changes() -> None:
    rows = statistics.thin(100_000, keep=[12_345])
    assert len(rows) <= statistics.CURVE_POINTS + 3
    assert {0, 12_345, 99_999} <= set(rows)


def test_stages_that_send_dense_are_shown(root: Path) -> None:
    rows = pd.read_csv(root / "optimus_cc" / "table.csv").set_index(["variant", "seed"])
    assert rows.loc[("stages", 1), "final_ranks"].split("|") == ["16"] + ["dense"] * (synthetic.STAGES - 1)
    assert rows.loc[("stages", 2), "gap_nats"] == pytest.approx(0.02)


@pytest.mark.parametrize("study", STUDIES)
def test_an_analysis_writes_the_tables_that_it_declares(root: Path, study: str) -> None:
    declared = matrix.load_study(study).tables
    assert sorted(path.name for path in (root / study).glob("*.csv")) == sorted(declared)


@pytest.mark.parametrize("study", [study for study in STUDIES if study not in synthetic.COPIES])
def test_tables_repeat_byte_for_byte(root: Path, tmp_path: Path, study: str) -> None:
    before = {path.name: path.read_bytes() for path in (root / study).glob("*.csv")}
    again = Path(shutil.copytree(root / study, tmp_path / study, ignore=shutil.ignore_patterns("*.csv")))
    analyse(study, again)
    assert before == {path.name: path.read_bytes() for path in again.glob("*.csv")}


def test_decisions_and_limits_are_counted(root: Path) -> None:
    row = pd.read_csv(root / "methods" / "table.csv").set_index(["variant", "seed"]).loc[("edgc_cqm", 1)]
    assert (row["decisions"], row["rank_changes"], row["decisions_outside_limits"]) == (5, 4, 0)
    assert row["ranks_stage0"] == "20>16>12>8>4"


def test_a_decision_outside_its_limits_is_counted(tmp_path: Path) -> None:
    synthetic.write_run(
        tmp_path,
        study="methods",
        variant="edgc_cqm",
        compression=synthetic.edgc(),
        ranks=[80, 80],
        decide_every=40,
    )  # ranks 76 and 72 and 68 lie above r_max = 64
    analyse("methods", tmp_path)
    assert pd.read_csv(tmp_path / "table.csv").loc[0, "decisions_outside_limits"] == 3


def test_what_the_cost_gate_decides_inside_a_window_is_not_counted(tmp_path: Path) -> None:
    path = synthetic.write_run(
        tmp_path,
        study="methods",
        variant="edgc_cqm",
        compression=synthetic.edgc(window=40),
        ranks=[32, 32],
        decide_every=40,
    )
    analyse("methods", tmp_path)
    before = pd.read_csv(tmp_path / "table.csv")
    gate = {
        "event": "decision",
        "iteration": 65,
        "phase": "active",
        "ranks": [28, 28],
        "r_min": 4,
        "r_max": 64,
    }
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join([*lines[:-1], json.dumps(gate) + "\n", lines[-1]]))
    analyse("methods", tmp_path)
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "table.csv"), before)
    assert before.loc[0, "decisions"] > 3


def test_curves_have_the_mean_entropy_of_the_last_window(root: Path) -> None:
    curves = pd.read_csv(root / "methods" / "curves.csv")
    mine = curves[(curves["variant"] == "edgc_cqm") & (curves["seed"] == 1)].set_index("iteration")
    steps = runs.load_run(root / "methods" / "edgc_cqm-s1").stages
    part = steps[
        (steps["stage"] == 1) & steps["iteration"].between(61, 100)
    ]  # the window is 40, every tenth is sampled
    assert part["entropy"].count() == 4
    assert mine.loc[100, "entropy_1"] == pytest.approx(part["entropy"].mean())
    assert curves.loc[curves["variant"] == "none", "entropy_0"].isna().all(), "nothing follows it"
    assert len(pd.read_csv(root / "tuning" / "curves.csv")["variant"].unique()) == 3


def test_window_correlation_is_the_planted_one(tmp_path: Path) -> None:
    exact = synthetic.edgc(window=20, alpha=1.0, beta=1.0)
    common_settings = {"study": "window_ablation", "ranks": [16, 16], "iterations": 200}
    synthetic.write_run(tmp_path, variant="exact", compression=exact, noise=0.0, **common_settings)
    synthetic.write_run(tmp_path, variant="noisy", compression=exact, noise=3.0, **common_settings)
    synthetic.write_run(tmp_path, variant="short", compression=exact | {"window": 90}, noise=0.0, **common_settings)
    analyse("window_ablation", tmp_path)
    table = pd.read_csv(tmp_path / "table.csv").set_index("variant")
    assert table.loc["exact", "cc"] == pytest.approx(1.0, abs=1e-12)
    assert table.loc["exact", "rmse_nats"] == pytest.approx(0.0, abs=1e-12)
    assert table.loc["exact", "windows"] == 10
    assert table.loc["noisy", "cc"] < 0.9
    assert math.isnan(table.loc["short", "cc"])  # two windows of 90 in 200 iterations
    assert "cc: 2 usable windows, 3 needed" in table.loc["short", "cc_note"]


def test_windowed_means_are_those_of_the_steps(root: Path) -> None:
    paths = pd.read_csv(root / "window_ablation" / "trajectories.csv")
    # The planted entropy falls by 1.5 nats with a time constant of 15 iterations.
    ends = pd.read_csv(root / "window_ablation" / "warm_up.csv")
    for _, rows in ends.groupby(["variant", "seed"]):
        assert rows["warm_up_ends"].is_monotonic_decreasing, "a larger tolerance never ends later"
    strict = ends[ends["tolerance_nats"] == 0.02].groupby("window")["warm_up_ends"].mean()
    assert (strict.dropna() >= 40).all()
    row = paths[(paths["length"] == 20) & (paths["stage"] == 0) & (paths["window"] == 3)].iloc[0]
    steps = runs.load_run(root / "window_ablation" / "w20-s1").stages
    part = steps[(steps["stage"] == 0) & steps["iteration"].between(61, 80)]
    assert row["iteration"] == 80
    assert row["entropy_full"] == pytest.approx(part["entropy_full"].mean())
    assert row["entropy"] == pytest.approx(part["entropy"].mean())  # sampled at two of the twenty iterations


def test_sampling_table_counts_differing_decisions_and_cost(root: Path) -> None:
    table = pd.read_csv(root / "sampling_ablation" / "table.csv").set_index(["alpha", "beta"])
    assert table.loc[(1.0, 1.0), "decisions_differing"] == 0
    # Deciding every 40 instead of every 20 iterations: 5 decisions against 9, the first five of equal rank.
    assert table.loc[(0.1, 0.25), "decisions_differing"] == 4
    assert table.loc[(0.1, 0.25), "decisions_compared"] == 9
    timings = pd.read_csv(root / "sampling_ablation" / "timings.csv").set_index(["alpha", "beta"])
    assert timings.loc[(1.0, 0.25), "change_percent"] == pytest.approx(-75.0)
    # alpha 0.1: 20 of the 195 counted steps measure, at a quarter of the cost.
    assert timings.loc[(0.1, 0.25), "change_percent"] == pytest.approx(100 * (20 / 195 / 4 - 1))


def test_rank_sweep_recovers_the_planted_line(root: Path) -> None:
    fit = pd.read_csv(root / "rank_sweep" / "fit.csv").set_index(["stage", "kind"])
    total = fit.loc[(0, "total")]
    # compress 1.0, communicate 0.5, decompress 0.2 ms per rank, 2 ms fixed; uncompressed 60 ms.
    assert total["seconds_per_rank"] == pytest.approx(1.7e-3)
    assert total["seconds_fixed"] == pytest.approx(2e-3)
    assert total["residual_largest_share"] < 1e-9
    assert total["rank_where_slower"] == pytest.approx((0.060 - 0.002) / 1.7e-3)
    table = pd.read_csv(root / "rank_sweep" / "table.csv").set_index("variant")
    assert table.loc["r4", "gap_nats"] == pytest.approx(0.1)
    assert table.loc["r16", "worker_error_median"] == pytest.approx(0.9 / 4)
    assert table.loc["r16", "mean_error_median"] == pytest.approx(0.6 / 4)


def test_errors_of_runs_from_before_the_mean_was_measured_are_the_workers(tmp_path: Path) -> None:
    run = synthetic.write_run(tmp_path, study="rank_sweep", variant="r4")
    stage = {"stage": 0, "rank": 4, "relative_error": 0.9, "error_feedback_ratio": 2.0}
    lines = [{"event": "step", "iteration": t, "stages": [stage]} for t in (1, 2, 3)]
    lines.append({"event": "end"})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = rank_sweep.errors(runs.load_run(run))
    assert found["worker_error_median"] == 0.9
    assert math.isnan(found["mean_error_median"])


def test_r_max_is_where_compressing_stops_to_be_quicker(root: Path) -> None:
    limits = pd.read_csv(root / "rank_sweep" / "limits.csv")
    here = limits[(limits["stage"] == 0) & (limits["kind"] == "measured")].iloc[0]
    # As planted above: (60 - 2) / 1.7 = 34.1, which no run had.
    assert here["crossing"] == pytest.approx((0.060 - 0.002) / 1.7e-3)
    assert (here["r_max"], here["r_min"], here["extrapolated"]) == (32, 8, True)
    modelled = limits[(limits["stage"] == 0) & (limits["kind"] == "modelled network")].set_index("megabits")
    share = []
    for name in ("none", "r8"):
        lines = (root / "rank_sweep" / f"{name}-s1" / "metrics.jsonl").read_text().splitlines()
        share.append(next(e for e in map(json.loads, lines) if e["event"] == "step")["stages"][0]["bytes"])
    dense, per_rank = share[0], share[1] / 8
    for megabits, row in modelled.iterrows():
        # Work: 1.2 ms per rank; the 2 ms are of the communication, which bytes / bandwidth replaces.
        second_per_byte = 8 / (float(megabits) * 1e6)
        crossing = dense * second_per_byte / (1.2e-3 + per_rank * second_per_byte)
        assert row["crossing"] == pytest.approx(crossing, rel=1e-6)
        assert row["r_max"] == crossing // 4 * 4
    assert modelled["r_max"].is_monotonic_decreasing
    assert modelled["r_max"].iloc[0] > 0 == modelled["r_max"].iloc[-1]


def test_a_curved_time_shows_in_the_residual() -> None:
    straight = rank_sweep.linear([4, 8, 16], [4.0, 8.0, 16.0])
    curved = rank_sweep.linear([4, 8, 16], [16.0, 64.0, 256.0])
    assert straight["residual_largest_share"] < 1e-9 < 0.2 < curved["residual_largest_share"]
    assert math.isnan(rank_sweep.linear([4, 4], [1.0, 1.1])["seconds_per_rank"])


def test_a_seed_beside_other_work_does_not_move_the_line() -> None:
    about = {"status": "ok", "stage": 0}
    rows = [
        about
        | {"variant": f"r{rank}", "seed": seed, "rank": rank, "kind": kind}
        | {"seconds_median": share * (2.0 + (rank or 0.0)) * slow}
        for rank in (None, 4.0, 8.0, 16.0)
        for seed, slow in ((1, 1.0 if rank != 8 else 3.0), (2, 3.0 if rank != 8 else 1.0))
        for kind, share in (("compress", 0.25), ("total", 1.0))
    ]
    found = {row["kind"]: row for row in rank_sweep.fits(pd.DataFrame(rows))}
    for kind, share in (("compress", 0.25), ("total", 1.0)):
        assert found[kind]["seconds_per_rank"] == pytest.approx(share)
        assert found[kind]["seconds_uncompressed"] == pytest.approx(2 * share)
        assert found[kind]["residual_largest_share"] < 1e-9 and found[kind]["points"] == 3
    medians = pd.DataFrame(
        {"stage": 0, "rank": rank, "work": 1.0, "communicate": slow * (2.0 + (rank or 0.0)), "bytes": 1e6}
        for rank in (None, 4.0, 8.0)
        for slow in (3.0, 1.0)
    )
    least = quickest.least(medians, medians["work"] + medians["communicate"])
    assert list(least["communicate"]) == [2.0, 6.0, 10.0]


def test_entropy_trend_describes_the_planted_fall_and_rise(root: Path) -> None:
    table = pd.read_csv(root / "entropy_trend" / "table.csv")
    rows = table[(table["estimator"] == "histogram") & (table["group"] == "<all>")].set_index("architecture")
    for name in ("gpt", "bert"):
        row = rows.loc[name]
        assert row["verdict"] == "falls, then rises"
        # d/dt of 1.5 exp(-t/15) + 0.002 t vanishes at t = 15 log 50 = 58.7.
        assert 45 <= row["iteration_minimum"] <= 75
        assert row["slope_after_per_100"] == pytest.approx(0.2, abs=0.07)
        assert row["share_log_sigma_fell_after"] == 0
        assert row["correlation_log_sigma"] > 0.999
        assert row["sampled_cc"] > 0.99
    released = table[(table["estimator"] == "released") & (table["group"] == "<all>")]
    assert (released["correlation_log_sigma"].abs() < 0.7).all()


def test_combined_entropy_is_weighted_by_size(root: Path) -> None:
    trend_table = pd.read_csv(root / "entropy_trend" / "trend.csv")
    probe = pd.read_parquet(root / "entropy_trend" / "gpt-s1" / "tensors.parquet")
    first = probe[(probe["iteration"] == 1) & (probe["parameter"] != "<model>")]
    expected = np.average(first["entropy_histogram"], weights=first["numel"])
    rows = trend_table[(trend_table["variant"] == "gpt") & (trend_table["iteration"] == 1)].set_index("group")
    assert rows.loc["<all>", "entropy_histogram"] == pytest.approx(expected)
    assert rows.loc["<all>", "parameters"] == len(synthetic.MATRICES)


def test_moments_report_centring_correlation_and_clipping(root: Path) -> None:
    moments = pd.read_csv(root / "entropy_trend" / "moments.csv")
    row = moments[(moments["variant"] == "gpt") & (moments["group"] == "<all>")].iloc[0]
    assert row["centring"] == "more near zero"
    assert row["near_zero_slope_per_100"] == pytest.approx(0.01)
    assert row["correlation_layers_early"] > 5 * row["correlation_layers_late"]
    assert 0 < row["share_of_steps_clipped"] < 1
    # Planted: the entropy is log sigma + 1.3 everywhere, so the link holds whatever the form.
    assert row["form_offset_start"] == pytest.approx(1.3 - 0.5 * math.log(2 * math.pi * math.e))
    assert row["link_error_early"] == pytest.approx(0, abs=1e-9)
    assert row["link_error_late"] == pytest.approx(0, abs=1e-9)


def test_the_gaussian_link_is_judged_against_the_end_of_warm_up() -> None:
    at = pd.Series([1.0, 50.0, 100.0, 500.0, 1000.0])
    found = entropy_trend.link(at, pd.Series([1.0, 1.3, 1.4, 1.45, 1.38]))
    assert found["link_error_early"] == pytest.approx(0.4)
    assert found["link_error_late"] == pytest.approx(0.05)
    assert found["form_offset_end"] == pytest.approx(1.38 - 1.4189385)
    assert math.isnan(entropy_trend.link(at, at * math.nan)["link_error_late"])


def test_lag_is_between_the_rank_in_use_and_what_its_window_asks_for() -> None:
    run = runs.Run(Path("w-s1"), "ok", {"compression": synthetic.edgc(10, step_limit=8), "train": {"iterations": 60}})
    asked = [(None, 64), (60.0, 60), (40.0, 52), (10.0, 44), (math.nan, 44)]  # (target, rank afterwards)
    run.__dict__["events"] = {
        "decision": [
            {
                "iteration": 10 * k,
                "phase": "active",
                "ranks": [rank],
                "target": target,
                "r_min": 16,
                "r_max": 64,
            }
            for k, (target, rank) in enumerate(asked, start=2)
        ]
    }
    found = windows.decision_columns(run)
    assert found["lag_ranks"] == pytest.approx((4 + 20 + 36) / 3)
    assert found["share_limited"] == pytest.approx(2 / 3)
    assert found["decisions"] == 5


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (lambda t: 5 - 0.02 * t, "falls"),
        (lambda t: 5 - 2 * math.exp(-t / 5) * 0 - 1.0 * (1 - math.exp(-t / 5)), "falls"),
        (lambda t: 4 + math.exp(-t / 5) + 0.01 * t, "falls, then rises"),
        (lambda t: 4 + 0.02 * t, "rises"),
        (lambda t: 4 + 0.01 * math.sin(t), "flat"),
    ],
)
def test_trend_verdicts(values: object, verdict: str) -> None:
    iterations = list(range(0, 100, 2))
    assert trend.describe(iterations, [values(t) for t in iterations])["verdict"] == verdict  # type: ignore[operator]


def test_trend_needs_four_probes_and_ignores_missing_ones() -> None:
    assert trend.describe([1, 2, 3], [3.0, 2.0, 1.0])["verdict"] == "too few probes"
    found = trend.describe([1, 2, 3, 4, 5, 6], [3.0, math.nan, 2.0, 1.5, 1.0, 0.5])
    assert (found["probes"], found["verdict"]) == (5, "falls")


def test_seeds_of_a_condition_are_summarised_with_what_each_says() -> None:
    rows = [
        {"variant": "gpt", "label": "GPT", "architecture": "gpt", "group": group, "seed": seed, "status": status,
         "start": -float(seed), "verdict": verdict}
        for group in ("<all>", "qkv")
        for seed, status, verdict in [(1, "ok", "falls"), (2, "ok", "falls, then rises"), (3, "ok", "falls"),
                                      (4, "failed", None)]
    ]  # fmt: skip
    found = entropy_trend.over_seeds(pd.DataFrame(rows), ("group",), ("start",), "verdict").set_index("group")
    assert list(found.index) == ["<all>", "qkv"]
    row = found.loc["qkv"]
    assert (row["n"], row["n_ok"], row["start_mean"], row["start_min"], row["start_max"]) == (4, 3, -2.0, -3.0, -1.0)
    assert row["verdict"] == "falls (2); falls, then rises (1)"
    assert entropy_trend.words(pd.Series(["falls", "falls"])) == "falls"


def test_a_run_without_probes_keeps_its_row(tmp_path: Path) -> None:
    synthetic.write_run(tmp_path, study="entropy_trend", variant="gpt", probe_every=10)
    synthetic.write_run(tmp_path, study="entropy_trend", variant="bert", architecture="bert", status="failed")
    analyse("entropy_trend", tmp_path)
    table = pd.read_csv(tmp_path / "table.csv")
    assert list(table.loc[table["variant"] == "bert", "status"]) == ["failed"]
    assert list(table.loc[table["variant"] == "bert", "verdict"]) == ["no probes"]
    summary = pd.read_csv(tmp_path / "moments_summary.csv").set_index(["variant", "group"])
    assert summary.loc[("bert", "<all>"), "n_ok"] == 0 and summary.loc[("gpt", "<all>"), "n_ok"] == 1


def test_a_torn_last_line_of_a_failed_run_is_left_out(tmp_path: Path) -> None:
    path = synthetic.write_run(tmp_path, study="methods", variant="none", status="failed")
    whole = len(runs.load_run(path).steps)
    text = (path / "metrics.jsonl").read_text()
    (path / "metrics.jsonl").write_text(text[: text.rindex('"step"') + 40])
    assert len(runs.load_run(path).steps) == whole - 1


def test_missing_folder_missing_run_and_unknown_study_name_the_fix(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no results.*snakemake -c2 methods"):
        analyse("methods", tmp_path / "methods")
    with pytest.raises(UserError, match="1 of 2 runs missing, first absent-s1"):
        analyse("methods", root / "methods", ["none-s1", "absent-s1"])
    with pytest.raises(UserError, match="did you mean methods"):
        analyse("method", root)
    with pytest.raises(UserError, match=r"no analysis for study zero_shot .*zero_shot.yaml.* methods"):
        analyse("zero_shot", root)


def test_command_line_takes_the_study_files_runs_and_reports_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = synthetic.write_rank_sweep(tmp_path / "ci")
    names = ["r16-s1", "r4-s1"]
    planned = [matrix.find("rank_sweep", "ci", name) for name in names]
    monkeypatch.setattr(matrix, "runs", lambda study, scale: planned)
    main("rank_sweep", "ci", tmp_path)
    assert list(pd.read_csv(folder / "table.csv")["variant"]) == ["r16", "r4"]  # in the study's order
    shutil.rmtree(folder / "r4-s1")
    with pytest.raises(SystemExit) as stop:
        main("rank_sweep", "ci", tmp_path)
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: 1 of 2 runs missing")


def test_broken_run_yaml_is_a_user_error(tmp_path: Path) -> None:
    path = synthetic.write_run(tmp_path, study="methods", variant="none")
    (path / "run.yaml").write_text(yaml.safe_dump(["not", "a", "mapping"]))
    with pytest.raises(UserError, match="not a mapping"):
        analyse("methods", tmp_path)


DAMAGE = {
    "metrics.jsonl, in a line": ("metrics.jsonl", lambda content: content[:-5], "line"),
    "metrics.jsonl, after a line": (
        "metrics.jsonl",
        lambda content: content[: content.rindex(b"\n", 0, -1) + 1],
        "no end event",
    ),
    "metrics.jsonl, missing": ("metrics.jsonl", None, "is missing"),
    "summary.json": ("summary.json", lambda content: content[:-9], "not valid JSON"),
    "summary.json, missing": ("summary.json", None, "is missing"),
    "run.yaml": ("run.yaml", lambda content: content[: content.index(b"compression:")], "lacks compression"),
    "run.yaml, missing": ("run.yaml", None, "file not found"),
    "status": ("status", lambda content: content[:1], "holds 'o'"),
    "tensors.parquet": ("tensors.parquet", lambda content: content[:-20], "is cut short or altered"),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.parametrize("named", [True, False])
def test_a_damaged_run_is_refused_and_no_table_is_written(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    named: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "ci" / "entropy_trend"
    for variant in ("gpt", "bert"):
        path = synthetic.write_run(folder, study="entropy_trend", variant=variant, probe_every=10)
    name, change, problem = DAMAGE[case]
    damaged = path / name
    if change is None:
        damaged.unlink()
    else:
        damaged.write_bytes(change(damaged.read_bytes()))
    planned = [run.model_copy(update={"seed": 1}) for run in matrix.runs("entropy_trend", "ci")]
    planned = [run for run in planned if run.variant in ("gpt", "bert")]
    monkeypatch.setattr(matrix, "runs", lambda study, scale: planned)
    with pytest.raises(SystemExit) as stop:
        main("entropy_trend", "ci", tmp_path, any_runs=not named)
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: run folder is damaged: ") and problem in line
    assert f"(in {damaged})" in line and f"delete the folder {path}" in line
    assert not list(folder.glob("*.csv"))
