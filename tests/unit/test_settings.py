"""experiments.spec.settings: what a study lays under its variants, and what records of runs hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.analyse.runs import load_run
from experiments.spec import matrix
from experiments.spec.settings import lay, resolve
from experiments.training.launch import read_run
from experiments.verdicts import archive

ROOT = Path(__file__).resolve().parents[2]
COMMON: dict[str, Any] = {"window": 20, "r_max": 16, "r_min": 4, "entropy": {"iteration_rate": 0.25}}


def laid(own: dict[str, Any], common: dict[str, Any] = COMMON) -> dict[str, Any]:
    """The compression settings of a variant."""
    run = matrix.runs("rank_sweep", "ci")[0].model_dump(mode="json")
    base = {**run, "compression": common}
    return resolve(lay(base, {"compression": own}), "study.yaml").compression


def test_a_variant_takes_those_common_settings_that_its_method_can_use() -> None:
    assert laid({"method": "none"}) == {"window": 20, "method": "none"}
    assert laid({"method": "edgc"}) == {**COMMON, "method": "edgc"}
    small = {"window": 20, "entropy": {"iteration_rate": 0.25}}
    assert laid({"method": "powersgd", "rank": 4}) == {**small, "method": "powersgd", "rank": 4}
    fixed = {"method": "edgc", "policy": "fixed", "rank": 4}
    assert laid(fixed) == {"r_max": 16, **small, **fixed}
    # Sections are merged, and a variant may name a preset over common settings.
    rates = {"iteration_rate": 0.25, "entry_rate": 0.5}
    assert laid({"method": "edgc", "entropy": {"entry_rate": 0.5}})["entropy"] == rates
    fused = {"window": 20, "method": "none", "fused_embedding": True}
    assert laid({"preset": "optimus_cc_embedding"}) == fused
    # A common preset is laid like the settings that it stands for.
    assert laid({"method": "none"}, {"preset": "paper"}) == {"method": "none", "window": 1000}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"method": "none", "r_max": 16}, "compression.r_max = 16 is not used with method: none"),
        ({"method": "edgx"}, "compression.method = 'edgx'"),
        ({"method": "topk", "densty": 0.5}, "unknown key compression.densty"),
    ],
)
def test_what_a_variant_says_and_its_method_cannot_use_is_refused(own: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        laid(own)
    assert str(caught.value).startswith(message) and "(in study.yaml)" in str(caught.value)


def test_momentum_is_not_applied_twice() -> None:
    values = matrix.runs("methods", "ci")[0].model_dump(mode="json")
    values["compression"] = {"method": "topk", "momentum": 0.9}
    with pytest.raises(UserError, match=r"0\.9 with compression\.momentum = 0\.9 .*; set train\.adam_beta1: 0"):
        resolve(values, "study.yaml")
    values["train"]["adam_beta1"] = 0.0
    assert resolve(values, "study.yaml").train.adam_beta1 == 0
    values["compression"]["momentum"] = 0.0
    values["train"]["adam_beta1"] = 0.9
    assert resolve(values, "study.yaml").train.adam_beta1 == 0.9


def test_every_run_of_every_study_is_as_its_study_says() -> None:
    """No setting that a method can use is lost, and none that it cannot use is left."""
    for scale in matrix.scales():
        for study in matrix.studies():
            for run in matrix.runs(study, scale):
                assert EDGCConfig.from_record(run.compression) == EDGCConfig.from_dict(run.compression)
    runs = {run.variant: run.compression for run in matrix.runs("methods", "ci")}
    assert runs["none"].keys() == {"method", "window"}
    assert runs["edgc_cqm"].keys() >= COMMON.keys()


def test_a_run_of_which_its_study_says_nothing_is_fitted_to_the_scale() -> None:
    train = {"micro_batch": 4, "global_batch": 24, "iterations": 60}
    values: dict[str, Any] = {"train": train, "parallel": {"data": 4}, "compression": {"method": "edgc"}}
    found = matrix.fitted(values)
    assert found["train"] == {**train, "micro_batch": 3}, "the largest that divides six sequences"
    assert found["compression"]["window"] == 6
    assert matrix.fitted({**values, "compression": {"method": "edgc", "window": 5}})["compression"]["window"] == 5
    assert matrix.fitted({**values, "train": {**train, "iterations": 230_000}})["compression"]["window"] == 1000
    other = {**values, "train": {**train, "global_batch": 6}, "compression": {"method": "none"}}
    assert matrix.fitted(other) == other, "six sequences are not shared by four replicas: refused later"


def test_the_committed_records_are_read(tmp_path: Path) -> None:
    """The first and the last run of every study at every scale."""
    for reference in sorted((ROOT / "results" / "reference").iterdir()):
        for study in archive.studies(reference):
            names = sorted(archive.checksums(reference / study))
            for name in {names[0], names[-1]}:
                (tmp_path / "run.yaml").write_bytes(archive.read(reference / study, name)["run.yaml"])
                run = load_run(tmp_path)
                assert run.edgc.method == run.method
                assert read_run(tmp_path / "run.yaml").edgc == run.edgc


def test_runs_hold_what_the_preset_stands_for() -> None:
    values = matrix.runs("rank_sweep", "ci")[0].model_dump(mode="json")
    run = resolve({**values, "compression": {"preset": "optimus_cc", "rank": 16}}, "s.yaml")
    recorded = run.model_dump(mode="json")
    assert "preset" not in recorded["compression"] and resolve(recorded, "run.yaml") == run
    assert run.compression["method"] == "powersgd" and run.edgc.to_dict()["compressed_stages"] == 0.75
    with pytest.raises(UserError, match=r"compression\.preset = 'bets' .* \(in s\.yaml\); did you mean best\?"):
        resolve({**recorded, "compression": {"preset": "bets"}}, "s.yaml")
