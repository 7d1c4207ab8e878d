"""Settings of the library: defaults of the paper, presets, and one-line errors that name the key."""

from __future__ import annotations

import dataclasses
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from edgc.compressors.powersgd import PowerSGDConfig
from edgc.config import EDGCConfig, methods, users
from edgc.control.adaptive import make_controller
from edgc.control.policies.cqm import CQMConfig
from edgc.control.policies.given import FixedConfig
from edgc.errors import UserError
from edgc.presets import PRESETS
from edgc.sections import EntropyConfig, PipelineConfig
from tests import examples

WHOLE: dict[str, Any] = {"rank": 4, "schedule": [[0, 8]], "bits": 4, "density": 0.5}
SCHEDULE: dict[str, Any] = {"method": "edgc", "policy": "schedule", "schedule": [[0, 8]]}


def test_the_preset_is_the_paper_to_the_letter() -> None:
    config = EDGCConfig.from_dict({"preset": "paper"})
    assert (config.method, config.policy, config.alignment) == ("edgc", "cqm", "measured")
    assert (config.window, config.step_limit, config.rank_multiple) == (1000, 8, 4)
    assert (config.warmup_fraction, config.warmup_bits, config.remeasure_above) == (0.1, None, None)
    assert (config.r_max, config.r_min, config.lower_rank(64)) == (None, None, 16)
    entropy = config.entropy
    assert (entropy.iteration_rate, entropy.entry_rate, entropy.sampling) == (0.1, 0.25, "random")
    assert config.error_feedback and not config.one_sided
    assert (config.factor_dtype, config.error_dtype) == ("fp32", "fp32")


def test_the_preset_is_what_hygon_publishes() -> None:
    config = EDGCConfig.from_dict({"preset": "hygon"})
    assert (config.method, config.policy, config.alignment) == ("edgc", "loss", "measured")
    assert (config.window, config.step_limit, config.rank_multiple) == (1000, 4, 2)
    assert (config.warmup_fraction, config.warmup_limit_fraction, config.warmup_bits) == (0.1, 0.1, None)
    assert (config.r_max, config.r_min, config.lower_rank(36), config.remeasure_above) == (None, None, 8, None)
    assert (config.entropy.iteration_rate, config.entropy.entry_rate) == (0.1, 0.1)
    assert (config.factor_dtype, config.error_dtype, config.error_feedback) == ("bf16", "bf16", True)
    # Warm-up ends after its tenth whatever entropy does.
    ends = [config.warm_up_ends(20000, i, -5.0, -4.0, measuring=False)[0] for i in (1000, 1998, 2000)]
    assert ends == [False, False, True]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"metod": "edgc"}, "unknown key metod (in study.yaml); did you mean method?"),
        ({"entropy": {"alpha": 0.1}}, "unknown key entropy.alpha"),
        ({"method": "int4"}, "method = 'int4' is not valid"),
        ({"method": "PowerSGD"}, "method = 'PowerSGD' is not valid"),
        ({"method": "edgc", "policy": "linear"}, "policy = 'linear'"),
        ({"entropy": {"iteration_rate": 0}}, "entropy.iteration_rate (alpha) = 0 is not valid"),
        ({"entropy": {"entry_rate": 1.5}}, "entropy.entry_rate (beta) = 1.5"),
        ({"entropy": {"entry_rate": math.nan}}, "entropy.entry_rate (beta) = nan"),
        ({"entropy": {"estimator": "kde"}}, "entropy.estimator = 'kde'"),
        ({"entropy": {"sampling": "stride"}}, "entropy.sampling = 'stride'"),
        ({"entropy": {"source": "both"}}, "entropy.source = 'both'"),
        ({"entropy": {"seed": -1}}, "entropy.seed = -1"),
        ({"method": "edgc", "policy": "schedule"}, "schedule is missing"),
        ({**SCHEDULE, "schedule": []}, "schedule = []"),
        ({**SCHEDULE, "schedule": [[0.5, 8], [0.2, 4]]}, "schedule = [[0.5, 8], [0.2, 4]]"),
        ({**SCHEDULE, "schedule": [[0.5, 8], [1.2, 4]]}, "schedule = 1.2"),
        ({**SCHEDULE, "schedule": [[0.5, 0]]}, "schedule = 0"),
        ({**SCHEDULE, "schedule": "8"}, "schedule = '8'"),
        ({"method": "edgc", "alignment": True}, "alignment = True"),
        ({"method": "edgc", "r_min": 32, "r_max": 16}, "r_min = 32"),
        ({"method": "edgc", "r_max": 30}, "r_max = 30"),
        ({"method": "edgc", "r_max": 64, "r_min": 6}, "r_min = 6"),
        ({"method": "edgc", "r_max": 0}, "r_max = 0"),
        ({"method": "edgc", "step_limit": 0}, "step_limit = 0"),
        ({"method": "edgc", "rank_multiple": 0}, "rank_multiple = 0"),
        ({"method": "edgc", "search_repeats": 0}, "search_repeats = 0"),
        ({"method": "edgc", "warmup_fraction": -0.1}, "warmup_fraction = -0.1"),
        ({"method": "edgc", "warmup_fraction": 0.6}, "warmup_limit_fraction = 0.5"),
        ({"method": "edgc", "warmup_bits": 6}, "warmup_bits = 6"),
        ({"method": "edgc", "stability_tolerance": 0}, "stability_tolerance = 0"),
        ({"method": "edgc", "remeasure_above": True}, "remeasure_above = True"),
        ({"method": "powersgd"}, "rank is missing"),
        ({"method": "powersgd", "rank": None}, "rank = None"),
        ({"method": "powersgd", "rank": 8, "factor_dtype": "int3"}, "factor_dtype = 'int3'"),
        ({"method": "powersgd", "rank": 8, "error_dtype": "fp16"}, "error_dtype = 'fp16'"),
        ({"method": "powersgd", "rank": 8, "orthonormal_q": "False"}, "orthonormal_q = 'False'"),
        ({"method": "topk", "error_feedback": "no"}, "error_feedback = 'no'"),
        ({"method": "sign", "compressed_stages": 3}, "compressed_stages = 3"),
        ({"window": True}, "window = True"),
        ({"fused_embedding": 1}, "fused_embedding = 1"),
        ({"pipeline": {"rank": 0}}, "pipeline.rank = 0"),
        ({"pipeline": {"epilogue": True}}, "unknown key pipeline.epilogue"),
        ({"preset": "optimus"}, "preset = 'optimus' is not known (in study.yaml); did you mean optimus_cc?"),
        ({"preset": None}, "preset = None is not known"),
    ],
)
def test_bad_settings_are_one_line_with_key_file_and_fix(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values, where="study.yaml")
    line = str(caught.value)
    assert message in line and "(in study.yaml); " in line and "\n" not in line
    assert "compression." + message.split(" (in")[0].removeprefix("unknown key ") in one_line(values, "compression.")


def test_numbers_of_numpy_become_plain_for_checkpoints_are_read_without_it() -> None:
    config = EDGCConfig.from_dict({"method": "topk", "density": np.float64(0.01)})
    assert type(config.to_dict()["density"]) is float


def one_line(values: dict[str, Any], prefix: str) -> str:
    """The error for settings that are a section of others."""
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values, prefix=prefix)
    assert caught.value.where is None
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message", "fix"),
    [
        ({"rank": 8}, "rank = 8 is not used with method: none", "method: powersgd"),
        ({"method": "edgc", "rank": 8}, "rank = 8 is not used with method: edgc, policy: cqm", "policy: fixed"),
        ({"method": "powersgd", "rank": 8, "bits": 4}, "bits = 4", "method: quantize"),
        ({"method": "topk", "factor_dtype": "int8"}, "factor_dtype = 'int8'", "method: edgc"),
        ({"method": "bf16", "error_feedback": False}, "error_feedback = False", "method: edgc"),
        ({"method": "quantize", "density": 0.5}, "density = 0.5", "method: randomk"),
        ({"method": "edgc", "target_error": 0.5}, "target_error = 0.5", "policy: spectral"),
        ({"method": "edgc", "schedule": [[0, 8]]}, "schedule = [[0, 8]]", "policy: schedule"),
        ({**SCHEDULE, "step_limit": 4}, "step_limit = 4", "policy: cqm"),
        ({"method": "powersgd", "rank": 8, "r_max": 16}, "r_max = 16", "method: edgc"),
        ({"method": "topk", "policy": "loss"}, "policy = 'loss'", "method: edgc"),
        ({"method": "edgc", "compressed_stages": 0.5}, "compressed_stages = 0.5", "method: bf16"),
        ({"method": "edgc", "r_max": 16, "search_repeats": 5}, "search_repeats = 5", "without r_max"),
        ({**SCHEDULE, "search_start": 5}, "search_start = 5", "alignment: measured"),
        ({"method": "topk", "gate_interval": 5}, "gate_interval = 5", "cost_gate: true"),
        ({"cost_gate": True}, "cost_gate = True is not used with method: none", "method: bf16"),
        ({"entropy": {"entry_rate": 0.5}}, "entropy.entry_rate = 0.5", "record_full_entropy: true"),
        ({"pipeline": {"epilogue_only": True}}, "pipeline.epilogue_only = True", "give the rank"),
    ],
)
def test_what_the_method_cannot_use_is_refused(values: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values, where="study.yaml")
    line = str(caught.value)
    assert message in line and "(in study.yaml); " in line and fix in line and "\n" not in line
    recorded = EDGCConfig.from_record(values | {"pipeline": {}}).to_dict()
    assert EDGCConfig.from_dict(recorded).to_dict() == recorded


@pytest.mark.parametrize("name", examples.FOUND)
def test_settings_are_written_out_whole_and_read_again(name: str) -> None:
    config = examples.config_of(name)
    assert type(config) is examples.FOUND[name][0]
    assert EDGCConfig.from_dict(config.to_dict()) == config
    assert type(config)(**config.to_dict()) == config == pickle.loads(pickle.dumps(config))


def test_a_type_is_found_by_its_name_and_may_be_written_itself() -> None:
    low = PowerSGDConfig(rank=4)
    assert low == EDGCConfig(method="powersgd", rank=4) == EDGCConfig.from_dict({"method": "powersgd", "rank": 4})
    assert FixedConfig(rank=4) == EDGCConfig(method="edgc", policy="fixed", rank=4)
    assert type(EDGCConfig(method="edgc")) is CQMConfig and type(dataclasses.replace(low, rank=5)) is PowerSGDConfig
    with pytest.raises(UserError, match=r"^method = 'topk' is not valid; use one of powersgd"):
        PowerSGDConfig(method="topk", rank=4)
    with pytest.raises(UserError, match=r"^bits = 4 is not used with method: powersgd"):
        dataclasses.replace(low, bits=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="rank"):
        PowerSGDConfig()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("build", "fix"),
    [
        (lambda: EDGCConfig(preset="paper", window=20), "from_dict({'preset': 'paper', 'window': 20})"),
        (lambda: EDGCConfig.from_dict("paper"), '{"preset": ...}'),  # type: ignore[arg-type]
        (lambda: EDGCConfig.from_dict(None), '{"method": ...}'),  # type: ignore[arg-type]
        (lambda: EDGCConfig(method="powersdg"), "did you mean powersgd?"),
        (lambda: EDGCConfig(method="powersgd", rank=4, factor_dtype="int9"), "int8?"),
    ],
)
def test_what_was_meant_is_said(build: Callable[[], EDGCConfig], fix: str) -> None:
    with pytest.raises(UserError, match=re.escape(fix)):
        build()


def test_a_method_has_all_that_is_asked_of_it() -> None:
    """Of a file that was added and lacks something this says what."""
    names, looks = [kind.title() for kind in methods()], [kind.look for kind in methods()]
    assert len(set(names)) == len(names)
    assert len({kind.look.label for kind in methods()}) >= len({kind.method for kind in methods()})
    for part in ("label", "colour", "marker"):
        by_value: dict[str, set[str]] = {}
        for kind, look in zip(methods(), looks, strict=True):
            by_value.setdefault(getattr(look, part), set()).add(kind.method)
        shared = {value: kinds for value, kinds in by_value.items() if len(kinds) > 1}
        assert not shared, f"two methods have the same {part}: {shared}"
    for method in {kind.method for kind in methods()}:
        assert any(kind.examples for kind in methods() if kind.method == method), f"{method} has no examples"
    given = [name for kind in methods() for name in kind.__dict__.get("examples", ())]
    assert sorted(given) == sorted(examples.FOUND), "two examples have one name"
    for name, (kind, found) in examples.FOUND.items():
        assert examples.config_of(name).build() is not None and found.sent(8, 16) > 0, kind


def test_a_record_may_hold_settings_of_other_methods() -> None:
    assert EDGCConfig.usable({"method": "topk", "rank": 4, "density": 0.5, "metod": 1}) == {
        "method": "topk",
        "density": 0.5,
        "metod": 1,  # unknown: for others to refuse
    }
    assert EDGCConfig.usable({"method": "tpok", "rank": 4}) == {"method": "tpok", "rank": 4}
    every = {name: value for kind in methods() for name, value in kind.from_record(WHOLE).to_dict().items()}
    for kind in methods():
        own = EDGCConfig.from_record({**every, "method": kind.method, "policy": getattr(kind, "policy", "cqm")})
        assert type(own) is kind
    assert users("rank") == [FixedConfig, PowerSGDConfig] and not users("metod")


def test_sections_may_be_dictionaries_and_not_null() -> None:
    config = EDGCConfig(method="edgc", entropy={"iteration_rate": 0.5}, pipeline={"rank": 4})
    assert config.entropy == EntropyConfig(iteration_rate=0.5)
    assert config.pipeline == PipelineConfig(rank=4)
    assert EDGCConfig.from_dict(config.to_dict()) == config
    for key in ("entropy", "pipeline"):
        for value in (None, 5):
            with pytest.raises(UserError, match=f"^{key} = {value} is not valid; give a mapping"):
                EDGCConfig(method="edgc", **{key: value})
    with pytest.raises(UserError, match=r"^unknown key entropy\.alpha; known keys"):
        EDGCConfig(entropy={"alpha": 0.1})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("overrides", "r_max", "expected"),
    [
        ({}, 64, 16),
        ({}, 40, 8),  # 10 in whole multiples
        ({}, 4, 4),
        ({"rank_multiple": 1}, 7, 1),
        ({"r_min": 12}, 64, 12),
        ({"r_min": 32}, 24, 24),  # a searched r_max below the configured r_min
    ],
)
def test_lower_rank(overrides: dict[str, Any], r_max: int, expected: int) -> None:
    assert CQMConfig(**overrides).lower_rank(r_max) == expected


# --------------------------------------------------------------------- presets


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


@given(share=st.floats(0.01, 1.0), stages=st.integers(1, 64), method=st.sampled_from(["powersgd", "topk"]))
@example(share=0.7, stages=10, method="topk")  # 7, whatever the last bit of 0.7 is
def test_the_first_stages_are_compressed(share: float, stages: int, method: str) -> None:
    rank = 8 if method == "powersgd" else None
    config = EDGCConfig(method=method, compressed_stages=share, **({"rank": rank} if rank else {}))
    plan = make_controller(config, [[(64, 64)]] * stages, 100).plan(1)
    compressed = sum(rank is not None for rank in plan.ranks)
    assert plan.ranks == (rank or 1,) * compressed + (None,) * (stages - compressed)
    assert compressed == 1 or share * stages - 1 + 1e-6 < compressed < share * stages + 1e-6
    assert 1 <= compressed <= stages
