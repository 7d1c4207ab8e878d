"""edgc.presets: named settings, laid under what is given; and Optimus-CC's selective stages in the controller."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgc.compressors.entrywise.quantize import SignConfig
from edgc.config import EDGCConfig
from edgc.control.controller import make_controller
from edgc.errors import UserError
from edgc.presets import PRESETS
from experiments.spec import matrix
from experiments.spec.settings import resolve


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_written_out(name: str) -> None:
    config = EDGCConfig.from_dict({"preset": name})
    plain = config.to_dict()
    assert "preset" not in plain
    assert EDGCConfig.from_dict(plain) == config
    for key, value in PRESETS[name].items():
        section = plain[key]
        assert section.items() >= value.items() if isinstance(value, dict) else section == value


def test_given_keys_win_also_inside_a_section() -> None:
    config = EDGCConfig.from_dict({"rank": 16, "pipeline": {"rank": 4}, "preset": "optimus_cc"})
    assert (config.method, config.rank, config.pipeline.rank) == ("powersgd", 16, 4)
    assert config.pipeline.epilogue_only and config.fused_embedding and config.compressed_stages == 0.75
    assert PRESETS["optimus_cc"]["pipeline"] == {"rank": 16, "epilogue_only": True}, "presets stay as they are"


def test_the_whole_of_optimus_cc_is_its_parts() -> None:
    whole = EDGCConfig.from_dict({"preset": "optimus_cc"})
    parts = [PRESETS[f"optimus_cc_{part}"] for part in ("backprop", "stages", "embedding")]
    keys = [key for part in parts for key in part if part["method"] != "none" or key != "method"]
    assert len(keys) == len(set(keys)) == 5, "no two parts change the same setting"
    merged = {key: value for part in parts for key, value in part.items()}
    assert EDGCConfig.from_dict(merged | {"method": "powersgd"}) == whole


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("optimus", "did you mean optimus_cc?"),
        ("qqq", "known: optimus_cc,"),
        (7, "known: "),
        (None, "known: "),
    ],
)
def test_an_unknown_preset_is_one_line(name: object, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict({"preset": name}, where="study.yaml", prefix="compression.")
    line = str(caught.value)
    assert line.startswith(f"compression.preset = {name!r} is not known (in study.yaml)")
    assert fix in line and "\n" not in line


def test_runs_hold_what_the_preset_stands_for() -> None:
    runs = {run.variant: run for run in matrix.runs("optimus_cc", "ci")}
    assert {run.seed for run in matrix.runs("optimus_cc", "ci")} == {1, 2}
    for run in runs.values():
        recorded = run.model_dump(mode="json")
        assert "preset" not in recorded["compression"]
        assert resolve(recorded, "run.yaml") == run
    assert runs["optimus_cc"].compression["method"] == "powersgd"
    assert runs["optimus_cc"].edgc.compressed_stages == 0.75
    with pytest.raises(UserError, match=r"compression\.preset = 'bets' .* \(in s\.yaml\); did you mean best\?"):
        resolve({**recorded, "compression": {"preset": "bets"}}, "s.yaml")


@given(
    share=st.floats(0.01, 1.0),
    stages=st.integers(1, 64),
    method=st.sampled_from(["powersgd", "topk", "quantize", "sign"]),
)
def test_the_first_stages_are_compressed(share: float, stages: int, method: str) -> None:
    rank = 8 if method == "powersgd" else None
    config = EDGCConfig(method=method, compressed_stages=share, **({"rank": rank} if rank else {}))
    plan = make_controller(config, [[(64, 64)]] * stages, 100).plan(1)
    compressed = sum(rank is not None for rank in plan.ranks)
    assert plan.ranks == (rank or 1,) * compressed + (None,) * (stages - compressed)
    assert compressed == 1 or share * stages - 1 < compressed < share * stages + 1e-6
    assert 1 <= compressed <= stages


@pytest.mark.parametrize(("share", "stages", "compressed"), [(0.75, 4, 3), (0.75, 2, 1), (0.7, 10, 7), (1.0, 8, 8)])
def test_whole_stages(share: float, stages: int, compressed: int) -> None:
    assert SignConfig(compressed_stages=share).stages_compressed(stages) == compressed


@pytest.mark.parametrize(
    ("values", "message", "fix"),
    [
        ({"method": "sign", "compressed_stages": 0}, "compressed_stages = 0", "above 0 and at most 1"),
        ({"method": "sign", "compressed_stages": 3}, "compressed_stages = 3", "above 0 and at most 1"),
        ({"method": "edgc", "compressed_stages": 0.5}, "compressed_stages = 0.5", "set method: bf16, "),
        ({"fused_embedding": 1}, "fused_embedding = 1", "use true or false"),
    ],
)
def test_bad_values_are_one_line(values: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values)
    assert message in str(caught.value) and fix in str(caught.value)
