"""From run folders to tables: kept runs give the committed tables, effects that are planted come out, nothing is
dropped, and what is damaged is refused in one line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from edgc.errors import UserError
from experiments.analyse import (
    entropy_trend,
    methods,
    policies,
    rank_sweep,
    runs,
    sampling_ablation,
    statistics,
    tables,
    window_ablation,
)
from experiments.analyse.__main__ import analyse, main
from experiments.analyse.acting import decision_columns
from experiments.spec import matrix
from experiments.verdicts import archive
from tests.unit.conftest import REFERENCE, RESTORED
from tests.unit.invented_runs import decisions, edgc, run, steps

STUDY = "window_ablation"
NAMES = ["w4-s1", "w16-s1"]


def read(folder: Path, name: str) -> pd.DataFrame:
    return pd.read_csv(folder / f"{name}.csv")


@pytest.mark.parametrize(("scale", "study"), RESTORED)
def test_kept_runs_give_the_committed_tables(kept_results: Path, scale: str, study: str) -> None:
    folder, definition = kept_results / scale / study, matrix.load_study(study)
    assert sorted(path.name for path in folder.glob("*.csv")) == sorted(definition.tables)
    for name in definition.results:
        assert (folder / name).read_bytes() == (REFERENCE / scale / study / name).read_bytes(), name
    curves, table = read(folder, "curves"), read(folder, "table")
    assert set(zip(table["variant"], table["seed"], strict=True)) == set(
        zip(curves["variant"], curves["seed"], strict=True)
    )


def test_gaps_bytes_and_intervals_are_those_of_the_runs_summaries(kept_results: Path) -> None:
    folder = kept_results / "workstation" / "orthonormal_q"
    summaries = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("*/summary.json")}
    table = read(folder, "table")
    for row in table.itertuples():
        own, plain = summaries[f"{row.variant}-s{row.seed}"], summaries[f"none-s{row.seed}"]
        assert row.gap_nats == pytest.approx(own["validation_loss"] - plain["validation_loss"], abs=1e-9)
        assert row.bytes_ratio == pytest.approx(own["bytes_total"] / own["bytes_dense_total"])
        assert row.bytes_ratio_bf16 == pytest.approx(2 * own["bytes_total"] / own["bytes_dense_total"])
    summary = read(folder, "summary").set_index("variant")
    assert len(summary) > 2 and pd.isna(summary.loc["none", "verdict"])
    for variant, group in table[table["variant"] != "none"].groupby("variant"):
        gaps, row = group["gap_nats"], summary.loc[variant]
        assert (row["n"], row["n_ok"]) == (len(gaps), len(gaps))
        low, high = stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), stats.sem(gaps))
        expected = (gaps.mean(), gaps.std(), low, high)
        assert row[["gap_nats_mean", "gap_nats_sd", "gap_nats_low", "gap_nats_high"]].tolist() == pytest.approx(
            expected
        )
    ends = {name.rpartition("_")[0] for name in summary.columns if name.endswith(("_low", "_high"))}
    assert ends == {"gap_nats"}, "only differences paired by seed have an interval"


def test_runs_that_diverged_or_failed_stay_and_count_for_nothing() -> None:
    found = [run("none", seed, loss=5.0 + seed) for seed in (1, 2, 3)]
    found += [run("r4", seed, loss=5.1 + seed, compression={"method": "powersgd", "rank": 4}) for seed in (1, 2)]
    found.append(run("r4", 3, status="diverged", loss=None, compression={"method": "powersgd", "rank": 4}))
    found[-1].summary["error"] = "loss is not finite"
    found += [run("idle", s, loss=6 + s, compression=edgc(), events=decisions([64, 64, 64, 64])) for s in (1, 2, 3)]
    written = methods.tables(found)
    table = written["table"].set_index(["variant", "seed"])
    assert len(table) == len(found) == len(written["timings"])
    assert table.loc[("r4", 3), "status"] == "diverged" and table.loc[("r4", 3), "error"] == "loss is not finite"
    assert math.isnan(table.loc[("r4", 3), "gap_nats"]) and table.loc[("none", 2), "gap_nats"] == 0
    summary = written["summary"].set_index("variant")
    assert (summary.loc["r4", "n"], summary.loc["r4", "n_ok"]) == (3, 2)
    assert summary.loc["r4", "gap_nats_mean"] == pytest.approx(0.1)
    assert summary.loc["idle", "verdict"] == "not tested" and summary.loc["none", "verdict"] == ""
    curves = tables.curves(found)
    assert list(curves.columns[:4]) == ["variant", "label", "seed", "status"] and curves.empty


@pytest.mark.parametrize("compression", [{"pipeline": {"rank": 8}}, {"fused_embedding": True}])
def test_a_run_that_compresses_between_stages_is_no_baseline(compression: dict[str, Any]) -> None:
    assert run("none").plain and not run("other", compression={"method": "none", **compression}).plain


def test_curves_accumulate_bytes_and_keep_every_rank_change_and_evaluation(kept_results: Path) -> None:
    folder = kept_results / "workstation" / "policies"
    item = runs.load_run(folder / "one_cqm-s11")
    curve = read(folder, "curves").query("variant == 'one_cqm' and seed == 11").set_index("iteration")
    assert curve["bytes"].iloc[-1] == item.summary["bytes_total"]
    ranks = item.stages[item.stages["stage"] == 0].set_index("iteration")["rank"]
    changes = ranks.index[ranks.fillna(-1).diff() != 0]
    assert set(changes) <= set(curve.index) and set(item.evaluations["iteration"]) <= set(curve.index)
    entropies = item.stages[item.stages["stage"] == 0].set_index("iteration")["entropy"]
    end, window = curve.index[-1], item.edgc.window
    expected = entropies.loc[end - window + 1 : end].mean()  # nats, of those sampled in the last window's length
    assert curve.loc[end, "entropy_0"] == pytest.approx(expected)
    rows = statistics.thin(100_000, keep=[12_345])
    assert len(rows) <= statistics.CURVE_POINTS + 3 and {0, 12_345, 99_999} <= set(rows)


def test_a_policy_is_compared_with_its_own_ranks_in_another_order(kept_results: Path) -> None:
    folder = kept_results / "workstation" / "policies"
    losses = read(folder, "table").pivot(index="seed", columns="variant", values="validation_loss")
    pairs = read(folder, "pairs").pivot(index="seed", columns=["variant", "rival"], values="difference_nats")
    compared = read(folder, "comparisons").set_index(["variant", "rival"])
    for rival, other in (("fixed rank", "one_even"), ("no compression", "one_none")):
        differences = losses["one_cqm"] - losses[other]
        assert pairs["one_cqm", rival].tolist() == pytest.approx(differences.tolist(), abs=1e-8)
        interval = stats.t.interval(0.95, len(differences) - 1, differences.mean(), stats.sem(differences))
        found = compared.loc[("one_cqm", rival)]
        assert found[["difference_low", "difference_high"]].tolist() == pytest.approx(interval, abs=1e-8)


def test_how_far_the_entropy_was_at_rest_when_warm_up_ended() -> None:
    events = decisions([None, None, None, 24, 20, 16])
    for i, entropy in enumerate((-6.0, -5.0, -5.5, -5.25, -5.5, -6.25)):
        events["decision"][i] |= {"entropy": [entropy], "phase": "active" if i > 2 else "warmup"}
    pairs = policies.tables([run("none"), run("cqm", compression=edgc(), events=events)])["pairs"]
    assert pairs["entropy_change_before"].tolist() == [-0.5] and pairs["entropy_change_after"].tolist() == [-1.0]


def test_shuffles_are_averaged_and_int8_stands_beside_its_own_ranks_in_fp32() -> None:
    moving = decisions([24, 20, 16, 12], reason="warm-up ends: entropy stable within 0.0911 nats; rank 24")
    found = [run("none"), run("cqm", loss=5.01, compression=edgc(), events=moving)]
    for variant, order, loss in (("s1", "shuffled", 5.02), ("s2", "shuffled", 5.04), ("r", "reversed", 5.09)):
        follows = {"variant": "cqm", "order": order}
        found.append(run(variant, loss=loss, compression={"method": "sign"}, follows=follows))
    found.append(run("cqm_int8", loss=5.03, compression=edgc(factor_dtype="int8"), events=moving))
    pairs = policies.tables(found)["pairs"].set_index(["variant", "rival"])
    assert set(pairs["warm_up_ended_by"]) == {"entropy stable"}
    differences = pairs["difference_nats"]
    expected = {"no compression": 0.01, "shuffled": -0.02, "reversed": -0.08, "placebos": 5.01 - 15.15 / 3}
    assert differences["cqm"].to_dict() == pytest.approx(expected)
    assert differences["cqm_int8"].to_dict() == pytest.approx({"no compression": 0.03, "fp32 factors": 0.02})


def test_a_policy_is_judged_over_the_seeds_that_it_and_its_rival_have_and_if_it_acted() -> None:
    moving, still = decisions([24, 20, 16, 12]), decisions([64] * 4)
    found = [run("none", seed, loss=5.0) for seed in (1, 2, 3)]
    for seed, cqm, other in ((1, 0.010, "ok"), (2, 0.020, "failed"), (3, 0.030, "ok")):
        found.append(run("cqm", seed, loss=5 + cqm, compression=edgc(), events=still if seed == 1 else moving))
        for order, status in (("even", "ok"), ("reversed", other)):
            found.append(run(order, seed, status=status, loss=5 + 2 * cqm, compression={"method": "sign"},
                             follows={"variant": "cqm", "order": order}))  # fmt: skip
    rows = pd.DataFrame([row for one in found if one.variant == "cqm" for row in policies.pairs(one, found)])
    compared = pd.DataFrame(policies.comparisons(rows)).set_index("rival")
    assert compared["n"].to_dict() == {"no compression": 3, "fixed rank": 3, "reversed": 2}
    assert compared.loc["reversed", "rival_gap_nats"] == pytest.approx((0.02 + 0.06) / 2)
    assert compared["seeds_acted"].to_dict() == {"no compression": 2, "fixed rank": 2, "reversed": 1}
    assert compared.loc["reversed", "verdict"] == "not tested" != compared.loc["fixed rank", "verdict"]


def test_runs_of_one_seed_are_compared_in_their_own_setting() -> None:
    found = []
    for setting, plain in (("one", 5.0), ("two", 6.0)):
        name, follows = f"{setting}_cqm", {"variant": f"{setting}_cqm", "order": "line"}
        found.append(run(f"{setting}_none", loss=plain, setting=setting))
        found.append(run(name, loss=plain + 0.01, setting=setting, compression=edgc(), events=decisions([24, 20, 16])))
        found.append(run(f"{setting}_line", loss=plain + 0.04, setting=setting, compression=edgc(), follows=follows))
    written = policies.tables(found)
    assert written["table"]["gap_nats"].tolist() == pytest.approx([0, 0.01, 0.04] * 2)
    pairs = written["pairs"].query("variant in ['one_cqm', 'two_cqm']")
    assert list(zip(pairs["variant"], pairs["rival"], strict=True)) == [
        (f"{setting}_cqm", rival) for setting in ("one", "two") for rival in ("no compression", "line")
    ]
    assert pairs["difference_nats"].tolist() == pytest.approx([0.01, -0.03] * 2)
    assert pairs["rival_gap_nats"].dropna().tolist() == pytest.approx([0.04, 0.04])


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
    [found] = policies.comparisons(rows)
    assert found["verdict"] == verdict
    [found] = policies.comparisons(rows.assign(rival_gap_nats=0.009))
    assert found["verdict"] == (verdict if abs(differences[0]) > 0.005 else "cannot tell")


def test_the_same_start_is_the_same_to_the_last_bit(kept_results: Path) -> None:
    folder = kept_results / "workstation" / "policies"
    item, other = (runs.load_run(folder / name) for name in ("one_cqm-s11", "one_even-s11"))
    assert policies.same_start(item, other)
    other.steps.loc[17, "loss"] = math.nextafter(other.steps.loc[17, "loss"], math.inf)
    assert not policies.same_start(item, other)


def test_decisions_and_limits_are_counted() -> None:
    row = decision_columns(run("x", compression=edgc(), events=decisions([20, 16, 72, 72, None])))
    assert (row["decisions"], row["rank_changes"], row["decisions_outside_limits"]) == (5, 3, 2)
    assert row["ranks_stage0"] == "20>16>72>72>dense" and (row["r_min"], row["r_max"]) == (4, 64)
    gate = {"iteration": 65, "phase": "active", "ranks": [28], "r_min": 4, "r_max": 64}
    events = decisions([20, 16, 72, 72, None])
    events["decision"].insert(1, gate)  # what the cost gate decides inside a window
    assert decision_columns(run("x", compression=edgc(), events=events)) == row
    events = decisions([64, 60, 52, 44, 44], window=10)
    for event, target in zip(events["decision"], (None, 60.0, 40.0, 10.0, math.nan), strict=True):
        event |= {"target": target, "r_min": 16}
    # The rank in use is as far behind as it is from what its window asks for.
    found = decision_columns(run("x", compression=edgc(10, step_limit=8), events=events))
    assert found["lag_ranks"] == pytest.approx((4 + 20 + 36) / 3)
    assert found["share_limited"] == pytest.approx(2 / 3)


def test_window_correlation_is_the_planted_one() -> None:
    rng = np.random.default_rng(1)
    entropy = -6 + 1.5 * np.exp(-np.arange(200) / 15)
    exact, noisy = steps(entropy, entropy), steps(entropy, entropy + rng.normal(0, 3, 200))
    rows = [run(name, compression=edgc(window), events=events)
            for name, window, events in (("exact", 20, exact), ("noisy", 20, noisy), ("short", 90, exact))]  # fmt: skip
    table = window_ablation.tables(rows)["table"].set_index("variant")
    assert table.loc["exact", "cc"] == pytest.approx(1) and table.loc["exact", "rmse_nats"] == 0
    assert table.loc["exact", "windows"] == 10 and table.loc["noisy", "cc"] < 0.9
    assert math.isnan(table.loc["short", "cc"]), "two windows of 90 in 200 iterations"
    assert "2 usable windows, 3 needed" in table.loc["short", "cc_note"]


def test_windowed_means_are_those_of_the_steps_and_a_larger_tolerance_never_ends_warm_up_later(
    kept_results: Path,
) -> None:
    folder = kept_results / "ci" / "window_ablation"
    for _, rows in read(folder, "warm_up").groupby(["variant", "seed"]):
        assert rows["warm_up_ends"].is_monotonic_decreasing
    row = read(folder, "trajectories").query("stage == 0 and window == 3").iloc[0]
    item = runs.load_run(folder / f"{row['variant']}-s{row['seed']}")
    part = item.stages[(item.stages["stage"] == 0)]
    part = part[part["iteration"].between(3 * row["length"] + 1, 4 * row["length"])]
    assert row["iteration"] == 4 * row["length"]
    assert row[["entropy_full", "entropy"]].tolist() == pytest.approx(part[["entropy_full", "entropy"]].mean().tolist())


def test_sampling_tables_count_differing_decisions_and_cost() -> None:
    quiet = np.full(200, -6.0)

    def sampled(alpha: float, beta: float, ranks: list[int], window: int) -> runs.Run:
        compression = edgc(20) | {"entropy": {"iteration_rate": alpha, "entry_rate": beta}}
        events = steps(quiet, quiet) | decisions(ranks, window)
        for event in events["step"]:
            event["seconds"] = 0.1
            event["stages"][0]["seconds_entropy"] = 0.01 * beta * (event["iteration"] % round(1 / alpha) == 0)
        return run(f"a{alpha:g}_b{beta:g}", compression=compression, events=events)

    found = [sampled(1.0, 1.0, [24, 20, 16, 12, 8, 8], 20), sampled(0.1, 0.25, [24, 20, 12], 20)]
    written = sampling_ablation.tables(found)
    table = written["table"].set_index("alpha")
    assert table.loc[1.0, "decisions_differing"] == 0
    assert table.loc[0.1, ["decisions_differing", "decisions_compared"]].tolist() == [1 + 3, 6]
    assert table.loc[0.1, "largest_rank_difference"] == 4
    # 20 of the 195 counted steps measure, at a quarter of the cost.
    assert written["timings"][1]["change_percent"] == pytest.approx(100 * (20 / 195 / 4 - 1))


def test_the_line_and_the_limits_are_those_of_a_fit_by_hand(kept_results: Path) -> None:
    folder = kept_results / "workstation" / "rank_sweep"
    timings = read(folder, "timings").query("kind == 'total' and stage == 0")
    best = timings.loc[timings.groupby("rank", dropna=False)["seconds_median"].idxmin()]
    compressed, dense = best.dropna(subset="rank"), best[best["rank"].isna()]["seconds_median"].item()
    slope, fixed = np.polyfit(compressed["rank"], compressed["seconds_median"], 1)
    row = read(folder, "fit").query("kind == 'total' and stage == 0").iloc[0]
    assert row[["seconds_per_rank", "seconds_fixed"]].tolist() == pytest.approx([slope, fixed], rel=1e-6)
    assert row["seconds_uncompressed"] == pytest.approx(dense)
    assert row["rank_where_slower"] == pytest.approx(max(0.0, (dense - fixed) / slope))
    limits = read(folder, "limits").query("kind == 'modelled network'")
    for _, rows in limits.groupby("stage"):
        assert rows.sort_values("megabits")["r_max"].dropna().is_monotonic_decreasing
    assert ((limits["r_max"] % 4 == 0) | limits["r_max"].isna()).all()
    late = runs.load_run(folder / "r16-s1").stages
    late = late[late["iteration"] > late["iteration"].max() / 2]
    row = read(folder, "table").set_index(["variant", "seed"]).loc[("r16", 1)]
    assert row["worker_error_median"] == pytest.approx(late["worker_error"].median())


def test_r_max_is_where_compressing_stops_to_be_quicker() -> None:
    found = []
    for rank in (None, 4, 8, 16):
        about = {"seconds_compress": 1e-3 * (rank or 0), "seconds_decompress": 0.2e-3 * (rank or 0), "rank": rank}
        about |= {"seconds_communicate": 2e-3 + 0.5e-3 * rank if rank else 60e-3, "bytes": 1e4 * (rank or 100)}
        compression = {"method": "powersgd", "rank": rank} if rank else {"method": "none"}
        found.append(run(f"r{rank}", compression=compression, events=steps(np.zeros(20), np.zeros(20), **about)))
    limits = rank_sweep.tables(found)["limits"].set_index("kind")
    # (60 - 2) / 1.7 = 34.1, which no run had.
    assert limits.loc["measured", "crossing"] == pytest.approx(58 / 1.7)
    assert limits.loc["measured", ["r_max", "r_min", "extrapolated"]].tolist() == [32, 8, True]
    for row in limits.loc["modelled network"].itertuples():
        second = 8 / (row.megabits * 1e6)  # per byte; of the times only the work of 1.2 ms per rank counts
        assert row.crossing == pytest.approx(1e6 * second / (1.2e-3 + 1e4 * second), rel=1e-6)


def test_a_seed_beside_other_work_does_not_move_the_line() -> None:
    rows = [
        {"status": "ok", "stage": 0, "variant": f"r{rank}", "seed": seed, "rank": rank, "kind": kind}
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
    times = pd.DataFrame({"stage": 0, "rank": rank, "s": slow * (rank or 1.0)} for rank in (None, 4) for slow in (3, 1))
    assert list(rank_sweep.least(times, times["s"])["s"]) == [1.0, 4.0]
    assert rank_sweep.linear([4, 8, 16], [16.0, 64.0, 256.0])["residual_largest_share"] > 0.2, "T is no line"
    assert math.isnan(rank_sweep.linear([4, 4], [1.0, 1.1])["seconds_per_rank"])


def test_entropy_over_groups_is_weighted_by_size_and_sampling_is_judged(tmp_path: Path) -> None:
    kept = REFERENCE / "workstation" / "entropy_trend"
    for name in ("gpt-s1", "bert-s1"):
        (tmp_path / name).mkdir()
        for file, content in archive.read(kept, name).items():
            (tmp_path / name / file).write_bytes(content)
    shutil.copytree(tmp_path / "gpt-s1", tmp_path / "lost-s1", ignore=shutil.ignore_patterns("tensors.parquet"))
    analyse("entropy_trend", tmp_path)
    keys = ["estimator", "group"]
    for name in ("table", "moments"):
        committed, again = read(kept, name).query("seed == 1"), read(tmp_path, name)
        for variant in ("gpt", "bert"):
            pair = [rows[rows["variant"] == variant].reset_index(drop=True) for rows in (committed, again.iloc[:-1])]
            pd.testing.assert_frame_equal(*pair, check_dtype=False)
    assert again.iloc[-1]["group"] == "<all>" and read(tmp_path, "table").iloc[-1]["verdict"] == "no probes"
    probe = pd.read_parquet(tmp_path / "gpt-s1" / "tensors.parquet")
    first = probe[(probe["iteration"] == probe["iteration"].min()) & (probe["parameter"] != "<model>")]
    rows = read(tmp_path, "trend").query("variant == 'gpt'")
    row = rows[(rows["group"] == "<all>") & (rows["iteration"] == first["iteration"].iloc[0])].iloc[0]
    assert row["entropy_histogram"] == pytest.approx(np.average(first["entropy_histogram"], weights=first["numel"]))
    assert row["parameters"] == first["parameter"].nunique() and set(keys) <= set(read(tmp_path, "table"))


def test_the_gaussian_link_is_judged_against_the_end_of_warm_up() -> None:
    at = pd.Series([1.0, 50.0, 100.0, 500.0, 1000.0])
    found = entropy_trend.link(at, pd.Series([1.0, 1.3, 1.4, 1.45, 1.38]))
    assert (found["link_error_early"], found["link_error_late"]) == pytest.approx((0.4, 0.05))
    assert found["form_offset_end"] == pytest.approx(1.38 - 1.4189385)
    assert math.isnan(entropy_trend.link(at, at * math.nan)["link_error_late"])


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        (lambda t: 5 - 0.02 * t, "falls"),
        (lambda t: 4 + math.exp(-t / 5), "falls"),
        (lambda t: 4 + math.exp(-t / 5) + 0.01 * t, "falls, then rises"),
        (lambda t: 4 + 0.02 * t, "rises"),
        (lambda t: 4 + 0.01 * math.sin(t), "flat"),
    ],
)
def test_trend_verdicts(values: object, verdict: str) -> None:
    iterations = list(range(0, 100, 2))
    found = entropy_trend.describe(iterations, [values(t) for t in iterations])  # type: ignore[operator]
    assert found["verdict"] == verdict
    few = entropy_trend.describe([1, 2, 3, 4], [values(1), math.nan, values(3), values(4)])  # type: ignore[operator]
    assert (few["probes"], few["verdict"]) == (3, "too few probes")
    if verdict == "falls, then rises":  # d/dt vanishes at t = 5 log 20 = 15
        assert 12 <= found["iteration_minimum"] <= 18
        assert found["slope_after_per_100"] == pytest.approx(1, abs=0.1)


def test_seeds_of_a_condition_are_summarised_with_what_each_says() -> None:
    rows = [
        {"variant": "gpt", "label": "GPT", "architecture": "gpt", "group": group, "seed": seed, "status": status,
         "start": -float(seed), "verdict": verdict}
        for group in ("<all>", "qkv")
        for seed, status, verdict in [(1, "ok", "falls"), (2, "ok", "falls, then rises"), (3, "ok", "falls"),
                                      (4, "failed", None)]
    ]  # fmt: skip
    found = entropy_trend.over_seeds(pd.DataFrame(rows), ("group",), ("start",), "verdict").set_index("group")
    row = found.loc["qkv"]
    assert (row["n"], row["n_ok"], row["start_mean"], row["start_min"], row["start_max"]) == (4, 3, -2.0, -3.0, -1.0)
    assert row["verdict"] == "falls (2); falls, then rises (1)"


@pytest.fixture
def folder(kept_results: Path, tmp_path: Path) -> Path:
    """Two runs of a study, which a test may change."""
    for name in NAMES:
        shutil.copytree(kept_results / "ci" / STUDY / name, tmp_path / "ci" / STUDY / name)
    return tmp_path / "ci" / STUDY


def test_missing_folder_missing_run_and_unknown_study_name_the_fix(folder: Path, tmp_path: Path) -> None:
    for study, place, names, message in (
        ("methods", tmp_path / "methods", None, r"no results.*snakemake -c2 methods"),
        (STUDY, folder, [NAMES[0], "absent-s1"], "1 of 2 runs missing, first absent-s1"),
        ("method", folder, None, "did you mean methods"),
        ("zero_shot", folder, None, r"no analysis for study zero_shot .*zero_shot.yaml.* methods"),
        ("equal_bytes", folder, None, r"frozen at .*git checkout"),
    ):
        with pytest.raises(UserError, match=message):
            analyse(study, place, names)


def test_command_line_takes_the_study_files_runs_and_reports_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planned = [run for run in matrix.runs(STUDY, "ci") if run.name in NAMES]
    planned.sort(key=lambda run: NAMES.index(run.name), reverse=True)
    monkeypatch.setattr(matrix, "runs", lambda study, scale: planned)
    main(STUDY, "ci", folder.parents[1])
    order = [name.rpartition("-")[0] for name in NAMES]
    assert list(read(folder, "table")["variant"]) == order[::-1], "in the study's order"
    shutil.rmtree(folder / NAMES[0])
    with pytest.raises(SystemExit) as stop:
        main(STUDY, "ci", folder.parents[1])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: 1 of 2 runs missing")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("metrics.jsonl", lambda content: content[: content.rindex(b"\n", 0, -1) + 1]),
        ("metrics.jsonl", None),
        ("summary.json", lambda content: content[:-9]),
        ("summary.json", None),
        ("tensors.parquet", lambda content: content[:-20]),
    ],
)
def test_a_damaged_run_is_refused_and_no_table_is_written(
    folder: Path, name: str, change: Callable[[bytes], bytes] | None
) -> None:
    """Without a manifest, as a restored run."""
    damaged = folder / NAMES[0] / name
    if name == "tensors.parquet":
        pd.DataFrame({"stage": [0]}).to_parquet(damaged)
    content = damaged.read_bytes()
    damaged.unlink()
    if change is not None:
        damaged.write_bytes(change(content))
    for table in folder.glob("*.csv"):
        table.unlink()
    with pytest.raises(UserError, match=r"run folder is damaged: .*is (missing|cut short)") as told:
        _ = runs.load_run(folder / NAMES[0]).tensors
        analyse(STUDY, folder)
    assert f"(in {damaged})" in str(told.value) and f"delete the folder {damaged.parent}" in str(told.value)
    assert not list(folder.glob("*.csv"))
