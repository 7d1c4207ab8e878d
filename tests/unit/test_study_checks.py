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
from workflows import program as workflow
from workflows.targets import check_targets

MINE = "window_ablation"  # a study that trains and is analysed


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of all study and scale files."""
    for name in ("studies", "scales"):
        shutil.copytree(matrix.FOLDER / name, tmp_path / name)
    monkeypatch.setattr(matrix, "FOLDER", tmp_path)
    return tmp_path


def insert(line: str) -> Callable[[str], str]:
    return lambda text: line + "\n" + text


def rename(old: str, new: str) -> Callable[[str], str]:
    def change(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return change


STUDY: dict[str, tuple[str, Callable[[str], str], str, str]] = {
    "key": ("methods", rename("\nvariants:", "\nvariant:"), "unknown key variant ", "did you mean variants?"),
    "scale": (
        MINE,
        rename("\n  workstation:", "\n  workstaton:"),
        "scales: unknown name 'workstaton'",
        "did you mean workstation?",
    ),
    "only_by_name": (
        "moe",
        rename("[ci, workstation, long, paper]", "[ci, worksation]"),
        "only_by_name: unknown name 'worksation'",
        "did you mean workstation?",
    ),
    "analysis": (
        MINE,
        rename("analysis: window", "analysis: windw"),
        "analysis: unknown name",
        "did you mean window_ablation",
    ),
    "needs": (
        "zero_shot",
        rename("needs:\n  methods", "needs:\n  methds"),
        "needs: unknown name",
        "did you mean methods?",
    ),
    "key twice": (
        MINE,
        insert("title: another"),
        "key title appears twice, in lines 1 and ",
        "keep one of them",
    ),
    "a day that there is not": (
        MINE,
        insert("seeds: [2020-13-45]"),
        "not valid YAML at line 1: timestamp '2020-13-45' cannot be read",
        "correct the value",
    ),
    "seeds": (MINE, insert("seeds: [1, 2, 1]"), "seeds = [1, 2, 1]: seed 1 appears twice", "give it once"),
    "more_seeds of an unknown variant": (
        MINE,
        insert("more_seeds: {variants: [w4, w6], seeds: [7]}"),
        "more_seeds.variants: unknown variant 'w6'",
        "did you mean w",
    ),
    "more_seeds twice": (
        MINE,
        rename("    seeds: [1]\n", "    seeds: [1]\n    more_seeds: {variants: [w4], seeds: [2, 1]}\n"),
        "scales.ci.more_seeds.seeds = [2, 1]: all variants have seed 1 already",
        "leave it out",
    ),
    "more_seeds of no variant": (
        MINE,
        insert("more_seeds: {variants: [], seeds: [7]}"),
        "more_seeds.variants = []: Value should have at least 1 item",
        "correct the value",
    ),
    "more_seeds without a seed": (
        MINE,
        insert("more_seeds: {variants: [w4], seeds: []}"),
        "more_seeds.seeds = []: Value should have at least 1 item",
        "correct the value",
    ),
    "window": (
        MINE,
        rename("compression: {window: 4}", "compression: {window: 4000}"),
        "w4: compression.window = 4000 is longer than the run, train.iterations = ",
        "use at most ",
    ),
}


def changed(root: Path, study: str, change: Callable[[str], str]) -> Path:
    path = root / "studies" / f"{study}.yaml"
    path.write_text(change(path.read_text()))
    return path


@pytest.mark.parametrize("case", STUDY)
@pytest.mark.parametrize("program", ["workflow", "matrix", "launch"])
def test_a_wrong_study_is_one_line_with_key_file_and_fix(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, program: str
) -> None:
    study, change, problem, fix = STUDY[case]
    path = changed(root, study, change)
    before = sorted(root.rglob("*"))
    run: dict[str, Callable[[], Any]] = {
        "workflow": lambda: workflow.main(results=tmp_path / "results"),
        "matrix": lambda: matrix.main(study, "ci"),
        "launch": lambda: launch.main(study, "w4-s1", None, "ci", tmp_path / "results"),
    }
    with pytest.raises(SystemExit) as stop:
        run[program]()
    assert stop.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and problem in line and f"(in {path})" in line and fix in line
    assert sorted(root.rglob("*")) == before, "nothing may be written"


def test_a_wrong_scale_is_one_line(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = root / "scales" / "ci.yaml"
    text = path.read_text()
    for change, problem in (
        (rename("seeds: [1]", "seeds: [3, 3]"), "seeds = [3, 3]: seed 3 appears twice"),
        (rename("seeds: [1]", "seed: [1]"), "unknown key seed "),
        (insert("seeds: [2]"), "key seeds appears twice"),
    ):
        path.write_text(change(text))
        with pytest.raises(SystemExit) as stop:
            matrix.main(MINE, "ci")
        assert stop.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert problem in line and f"(in {path})" in line
    with pytest.raises(UserError, match=r"unknown scale 'workstaton' .*did you mean workstation\?"):
        matrix.load_scale("workstaton")


@pytest.mark.parametrize(
    "text",
    ["!!int q", "!!float x", "!!bool q", "!!timestamp x", "9" * 6000, "2020-01-01T99:00:00Z", "!!set 3", "{[1]: 2}"],
)
def test_a_value_that_cannot_be_made_is_a_line_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.yaml"
    for content, line in ((f"a: 1\nb: {text}\n", 2), (f"{{? {text} : 1}}\n", 1)):
        path.write_text(content)
        with pytest.raises(UserError, match=rf"^not valid YAML at line {line}: .* \(in .*a\.yaml\); correct") as error:
            load_yaml(path)
        assert len(str(error.value)) < 400


def test_a_study_that_nothing_analyses_is_refused(root: Path) -> None:
    values = {"study": "mine", "title": "t", "question": "q", "variants": {"none": {}}}
    path = root / "studies" / "mine.yaml"
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"missing key analysis.* \(in .*mine\.yaml\); add analysis: .*methods"):
        matrix.runs("mine", "ci")
    path.write_text(yaml.safe_dump(values | {"analysis": "method"}))
    with pytest.raises(UserError, match=r"analysis: unknown name 'method' .*did you mean methods"):
        matrix.runs("mine", "ci")
    path.write_text(yaml.safe_dump(values | {"analysis": "methods"}))
    assert [run.name for run in matrix.runs("mine", "ci")] == ["none-s1"]
    assert matrix.load_study("mine").tables == matrix.load_study("methods").tables
    # Simulated, it has no runs to analyse.
    path.write_text(yaml.safe_dump(values | {"variants": {}, "cluster": {"gpus": 1}}))
    assert matrix.runs("mine", "ci") == []


def test_a_scale_that_lacks_a_setting_is_named_beside_the_study(root: Path) -> None:
    path = root / "scales" / "mine.yaml"
    values = {**load_yaml(root / "scales" / "ci.yaml"), "scale": "mine"}
    del values["defaults"]["train"]["lr"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=r"missing key train\.lr \(in .*entropy_trend\.yaml over .*mine\.yaml\)"):
        matrix.runs("entropy_trend", "mine")


def test_a_study_extends_a_base(root: Path) -> None:
    variants = {study: [run.variant for run in matrix.runs(study, "paper")] for study in matrix.studies()}
    assert variants["gpt2_345m"] == variants["gpt2_12p1b_h100"]
    assert variants["gpt2_2p5b_v100"] == [name for name in variants["gpt2_345m"] if name != "bf16"]
    nodes = [matrix.load_study(name).cluster["nodes"]["value"] for name in ("gpt2_345m", "gpt2_12p1b_h100")]
    assert nodes == [8, 16]
    path = root / "studies" / "mine.yaml"
    base = root / "studies" / "bases" / "other.yaml"
    base.write_text("{title: t, question: q, analysis: methods, seeds: [1], variants: {a: {}, b: {}}}\n")
    path.write_text("{study: mine, extends: other, seeds: [2], variants: {a: null, c: {}}}\n")
    assert [run.name for run in matrix.runs("mine", "ci")] == ["b-s2", "c-s2"]
    path.write_text("{study: mine, extends: othr}\n")
    with pytest.raises(UserError, match=r"extends: unknown name 'othr' \(in .*mine\.yaml\); did you mean other"):
        matrix.load_study("mine")


def test_some_variants_have_more_seeds(root: Path) -> None:
    values = {"study": "mine", "title": "t", "question": "q", "analysis": "methods"}
    values |= {"variants": {"a": {}, "b": {}}, "more_seeds": {"variants": ["b"], "seeds": [9, 4]}}
    path = root / "studies" / "mine.yaml"

    def names() -> list[str]:
        path.write_text(yaml.safe_dump(values))
        return [run.name for run in matrix.runs("mine", "ci")]

    assert names() == ["a-s1", "b-s1", "b-s9", "b-s4"], "the scale's seed, then these in their order"
    values["seeds"] = [2, 3]
    assert names() == ["a-s2", "a-s3", "b-s2", "b-s3", "b-s9", "b-s4"]
    values["scales"] = {"ci": {"more_seeds": {"variants": ["a"], "seeds": [5]}}, "workstation": {"seeds": [9]}}
    assert names() == ["a-s2", "a-s3", "a-s5", "b-s2", "b-s3"], "a scale's are instead of the study's"
    with pytest.raises(UserError, match=r"more_seeds\.seeds = \[9, 4\]: all variants have seed 9 already \(in .*mine"):
        matrix.runs("mine", "workstation")


def test_a_window_is_compared_with_the_run_it_is_of(tmp_path: Path) -> None:
    run = matrix.find(MINE, "ci", "w4-s1")
    values = run.model_dump(mode="json")
    path = tmp_path / "run.yaml"
    for window, refused in ((run.train.iterations, False), (run.train.iterations + 1, True)):
        values["compression"]["window"] = window
        path.write_text(yaml.safe_dump(values))
        if refused:
            with pytest.raises(UserError, match=rf"compression\.window = {window} is longer than the run"):
                launch.read_run(path)
        else:
            assert launch.read_run(path).edgc.window == window
    values["compression"] = {"method": "powersgd", "rank": 4, "window": 100_000}
    path.write_text(yaml.safe_dump(values))
    assert launch.read_run(path).edgc.method == "powersgd", "decides no ranks"


@pytest.mark.parametrize("scale", sorted(matrix.load_study("rank_sweep").scales))
def test_a_rank_sweep_measures_the_error_that_it_shows(scale: str) -> None:
    """At the ends of windows, two of them in the second half, in which the figure looks; else its column is empty."""
    for run in matrix.runs("rank_sweep", scale):
        if run.edgc.method == "powersgd":
            assert run.edgc.window <= run.train.iterations // 4, run.name


def test_every_committed_study_passes_at_every_scale() -> None:
    for scale in matrix.scales():
        for study in matrix.studies():
            matrix.runs(study, scale)


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
def test_a_frozen_study_is_refused_with_the_commit_to_check_out_and_its_settings_stay_readable(study: str) -> None:
    commit = matrix.load_study(study).frozen
    names = [study], [f"results/ci/{study}/table.csv"]
    for refused in (
        lambda: matrix.runs(study, "ci"),
        *(partial(check_targets, name, "ci", Path("results/ci")) for name in names),
    ):
        with pytest.raises(UserError, match=f"frozen at {commit}.*git checkout {commit}"):
            refused()
    assert study not in matrix.studies() and any((matrix.ROOT / "results/reference/ci" / study).glob("*.csv"))
