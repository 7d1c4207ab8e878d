"""The same mistakes in studies, scales and runs are refused in the same line by every program."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from edgc.errors import UserError
from experiments.common.yaml_settings import load_yaml
from experiments.spec import matrix
from experiments.training import launch
from workflows.targets import check_targets

STUDY = "window_ablation"  # trains and is analysed


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all study and scale files."""
    for name in ("studies", "scales"):
        shutil.copytree(matrix.FOLDER / name, tmp_path / name)
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    return tmp_path


def write(root: Path, **values: Any) -> None:
    """A study called ``mine``."""
    values = {"study": "mine", "title": "t", "question": "q", "analysis": "methods", **values}
    (root / "studies" / "mine.yaml").write_text(yaml.safe_dump(values, sort_keys=False))


# What is replaced in the study's file ("" inserts a line at its start), by what, and what the error names.
SCALE_SEEDS = "    seeds: [1]\n"
MISTAKES: dict[str, tuple[str, str, str, str]] = {
    "key": ("\nscales:", "\nscals:", "unknown key scals ", "did you mean scales?"),
    "scale": ("\n  workstation:", "\n  workstaton:", "scales: unknown name", "did you mean workstation?"),
    "only_by_name": ("[long]", "[worksation]", "only_by_name: unknown name", "did you mean workstation?"),
    "analysis": ("analysis: window", "analysis: windw", "analysis: unknown name", "did you mean window_ablation"),
    "needs": ("", "needs: {methds: all}", "needs: unknown name", "did you mean methods?"),
    "key twice": ("", "title: another", "key title appears twice, in lines 1 and ", "keep one of them"),
    "no day": ("", "seeds: [2020-13-45]", "not valid YAML: month must be in 1..12", "correct it"),
    "seeds": ("", "seeds: [1, 2, 1]", "seeds = [1, 2, 1]: seed 1 appears twice", "give it once"),
    "more_seeds of nothing": ("", "more_seeds: {variants: [w6], seeds: [7]}", "unknown variant 'w6'", "did you mean w"),
    "more_seeds twice": (
        SCALE_SEEDS,
        f"{SCALE_SEEDS}    more_seeds: {{variants: [w4], seeds: [2, 1]}}\n",
        "scales.ci.more_seeds.seeds = [2, 1]: all variants have seed 1 already",
        "leave it out",
    ),
    "more_seeds without one": ("", "more_seeds: {variants: [w4], seeds: []}", "more_seeds.seeds = []", "correct"),
    "window": ("{window: 4}", "{window: 4000}", "w4: compression.window = 4000 is longer than the run", "use at most "),
}


@pytest.mark.parametrize(("case", "program"), [*((case, "launch") for case in MISTAKES), ("key", "matrix")])
def test_a_wrong_study_is_one_line_with_key_file_and_fix(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, program: str
) -> None:
    old, new, problem, fix = MISTAKES[case]
    path = root / "studies" / f"{STUDY}.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1) if old else f"{new}\n{text}")
    before = sorted(root.rglob("*"))
    run: dict[str, Callable[[], Any]] = {
        "matrix": lambda: matrix.main(STUDY, "ci"),
        "launch": lambda: launch.main(STUDY, "w4-s1", None, "ci", tmp_path / "results"),
    }
    with pytest.raises(SystemExit) as stop:
        run[program]()
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and problem in line and f"(in {path})" in line and fix in line
    assert sorted(root.rglob("*")) == before, "nothing may be written"


def test_a_wrong_scale_is_one_line(root: Path) -> None:
    path = root / "scales" / "ci.yaml"
    text = path.read_text()
    for new, problem in (
        ("seeds: [3, 3]", r"seeds = \[3, 3\]: seed 3 appears twice"),
        ("seed: [1]", "unknown key seed "),
        ("seeds: [1]\nseeds: [2]", "key seeds appears twice"),
    ):
        path.write_text(text.replace("seeds: [1]", new, 1))
        with pytest.raises(UserError, match=rf"^{problem}.*\(in {path}\); ") as error:
            matrix.runs(STUDY, "ci")
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"unknown scale 'workstaton' .*did you mean workstation\?"):
        matrix.load_scale("workstaton")


@pytest.mark.parametrize(
    "text",
    ["!!int q", "!!int ''", "!!float ''", "!!bool maybe", "!!timestamp x", "!!set 3", "{[1]: 2}", "[" * 999, "a: b: c"],
)
def test_what_yaml_cannot_make_is_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"b: {text}\n")
    with pytest.raises(UserError, match=r"^not valid YAML.*: .* \(in .*a\.yaml\); correct"):
        load_yaml(path)


def test_a_study_that_nothing_analyses_is_refused(root: Path) -> None:
    write(root, variants={"none": {}}, analysis=None)
    with pytest.raises(UserError, match=r"missing key analysis.* \(in .*mine\.yaml\); add analysis: .*methods"):
        matrix.runs("mine", "ci")
    write(root, variants={"none": {}})
    assert [run.name for run in matrix.runs("mine", "ci")] == ["none-s1"]
    assert matrix.load_study("mine").tables == matrix.load_study("methods").tables
    write(root, analysis=None, cluster={"gpus": 1})  # simulated, it has no runs to analyse
    assert matrix.runs("mine", "ci") == []


def test_a_scale_that_lacks_a_setting_is_named_beside_the_study(root: Path) -> None:
    values = {**load_yaml(root / "scales" / "ci.yaml"), "scale": "mine"}
    del values["defaults"]["train"]["lr"]
    (root / "scales" / "mine.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"missing key train\.lr \(in .*entropy_trend\.yaml over .*mine\.yaml\)"):
        matrix.runs("entropy_trend", "mine")


def test_a_study_that_evaluates_names_tasks_that_there_are(root: Path) -> None:
    path = root / "studies" / "zero_shot.yaml"
    text = path.read_text()
    path.write_text(text.replace("- hellaswag\n", "- hellaswga\n"))
    with pytest.raises(UserError, match=r"unknown standard task 'hellaswga' .*did you mean hellaswag\?"):
        matrix.evaluation("zero_shot", "paper")
    path.write_text(text.replace("evaluation: {held_out: true, ", "evaluation: {"))
    with pytest.raises(UserError, match="no task at scale ci"):
        matrix.evaluation("zero_shot", "ci")


def test_a_study_extends_a_base(root: Path) -> None:
    variants = {study: [run.variant for run in matrix.runs(study, "paper")] for study in matrix.studies()}
    assert variants["gpt2_2p5b_v100"] == [name for name in variants["gpt2_345m"] if name != "bf16"]
    base = root / "studies" / "bases" / "other.yaml"
    base.write_text("{title: t, question: q, analysis: methods, seeds: [1], variants: {a: {}, b: {}}}\n")
    path = root / "studies" / "mine.yaml"
    path.write_text("{study: mine, extends: other, seeds: [2], variants: {a: null, c: {}}}\n")
    assert [run.name for run in matrix.runs("mine", "ci")] == ["b-s2", "c-s2"]
    path.write_text("{study: mine, extends: othr}\n")
    with pytest.raises(UserError, match=r"extends: unknown name 'othr' \(in .*mine\.yaml\); did you mean other"):
        matrix.load_study("mine")


def test_some_variants_have_more_seeds(root: Path) -> None:
    values: dict[str, Any] = {"variants": {"a": {}, "b": {}}, "more_seeds": {"variants": ["b"], "seeds": [9, 4]}}

    def names() -> list[str]:
        write(root, **values)
        return [run.name for run in matrix.runs("mine", "ci")]

    assert names() == ["a-s1", "b-s1", "b-s9", "b-s4"], "the scale's seed, then these in their order"
    values["seeds"] = [2, 3]
    assert names() == ["a-s2", "a-s3", "b-s2", "b-s3", "b-s9", "b-s4"]
    values["scales"] = {"ci": {"more_seeds": {"variants": ["a"], "seeds": [5]}}}
    assert names() == ["a-s2", "a-s3", "a-s5", "b-s2", "b-s3"], "a scale's are instead of the study's"


def test_a_window_is_compared_with_the_run_it_is_of(tmp_path: Path) -> None:
    run = matrix.find(STUDY, "ci", "w4-s1")
    values, path = run.model_dump(mode="json"), tmp_path / "run.yaml"

    def read(**compression: Any) -> str:
        path.write_text(yaml.safe_dump({**values, "compression": compression}))
        return launch.read_run(path).edgc.method

    edgc = {key: value for key, value in values["compression"].items() if key != "window"}
    assert read(**edgc, window=run.train.iterations) == "edgc"
    with pytest.raises(UserError, match=rf"compression\.window = {run.train.iterations + 1} is longer than the run"):
        read(**edgc, window=run.train.iterations + 1)
    assert read(method="powersgd", rank=4, window=100_000) == "powersgd", "decides no ranks"


def test_a_rank_sweep_measures_the_error_that_it_shows() -> None:
    """At the ends of windows, two of them in the second half, in which the figure looks; else its column is empty."""
    for scale in matrix.load_study("rank_sweep").scales:
        for run in matrix.runs("rank_sweep", scale):
            assert run.edgc.method != "powersgd" or run.edgc.window <= run.train.iterations // 4, run.name


def test_keys_that_stand_twice(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("a: {b: 1, c: 2}\nd:\n  e: 1\n  f: [{g: 1, g: 2}]\n")
    with pytest.raises(UserError, match=r"key g appears twice, in lines 4 and 4 .*a\.yaml"):
        load_yaml(path)
    # The same key in two mappings, and one that `<<` brings in and the mapping changes, are no duplicates.
    path.write_text("a: &a {b: 1, c: 2}\nd: {<<: *a, b: 3}\n")
    assert load_yaml(path) == {"a": {"b": 1, "c": 2}, "d": {"b": 3, "c": 2}}
    path.write_bytes(b"a: \xff\xfe\n")
    with pytest.raises(UserError, match="not a text in UTF-8"):
        load_yaml(path)


@pytest.mark.parametrize("study", matrix.frozen())
def test_a_frozen_study_is_refused_with_the_commit_to_check_out_and_its_tables_stay(study: str) -> None:
    commit = matrix.load_study(study).frozen
    names = [study], [f"results/ci/{study}/table.csv"]
    for refused in (
        lambda: matrix.runs(study, "ci"),
        *(partial(check_targets, name, []) for name in names),
    ):
        with pytest.raises(UserError, match=f"frozen at {commit}.*git checkout {commit}"):
            refused()
    assert study not in matrix.studies() and any((matrix.ROOT / "results/reference").glob(f"*/{study}/*.csv"))
