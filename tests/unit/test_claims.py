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
from experiments.verdicts.claim_measures import MEASURES
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


def test_every_claim_of_the_paper_has_a_rule_and_a_measure(known: dict[str, claims.Claim]) -> None:
    assert {claim.measure for claim in known.values()} <= set(MEASURES)
    assert {"-46.45", "-16.13", "-94.0", "0.94"} <= {str(claim.paper_value) for claim in known.values()}
    for claim in known.values():
        assert claim.kind == ("simulated" if claim.study.startswith("gpt2_") else "measured")


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


def cqm(seed: int, **more: Any) -> dict[str, Any]:
    return run("edgc_cqm", seed, method="edgc", policy="cqm", gap_nats=0.0, bytes_ratio=0.3) | more


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


def test_a_table_that_does_not_say_whether_the_policy_acted_tests_nothing(
    tmp_path: Path, known: dict[str, claims.Claim]
) -> None:
    put(tmp_path, "zero_shot/summary.csv", [zero_shot_row("task", "on par")])
    found = claims.judge(known["zero_shot"], "ci", tmp_path)
    assert found["verdict"] == "not tested" and "methods/table.csv does not exist" in found["note"]
    rows = [{key: value for key, value in cqm(seed).items() if key != "acted"} for seed in (1, 2)]
    put(tmp_path, "methods/table.csv", rows)
    for claim in ("accuracy_preserved", "zero_shot"):
        assert claims.judge(known[claim], "ci", tmp_path)["verdict"] == "not tested"


def test_without_any_evidence_nothing_is_testable(tmp_path: Path, known: dict[str, claims.Claim]) -> None:
    rows = [claims.judge(claim, "workstation", tmp_path) for claim in known.values()]
    assert {row["verdict"] for row in rows} == {"not testable here"}
    assert all(row["our_value"] is None and row["note"].startswith("no evidence") for row in rows)


@pytest.mark.parametrize(("change", "verdict"), [(-95.0, "supported"), (-80.0, "partly"), (-40.0, "not supported")])
def test_entropy_cost(tmp_path: Path, known: dict[str, claims.Claim], change: float, verdict: str) -> None:
    rows = [
        run("full", alpha=1.0, beta=1.0, change_percent=0.0, share_of_step=0.1),
        run("few", alpha=0.1, beta=0.25, change_percent=change, share_of_step=0.01),
        run("other", alpha=0.1, beta=1.0, change_percent=-99.0, share_of_step=0.01),
    ]
    put(tmp_path, "sampling_ablation/timings.csv", rows)
    row = claims.judge(known["entropy_cost"], "ci", tmp_path)
    assert (row["verdict"], row["our_value"]) == (verdict, change)


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


def test_window_claim_prefers_what_is_measured(tmp_path: Path, known: dict[str, claims.Claim]) -> None:
    rows = [correlations(1, 0.99, "extrapolated", samples=100, span="whole run", from_window=500)]
    rows += [correlations(1, 0.96, "measured", window=1000, samples=100, windows=207, span="whole run")]
    put_correlations(tmp_path, rows)
    found = claims.judge(known["window_correlation_whole_run"], "ci", tmp_path)
    assert (found["our_value"], found["verdict"], found["n"]) == (0.96, "supported", 1)
    put_correlations(tmp_path, [correlations(1, 0.8, "measured")])
    assert claims.judge(known["window_correlation"], "ci", tmp_path)["verdict"] == "not testable here", "too short"


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        (["falls"], "supported"),
        (["falls", "falls, then rises"], "partly"),
        (["falls", "rises"], "not supported"),
    ],
)
def test_entropy_trend_takes_the_worst_run(
    tmp_path: Path, known: dict[str, claims.Claim], words: list[str], verdict: str
) -> None:
    about = {"start": -4, "end": -5, "estimator": "histogram", "group": "<all>"}
    rows = [run("gpt", seed, architecture="gpt", verdict=word, **about) for seed, word in enumerate(words)]
    rows.append(run("bert", architecture="bert", verdict="falls", **about))
    put(tmp_path, "entropy_trend/table.csv", rows)
    row = claims.judge(known["entropy_falls_gpt"], "ci", tmp_path)
    # The one furthest down the rule decides; all of them are told.
    told = words[0] if len(words) == 1 else f"{words[0]} in 1, {words[1]} in 1 of 2 runs"
    assert (row["verdict"], row["our_value"]) == (verdict, told)
    assert (row["n"], row["runs"]) == (len(words), len(words))
    assert claims.judge(known["entropy_falls_bert"], "ci", tmp_path)["verdict"] == "supported"


def test_correlation_and_centring(tmp_path: Path, known: dict[str, claims.Claim]) -> None:
    more = {"group": "<all>", "near_zero_start": 0.01, "near_zero_end": 0.2, "correlation_layers_late": 0.1}
    rows = [
        run(name, architecture=name, centring=f"{word} near zero", correlation_layers_early=early, **more)
        for name, word, early in (("gpt", "more", 0.3), ("bert", "fewer", 0.13))
    ]
    put(tmp_path, "entropy_trend/moments.csv", rows)
    row = claims.judge(known["gradients_centre_on_zero"], "ci", tmp_path)
    assert (row["verdict"], row["n"], row["runs"]) == ("not supported", 1, 2)
    # What BERT's matrices do says nothing of GPT's, and the other way round.
    row = claims.judge(known["correlated_matrices_early_gpt"], "ci", tmp_path)
    assert (row["verdict"], row["our_value"]) == ("supported", pytest.approx(3))
    row = claims.judge(known["correlated_matrices_early_bert"], "ci", tmp_path)
    assert (row["verdict"], row["our_value"], row["runs"]) == ("partly", pytest.approx(1.3), 1)


def rivals(differences: dict[str, float], verdicts: dict[str, str], n: int = 3) -> list[dict[str, Any]]:
    about = {"variant": "cqm", "label": "EDGC (CQM)", "n": n, "seeds_acted": n, "bytes_over_rival": 0.4}
    spread = {rival: (value - 0.001, value + 0.001) for rival, value in differences.items()}
    return [
        about
        | {"rival": rival, "difference_nats": value, "verdict": verdicts[rival]}
        | dict(zip(("difference_low", "difference_high"), spread[rival], strict=True))
        for rival, value in differences.items()
    ]


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


@pytest.mark.parametrize(
    ("words", "verdict"),
    [(("on par", "on par"), "supported"), (("on par", "worse"), "partly"), (("worse", "worse"), "not supported")],
)
def test_accuracy_where_the_rank_moves_is_judged_setting_by_setting(
    tmp_path: Path, known: dict[str, claims.Claim], words: tuple[str, str], verdict: str
) -> None:
    put(tmp_path, "methods/table.csv", [cqm(seed, acted=False, ranks_used=1) for seed in (1, 2, 3)])
    for study, gap, word in zip(("policies", "policies_bert"), (0.001, 0.008), words, strict=True):
        put(tmp_path, f"{study}/comparisons.csv", rivals({"no compression": gap}, {"no compression": word}))
    assert claims.judge(known["accuracy_preserved"], "ci", tmp_path)["verdict"] == "not tested"
    found = claims.judge(known["accuracy_preserved_acting"], "workstation", tmp_path)
    assert (found["verdict"], found["n"]) == (verdict, 3)
    once = f"{words[0]} in 1, {words[1]} in 1"
    assert found["our_value"] == f"{f'{words[0]} in 2' if words[0] == words[1] else once} of 2 settings"


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


def test_zero_shot_at_chance_everywhere_is_no_evidence(tmp_path: Path, known: dict[str, claims.Claim]) -> None:
    put(tmp_path, "zero_shot/summary.csv", [zero_shot_row("arc", "on par", above_chance=False)])
    found = claims.judge(known["zero_shot"], "ci", tmp_path)
    assert (found["verdict"], found["n"]) == ("not testable here", 0)


BANDWIDTHS = (1, 10, 100)


def put_traces(root: Path, saved: dict[str, tuple[float, float, float]]) -> None:
    """``saved``: recorded entropy -> percent at each of ``BANDWIDTHS``, of communication and of the step alike."""
    names = ("communication", "with_compress", "time", "time_overlap")
    rows = [
        {"entropy": name, "gbits_per_second": gbits}
        | {f"reduction_{what}_percent": percent - (what == "with_compress") for what in names}
        for name, percents in saved.items()
        for gbits, percent in zip(BANDWIDTHS, percents, strict=True)
    ]
    put(root, "gpt2_12p1b_h100/traces.csv", rows)
    assumed = [
        {"method": method, "overlap": False, "stage": "slowest", "gbits_per_second": gbits}
        | {"reduction_time_percent": percent * (method == "edgc")}
        | {"reduction_communication_percent": percent * (method == "edgc")}
        | {"seconds_step": 8.0, "seconds_exposed": 4.0}
        for method in ("none", "edgc")
        for gbits, percent in zip(BANDWIDTHS, (30.0, 20.0, 2.0), strict=True)
    ]
    put(root, "gpt2_12p1b_h100/table.csv", assumed)
    put(root, "gpt2_12p1b_h100/steps.csv", assumed)


@pytest.mark.parametrize(
    ("saved", "holding"),
    [
        ({"gpt": (60.0, 50.0, 47.0), "bert": (50.0, 50.0, 50.0)}, 6),
        ({"gpt": (60.0, 50.0, 5.0), "bert": (0.5, 0.5, 0.5)}, 2),
        ({"gpt": (46.0, 40.0, 5.0), "bert": (0.5, 0.5, 0.5)}, 0),
    ],
)
def test_what_is_simulated_is_told_value_by_value_and_neither_supports_nor_refutes(
    tmp_path: Path, known: dict[str, claims.Claim], saved: dict[str, tuple[float, float, float]], holding: int
) -> None:
    put_traces(tmp_path, saved)
    row = claims.judge(known["communication_latency_12p1b"], "ci", tmp_path)
    assert (row["kind"], row["verdict"], row["n"]) == ("simulated", "depends", 0)
    assert f"rule holds for {holding} of 6 values" in row["note"]
    assert (row["bandwidths"], row["entropies"]) == (3, 2)
    numbers = [percent for percents in saved.values() for percent in percents]
    # Half of an uncompressed step is exposed there: what the step saves is twice as much of that.
    exposed = f"or of the exposed time {-2 * max(numbers):g} to {-2 * min(numbers):g}"
    assert row["our_value"] == f"{-max(numbers):g} to {-min(numbers):g}, {exposed}"
    assert f"of the other reading {sum(2 * number >= 46.45 for number in numbers)} of 6" in row["note"]


def test_a_grid_says_where_the_number_of_the_paper_lies(tmp_path: Path, known: dict[str, claims.Claim]) -> None:
    put_traces(tmp_path, {"gpt": (60.0, 50.0, 5.0), "bert": (0.5, 0.6, 0.4), "batch": (0.5, 0.5, 0.5)})
    note = claims.judge(known["communication_latency_12p1b"], "ci", tmp_path)["note"]
    assert "the rule holds for 2 of 9 values: gpt at 1, 10 Gbit/s;" in note
    assert "-46.45 % itself: gpt between 10 and 100 Gbit/s;" in note
    assert "at a mean rank assumed half-way -30 to -2 %, -46.45 % at no bandwidth" in note
    note = claims.judge(known["training_time_12p1b"], "ci", tmp_path)["note"]
    assert "-16.13 % itself: gpt between 10 and 100 Gbit/s;" in note
    assert "half-way -30 to -2 %, -16.13 % between 10 and 100 Gbit/s" in note


def test_a_grid_has_no_single_number_and_no_partial_bound(tmp_path: Path) -> None:
    entry = yaml.safe_load(claims.CLAIMS.read_text())["claims"][0]
    path = tmp_path / "claims.yaml"
    for change in ({"paper_value": "less"}, {"rule": entry["rule"] | {"partly": {"at_most": -1}}}):
        path.write_text(yaml.safe_dump({"claims": [entry | change]}, explicit_end=True))
        with pytest.raises(UserError, match="leave `partly` out and give a number"):
            claims.load_claims(path)


def test_missing_results_and_bad_rules_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        claims.main("ci", tmp_path / "nowhere")
    assert stop.value.code == 2
    assert "no results at scale ci" in capsys.readouterr().err
    entry = yaml.safe_load(claims.CLAIMS.read_text())["claims"][0]
    for change, message in (
        ({"measure": "guess"}, "measure guess does not exist"),
        ({"rule": {"supported": {"at_most": 1, "at_least": 0}}}, "exactly one key"),
        ({"rule": {"supported": {"at_moost": 1}}}, "unknown key"),
    ):
        path = tmp_path / "claims.yaml"
        path.write_text(yaml.safe_dump({"claims": [entry | change]}))
        with pytest.raises(UserError, match=message):
            claims.load_claims(path)
    path.write_text(yaml.safe_dump({"claims": [entry, entry]}))
    with pytest.raises(UserError, match="appears twice"):
        claims.load_claims(path)
