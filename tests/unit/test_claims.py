"""Verdicts follow the rules of paper_claims.yaml, both ways, and missing evidence never becomes a verdict."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from edgc.errors import UserError
from experiments.analyse import correlation
from experiments.verdicts import claims
from tests.unit.conftest import REFERENCE


@pytest.fixture
def known() -> dict[str, claims.Claim]:
    return {claim.id: claim for claim in claims.load_claims()}


def put(root: Path, relative: str, rows: list[dict[str, Any]]) -> None:
    path = root / relative
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


def run(variant: str, seed: int = 1, status: str = "ok", **more: Any) -> dict[str, Any]:
    fixed = {"variant": variant, "label": variant, "seed": seed, "status": status, "factor_dtype": "fp32"}
    return fixed | {"ranks_used": 5, "windows_inside": 0.6, "acted": True} | more


def cqm(seed: int, **more: Any) -> dict[str, Any]:
    return run("edgc_cqm", seed, method="edgc", policy="cqm", gap_nats=0.0, bytes_ratio=0.3) | more


def rivals(differences: dict[str, float], verdicts: dict[str, str], n: int = 3) -> list[dict[str, Any]]:
    about = {"variant": "cqm", "label": "EDGC (CQM)", "n": n, "seeds_acted": n, "bytes_over_rival": 0.4}
    spread = {rival: (value - 0.001, value + 0.001) for rival, value in differences.items()}
    return [
        about
        | {"rival": rival, "difference_nats": value, "verdict": verdicts[rival]}
        | dict(zip(("difference_low", "difference_high"), spread[rival], strict=True))
        for rival, value in differences.items()
    ]


@pytest.mark.parametrize("scale", ["ci", "workstation"])
def test_kept_tables_give_the_committed_verdicts_and_a_second_call_the_same(
    scale: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results" / "reference"
    shutil.copytree(REFERENCE / scale, results / scale, ignore=shutil.ignore_patterns("runs", "*.parquet", "*.png"))
    for _ in range(2):
        claims.main(scale, results, show=True)
        assert (results / scale / "claims.csv").read_bytes() == (REFERENCE / scale / "claims.csv").read_bytes()
    assert f"Claims at scale {scale}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gaps", "word", "verdict"),
    [
        ((0.0010, 0.0012, 0.0011), "worse within the margin", "supported"),
        ((0.0010, -0.0012, 0.0001), "on par", "supported"),
        ((0.004, -0.004, 0.002), None, "not testable here"),  # as small on average, but who knows
        ((0.010, 0.011, 0.012), "worse", "not supported"),
        ((-0.010, -0.011, -0.012), "better", "supported"),
        ((0.001,), None, "not testable here"),
    ],
)
def test_accuracy_follows_two_one_sided_tests(
    tmp_path: Path, known: dict[str, claims.Claim], gaps: tuple[float, ...], word: str | None, verdict: str
) -> None:
    rows = [cqm(seed, gap_nats=gap) for seed, gap in enumerate(gaps, 1)]
    # Another policy, other factors and a diverged seed must not count, and the diverged one must be named.
    rows.append(cqm(1, variant="edgc_cqm_int8", gap_nats=9.0, factor_dtype="int8"))
    rows.append(cqm(1, variant="edgc_released", policy="released", gap_nats=9.0))
    rows.append(cqm(9, status="diverged", gap_nats=None))
    put(tmp_path / "ci", "methods/table.csv", rows)
    row = claims.judge(known["accuracy_preserved"], "ci", tmp_path / "ci")
    assert (row["verdict"], row["our_value"]) == (verdict, word)
    assert "edgc_cqm-s9 diverged" in row["note"] and f"mean gap {sum(gaps) / len(gaps):+.4f} nats" in row["note"]
    assert row["evidence"] == (f"{tmp_path.name}/ci/methods/table.csv" if word else None)


@pytest.mark.parametrize(
    ("seeds_acted", "verdict"), [((True, True, False), "supported"), ((True, False, False), "not tested")]
)
def test_a_policy_that_did_not_act_was_not_tested(
    tmp_path: Path, known: dict[str, claims.Claim], seeds_acted: tuple[bool, ...], verdict: str
) -> None:
    put(tmp_path, "methods/table.csv", [cqm(seed, acted=acted) for seed, acted in enumerate(seeds_acted, 1)])
    put(tmp_path, "zero_shot/summary.csv", [zero_shot_row("task", "on par")])
    for claim in ("accuracy_preserved", "zero_shot"):
        found = claims.judge(known[claim], "ci", tmp_path)
        assert found["verdict"] == verdict
        assert ("the policy did not act" in found["note"]) is (verdict == "not tested")


def test_without_any_evidence_nothing_is_testable(tmp_path: Path, known: dict[str, claims.Claim]) -> None:
    rows = [claims.judge(claim, "workstation", tmp_path) for claim in known.values()]
    assert {row["verdict"] for row in rows} == {"not testable here"}
    assert all(row["our_value"] is None and row["note"].startswith("no evidence") for row in rows)


def correlations(seed: int, cc: float, kind: str, window: int = 20, samples: int = 2, **more: Any) -> dict[str, Any]:
    about = {"stage": 0, "span": "after warm-up", "alpha": 0.1, "windows": 16, "from_window": window}
    row = {"window": samples * 10, "samples": samples, "kind": kind, "cc": cc}
    return run("w20_every", seed, **about | row | more)


def put_correlations(folder: Path, rows: list[dict[str, Any]]) -> None:
    put(folder, "window_ablation/correlation.csv", rows)
    table = pd.DataFrame(rows).assign(cc_model=0.9)
    put(folder, "window_ablation/correlation_summary.csv", correlation.summary(table).to_dict("records"))


def test_window_claim_is_of_the_papers_samples_and_says_what_is_extrapolated(
    tmp_path: Path, known: dict[str, claims.Claim]
) -> None:
    rows = [correlations(seed, 0.8, "measured") for seed in (1, 2, 3)]
    rows += [correlations(1, 0.5, "measured", alpha=0.25), correlations(1, 0.5, "extrapolated", samples=100, stage=1)]
    rows += [correlations(seed, cc, "extrapolated", samples=100) for seed, cc in ((1, 0.99), (2, 0.93), (3, 0.97))]
    put_correlations(tmp_path, rows)
    found = claims.judge(known["window_correlation"], "ci", tmp_path)
    assert (found["our_value"], found["verdict"], found["n"]) == ("0.93 to 0.99", "partly", 3)
    assert (found["runs"], found["windows"]) == (3, 16)
    assert "no evidence" in claims.judge(known["window_correlation_whole_run"], "ci", tmp_path)["note"]
    put_correlations(tmp_path, [row for row in rows if row["cc"] != 0.93])
    found = claims.judge(known["window_correlation"], "ci", tmp_path)
    assert (found["our_value"], found["verdict"]) == ("0.97 to 0.99", "partly"), "extrapolated: in part at best"
    rows = [correlations(1, 0.99, "extrapolated", samples=100, span="whole run", from_window=500)]
    rows += [correlations(1, 0.96, "measured", window=1000, samples=100, windows=207, span="whole run")]
    put_correlations(tmp_path, rows)
    found = claims.judge(known["window_correlation_whole_run"], "ci", tmp_path)
    assert (found["our_value"], found["verdict"], found["n"]) == (0.96, "supported", 1), "measured comes first"
    put_correlations(tmp_path, [correlations(1, 0.8, "measured")])
    assert claims.judge(known["window_correlation"], "ci", tmp_path)["verdict"] == "not testable here", "too short"


def cost(change: float) -> dict[str, list[dict[str, Any]]]:
    rows = [run("full", alpha=1.0, beta=1.0, change_percent=0.0, share_of_step=0.1)]
    rows += [run(f"b{beta}", alpha=0.1, beta=beta, change_percent=percent, share_of_step=0.01)
             for beta, percent in ((0.25, change), (1.0, -99.0))]  # fmt: skip
    return {"sampling_ablation/timings.csv": rows}


def trends(*words: str) -> dict[str, list[dict[str, Any]]]:
    about = {"start": -4, "end": -5, "estimator": "histogram", "group": "<all>"}
    rows = [run("gpt", seed, architecture="gpt", verdict=word, **about) for seed, word in enumerate(words)]
    return {"entropy_trend/table.csv": [*rows, run("bert", architecture="bert", verdict="falls", **about)]}


def moments() -> dict[str, list[dict[str, Any]]]:
    more = {"group": "<all>", "near_zero_start": 0.01, "near_zero_end": 0.2, "correlation_layers_late": 0.1}
    rows = [run(name, architecture=name, centring=f"{word} near zero", correlation_layers_early=early, **more)
            for name, word, early in (("gpt", "more", 0.3), ("bert", "fewer", 0.13))]  # fmt: skip
    return {"entropy_trend/moments.csv": rows}


def acting(*words: str) -> dict[str, list[dict[str, Any]]]:
    found = {"methods/table.csv": [cqm(seed, acted=False, ranks_used=1) for seed in (1, 2, 3)]}
    for study, gap, word in zip(("policies", "policies_bert"), (0.001, 0.008), words, strict=True):
        found[f"{study}/comparisons.csv"] = rivals({"no compression": gap}, {"no compression": word})
    return found


def settings(*words: str) -> dict[str, list[dict[str, Any]]]:
    """The same of one study, a setting a word."""
    rows = [rivals({"no compression": 0.001}, {"no compression": word}) for word in words]
    names = ("one_cqm", "one_wide_cqm")
    return {
        "policies/comparisons.csv": [r | {"variant": n} for n, group in zip(names, rows, strict=True) for r in group]
    }


@pytest.mark.parametrize(
    ("claim", "tables", "our_value", "verdict"),
    [
        ("entropy_cost", cost(-95.0), -95.0, "supported"),
        ("entropy_cost", cost(-80.0), -80.0, "partly"),
        ("entropy_cost", cost(-40.0), -40.0, "not supported"),
        # The run furthest down the rule decides; all of them are told.
        ("entropy_falls_gpt", trends("falls"), "falls", "supported"),
        ("entropy_falls_gpt", trends("falls", "falls, then rises"),
         "falls in 1, falls, then rises in 1 of 2 runs", "partly"),
        ("entropy_falls_gpt", trends("falls", "rises"), "falls in 1, rises in 1 of 2 runs", "not supported"),
        ("entropy_falls_bert", trends("rises"), "falls", "supported"),
        ("gradients_centre_on_zero", moments(),
         "more near zero in 1, fewer near zero in 1 of 2 runs", "not supported"),
        # What BERT's matrices do says nothing of GPT's, and the other way round.
        ("correlated_matrices_early_gpt", moments(), pytest.approx(3), "supported"),
        ("correlated_matrices_early_bert", moments(), pytest.approx(1.3), "partly"),
        # Where the rank moves, setting by setting.
        ("accuracy_preserved", acting("on par", "on par"), "not tested", "not tested"),
        ("accuracy_preserved_acting", acting("on par", "on par"), "on par in 2 of 2 settings", "supported"),
        ("accuracy_preserved_acting", acting("on par", "worse"), "on par in 1, worse in 1 of 2 settings", "partly"),
        ("accuracy_preserved_acting", acting("worse", "worse"), "worse in 2 of 2 settings", "not supported"),
        ("accuracy_preserved_acting", settings("on par", "worse"), "on par in 1, worse in 1 of 2 settings", "partly"),
    ],
)  # fmt: skip
def test_rules_of_measured_claims(
    tmp_path: Path, known: dict[str, claims.Claim], claim: str, tables: dict[str, Any], our_value: object, verdict: str
) -> None:
    for name, rows in tables.items():
        put(tmp_path, name, rows)
    found = claims.judge(known[claim], "workstation", tmp_path)
    assert found["verdict"] == verdict and (verdict == "not tested" or found["our_value"] == our_value)


@pytest.mark.parametrize(
    ("words", "our_value", "verdict"),
    [
        ({"policies": "on par"}, "on par", "not supported"),
        ({"policies": "better", "policies_bert": "on par"}, "better in 1, on par in 1 of 2 settings", "partly"),
        ({"policies": "better", "policies_bert": "not tested"}, "better", "supported"),  # there it did not act
        (
            {"policies": "better", "policies_bert": "not decided"},
            "better in 1, not decided in 1 of 2 settings",
            "partly",
        ),
        ({"policies": "not decided"}, None, "not testable here"),
        ({"policies": "not tested"}, "not tested", "not tested"),
    ],
)
def test_following_entropy_has_to_beat_a_fixed_rank_of_its_bytes(
    tmp_path: Path, known: dict[str, claims.Claim], words: dict[str, str], our_value: str | None, verdict: str
) -> None:
    for place, (study, word) in enumerate(words.items()):
        said = {"fixed rank": word, "placebos": "better", "falling": "worse"}
        rows = rivals({"fixed rank": 0.003, "placebos": -0.004, "falling": 0.002}, said, n=10 - place)
        other = [row | {"variant": "cqm_int8", "verdict": "better"} for row in rows]  # not the paper's method
        put(tmp_path, f"{study}/comparisons.csv", rows + other)
    found = claims.judge(known["entropy_beats_fixed_rank"], "workstation", tmp_path)
    assert (found["our_value"], found["verdict"]) == (our_value, verdict)
    if "supported" in verdict:  # the seeds of the settings that were tested, and the tables of all of them
        tested = [study for study, word in words.items() if word != "not tested"]
        assert (found["n"], found["n_most"]) == ((10, None) if len(tested) == 1 else (9, 10))
        beside = (found["beside"] or "").split("; ") * bool(found["beside"])
        assert {path.split("/")[-2] for path in (found["evidence"], *beside)} == set(tested)


def zero_shot_row(task: str, verdict: str | None, above_chance: bool = True, **more: Any) -> dict[str, Any]:
    row = {"variant": "edgc_cqm", "task": task, "metric": "acc", "primary": True, "verdict": verdict, "n_seeds": 2}
    return row | {"above_chance": above_chance, "gap": -0.004, "margin": 0.02} | more


@pytest.mark.parametrize(
    ("verdicts", "verdict"),
    [
        (("on par", "on par"), "supported"),
        (("on par", "not decided"), "partly"),
        (("on par", "different"), "not supported"),
        (("not decided", "not decided"), "not testable here"),
        ((None, None), "not testable here"),
    ],
)
def test_zero_shot_follows_the_equivalence_test(
    tmp_path: Path, known: dict[str, claims.Claim], verdicts: tuple[str | None, ...], verdict: str
) -> None:
    rows = [zero_shot_row(f"task{index}", word) for index, word in enumerate(verdicts)]
    # A task at chance, a second metric of a task and the released policy do not count.
    rows += [
        zero_shot_row("arc", "on par", above_chance=False),
        zero_shot_row("task0", "different", primary=False),
        zero_shot_row("task0", "different", variant="edgc_released"),
        zero_shot_row("task0", "different", variant="edgc_spectral_int8"),
    ]
    put(tmp_path, "methods/table.csv", [cqm(1), cqm(2), run("edgc_released", acted=False)])
    put(tmp_path, "zero_shot/summary.csv", rows)
    found = claims.judge(known["zero_shot"], "ci", tmp_path)
    assert found["verdict"] == verdict
    if verdict != "not testable here":
        assert (found["n"], found["tasks"]) == (2, len(verdicts))
        assert "not counted: arc" in found["note"]
    put(tmp_path, "zero_shot/summary.csv", [zero_shot_row("arc", "on par", above_chance=False)])
    found = claims.judge(known["zero_shot"], "ci", tmp_path)
    assert (found["verdict"], found["n"]) == ("not testable here", 0), "at chance everywhere"


def test_what_is_simulated_is_told_value_by_value_and_neither_supports_nor_refutes(
    tmp_path: Path, known: dict[str, claims.Claim]
) -> None:
    bandwidths, names = (1, 10, 100), ("communication", "with_compress", "time", "time_overlap")
    saved = {"gpt": (60.0, 50.0, 5.0), "bert": (0.5, 0.6, 0.4), "batch": (0.5, 0.5, 0.5)}
    traces = [
        {"entropy": name, "gbits_per_second": gbits, "share_uncompressed": 0.1}
        | {f"reduction_{what}_percent": percent for what in names}
        | {"reduction_exposed_percent": 2 * percent}
        for name, percents in saved.items()
        for gbits, percent in zip(bandwidths, percents, strict=True)
    ]
    put(tmp_path, "gpt2_12p1b_h100/traces.csv", traces)
    late = {"share_uncompressed": 0.25, "reduction_communication_percent": 47.0, "reduction_exposed_percent": 40.0}
    put(tmp_path, "gpt2_12p1b_h100/traces_late.csv", [row | late for row in traces])
    assumed = [
        {"method": method, "overlap": False, "stage": "slowest", "gbits_per_second": gbits}
        | dict.fromkeys(("reduction_time_percent", "reduction_communication_percent"), percent * (method == "edgc"))
        for method in ("none", "edgc")
        for gbits, percent in zip(bandwidths, (30.0, 20.0, 2.0), strict=True)
    ]
    for name in ("table", "steps"):
        put(tmp_path, f"gpt2_12p1b_h100/{name}.csv", assumed)
    row = claims.judge(known["communication_latency_12p1b"], "ci", tmp_path)
    assert (row["kind"], row["verdict"], row["n"]) == ("simulated", "depends", 0)
    assert (row["bandwidths"], row["entropies"]) == (3, 3)
    assert row["our_value"] == "-60 to -0.4, or of the exposed time -120 to -0.8"
    for text in (
        "the rule holds for 2 of 9 values: gpt at 1, 10 Gbit/s;",
        "-46.45 % itself: gpt between 10 and 100 Gbit/s; of the exposed time: the rule holds for 2 of 9 values:",
        "by windows of a twentieth of the run -47 to -47 %, the rule holds for 9 of 9;",
        "by windows of a twentieth of the run -40 to -40 %, the rule holds for 0 of 9;",
        "warm-up ends after 10 % of the run, and by windows of a twentieth of it after 25 %",
        "at a mean rank assumed half-way -30 to -2 %, -46.45 % at no bandwidth",
    ):  # fmt: skip
        assert text in row["note"]
    note = claims.judge(known["training_time_12p1b"], "ci", tmp_path)["note"]
    assert "-16.13 % itself: gpt between 10 and 100 Gbit/s;" in note
    assert "half-way -30 to -2 %, -16.13 % between 10 and 100 Gbit/s" in note


def test_missing_results_and_bad_rules_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        claims.main("ci", tmp_path / "nowhere")
    assert stop.value.code == 2
    assert "no results at scale ci" in capsys.readouterr().err
    entry, path = yaml.safe_load(claims.CLAIMS.read_text())["claims"][0], tmp_path / "claims.yaml"
    for entries, message in (
        ([entry | {"measure": "guess"}], "measure guess does not exist"),
        ([entry | {"rule": {"supported": {"at_moost": 1}}}], "unknown key"),
        ([entry | {"rule": {"supported": {"at_most": 1, "at_least": 0}}}], "exactly one key"),
        ([entry | {"rule": {"supported": {}}}], "exactly one key"),
        ([entry | {"kind": "measured"}], "in `depends` on what it depends"),
        ([entry | {"depends": ""}], "in `depends` on what it depends"),
        ([entry, entry], "appears twice"),
    ):
        path.write_text(yaml.safe_dump({"claims": entries}, explicit_end=True))
        with pytest.raises(UserError, match=message):
            claims.load_claims(path)
