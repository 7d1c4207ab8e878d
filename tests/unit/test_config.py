"""edgc.config: defaults of the paper, and one-line errors that name the key and the fix."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from edgc.compressors.powersgd import PowerSGDConfig
from edgc.config import EDGCConfig, methods, users
from edgc.control.policies.cqm import CQMConfig
from edgc.control.policies.given import FixedConfig
from edgc.errors import UserError
from edgc.sections import EntropyConfig, PipelineConfig, TimingConfig
from tests import examples

WHOLE: dict[str, Any] = {"rank": 4, "schedule": [[0, 8]], "bits": 4, "density": 0.5}
SCHEDULE: dict[str, Any] = {"method": "edgc", "policy": "schedule", "schedule": [[0, 8]]}
TIMED: dict[str, Any] = {"method": "edgc", "alignment": "given"}
GIVEN = {"alignment": "given", "timing": {"seconds_per_rank": 0.1}}


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def test_the_preset_is_the_paper_to_the_letter() -> None:
    config = EDGCConfig.from_dict({"preset": "paper"})
    assert (config.method, config.policy, config.alignment) == ("edgc", "cqm", "measured")
    assert (config.window, config.step_limit, config.rank_multiple) == (1000, 8, 4)
    assert (config.warmup_fraction, config.warmup_bits, config.remeasure_above) == (0.1, None, None)
    assert (config.r_max, config.r_min, config.lower_rank(64)) == (None, None, 16)
    entropy = config.entropy
    assert (entropy.iteration_rate, entropy.entry_rate, entropy.sampling) == (0.1, 0.25, "random")
    assert config.error_feedback and config.warm_start and not config.one_sided
    assert (config.factor_dtype, config.error_dtype) == ("fp32", "fp32")


def test_round_trip_through_plain_dictionaries() -> None:
    config = EDGCConfig(
        method="edgc",
        r_max=64,
        r_min=16,
        alignment="given",
        timing=TimingConfig(backward_seconds=0.5, seconds_per_rank=0.01),
        entropy=EntropyConfig(estimator="vasicek", sampling="random", seed=3),
        pipeline=PipelineConfig(rank=12, epilogue_only=True),
    )
    plain = config.to_dict()
    assert plain["entropy"]["estimator"] == "vasicek"
    assert EDGCConfig.from_dict(plain) == config
    assert EDGCConfig.from_dict({}) == EDGCConfig()


def test_settings_are_frozen_and_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EDGCConfig().window = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        EDGCConfig("edgc")  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "message", "fix"),
    [
        ({"metod": "edgc"}, "unknown key metod", "did you mean method?"),
        ({"xyz": 1}, "unknown key xyz", "known keys: method,"),
        ({"entropy": {"alpha": 0.1}}, "unknown key entropy.alpha", "known keys: estimator,"),
        (
            {"entropy": {"iteration_rat": 0.1}},
            "unknown key entropy.iteration_rat",
            "did you mean iteration_rate?",
        ),
        ({"method": "int4"}, "method = 'int4' is not valid", "did you mean method: quantize, bits: 4"),
        ({"entropy": {"iteration_rate": 0}}, "entropy.iteration_rate (alpha) = 0 is not valid", "above 0"),
        ({"entropy": {"iteration_rate": 1.5}}, "iteration_rate (alpha) = 1.5", "at most 1"),
        ({"entropy": {"entry_rate": 0.0}}, "entropy.entry_rate (beta) = 0.0", "above 0 and at most 1"),
        ({"entropy": {"entry_rate": math.nan}}, "entry_rate (beta) = nan", "use a number"),
        ({"entropy": {"estimator": "kde"}}, "estimator = 'kde'", "histogram, gaussian, vasicek, released"),
        ({"entropy": {"sampling": "stride"}}, "sampling = 'stride'", "diagonal, strided, random"),
        ({"entropy": {"source": "both"}}, "source = 'both'", "local, reduced"),
        ({"entropy": {"seed": -1}}, "seed = -1", "at least 0"),
        ({"method": "PowerSGD"}, "method = 'PowerSGD'", "use one of none, bf16, "),
        ({"method": "edgc", "policy": "linear"}, "policy = 'linear'", "use one of cqm, "),
        ({"method": "edgc", "policy": "schedule"}, "schedule is missing", "give the schedule"),
        ({**SCHEDULE, "schedule": []}, "schedule = []", "[[share of the run, rank], ...]"),
        (
            {**SCHEDULE, "schedule": [[0.5, 8], [0.2, 4]]},
            "schedule = [[0.5, 8], [0.2, 4]]",
            "shares that rise",
        ),
        ({**SCHEDULE, "schedule": [[0.5, 8], [1.2, 4]]}, "schedule = 1.2", "at most 1"),
        ({**SCHEDULE, "schedule": [[0.5, 0]]}, "schedule = 0", "whole number of at least 1"),
        ({**SCHEDULE, "schedule": [8, 4]}, "schedule = [8, 4]", "[[share of the run, rank], ...]"),
        ({**SCHEDULE, "schedule": "8"}, "schedule = '8'", "[[share of the run, rank], ...]"),
        ({"method": "edgc", "alignment": True}, "alignment = True", "off, given, measured"),
        ({"method": "edgc", "r_min": 32, "r_max": 16}, "r_min = 32", "at most r_max = 16"),
        ({"method": "edgc", "r_max": 30}, "r_max = 30", "multiple of 4"),
        ({"method": "edgc", "r_max": 64, "r_min": 6}, "r_min = 6", "multiple of 4"),
        ({"method": "edgc", "r_max": 0}, "r_max = 0", "whole number of at least 1"),
        ({"method": "powersgd", "rank": 2.5}, "rank = 2.5", "whole number"),
        ({"window": 0}, "window = 0", "at least 1"),
        ({"window": True}, "window = True", "whole number"),
        ({"window": "100"}, "window = '100'", "whole number"),
        ({"method": "edgc", "step_limit": 0}, "step_limit = 0", "at least 1"),
        ({"method": "edgc", "rank_multiple": 0}, "rank_multiple = 0", "at least 1"),
        ({"method": "edgc", "search_repeats": 0}, "search_repeats = 0", "at least 1"),
        ({"method": "edgc", "warmup_fraction": -0.1}, "warmup_fraction = -0.1", "at least 0"),
        ({"method": "edgc", "warmup_fraction": 0.6}, "warmup_limit_fraction = 0.5", "warmup_fraction = 0.6"),
        ({"method": "edgc", "stability_tolerance": 0}, "stability_tolerance = 0", "above 0"),
        ({"method": "topk", "error_feedback": "no"}, "error_feedback = 'no'", "true or false"),
        ({"method": "powersgd"}, "rank is missing: method: powersgd has no default", "give the rank"),
        ({"method": "edgc", "policy": "fixed"}, "rank is missing", "give the rank"),
        ({"method": "powersgd", "rank": None}, "rank = None", "whole number of at least 1"),
        ({"method": "edgc", "alignment": "given"}, "timing.seconds_per_rank = 0.0", "above 0"),
        ({"method": "edgc", "remeasure_above": 0}, "remeasure_above = 0", "above 0"),
        ({"method": "edgc", "remeasure_above": True}, "remeasure_above = True", "use a number"),
        ({"pipeline": {"rank": 0}}, "pipeline.rank = 0 is not valid", "whole number of at least 1"),
        ({"pipeline": {"epilogue": True}}, "unknown key pipeline.epilogue", "did you mean epilogue_only?"),
        ({"pipeline": {"error_feedback": 1}}, "pipeline.error_feedback = 1", "true or false"),
        ({"pipeline": {"factor_dtype": "int8"}}, "pipeline.factor_dtype = 'int8'", "use one of fp32, bf16"),
        ({**TIMED, "timing": {"backward_seconds": -1}}, "backward_seconds = -1", "at least 0"),
        ({**TIMED, "timing": {"seconds_fixed": math.inf}}, "seconds_fixed = inf", "use a number"),
    ],
)
def test_bad_settings_are_one_line_with_key_file_and_fix(values: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values, where="study.yaml")
    line = str(caught.value)
    assert "\n" not in line
    assert message in line
    assert "(in study.yaml)" in line
    assert fix in line


def test_errors_without_a_file_name_none() -> None:
    with pytest.raises(UserError, match="window = 0 is not valid; use a whole number of at least 1") as caught:
        EDGCConfig(window=0)
    assert caught.value.where is None


@pytest.mark.parametrize(
    ("values", "message", "fix"),
    [
        (
            {"rank": 8},
            "rank = 8 is not used with method: none",
            "set method: powersgd, or method: edgc with policy: fixed",
        ),
        ({"method": "topk", "rank": 8}, "rank = 8 is not used with method: topk", "leave it out, or set"),
        (
            {"method": "edgc", "rank": 8},
            "rank = 8 is not used with method: edgc, policy: cqm",
            "policy: fixed",
        ),
        (
            {**SCHEDULE, "rank": 8},
            "rank = 8 is not used with method: edgc, policy: schedule",
            "policy: fixed",
        ),
        ({"method": "powersgd", "rank": 8, "bits": 4}, "bits = 4 is not used", "set method: quantize"),
        ({"method": "topk", "factor_dtype": "int8"}, "factor_dtype = 'int8'", "set method: edgc or "),
        ({"method": "topk", "one_sided": True}, "one_sided = True", "set method: edgc or "),
        ({"method": "sign", "error_dtype": "bf16"}, "error_dtype = 'bf16'", "set method: edgc or "),
        ({"method": "quantize", "warm_start": False}, "warm_start = False", "set method: edgc or "),
        (
            {"method": "bf16", "error_feedback": False},
            "error_feedback = False",
            "set method: edgc, ",
        ),
        ({"method": "quantize", "density": 0.5}, "density = 0.5", "set method: randomk"),
        ({"method": "topk", "rounding": "stochastic"}, "rounding = 'stochastic'", "set method: quantize"),
        ({"method": "edgc", "target_error": 0.5}, "target_error = 0.5 is not used", "policy: spectral"),
        ({"method": "edgc", "monotone": True}, "monotone = True is not used", "policy: spectral"),
        ({"method": "edgc", "per_layer": True}, "per_layer = True is not used", "policy: spectral"),
        ({"method": "powersgd", "rank": 8, "per_layer": True}, "per_layer = True", "policy: spectral"),
        ({"method": "edgc", "schedule": [[0, 8]]}, "schedule = [[0, 8]] is not used", "policy: schedule"),
        ({**SCHEDULE, "r_min": 4}, "r_min = 4 is not used", "set method: edgc with policy: cqm, "),
        (
            {**SCHEDULE, "step_limit": 4},
            "step_limit = 4 is not used",
            "set method: edgc with policy: cqm, ",
        ),
        ({"method": "powersgd", "rank": 8, "r_max": 16}, "r_max = 16 is not used", "set method: edgc"),
        ({"method": "topk", "policy": "loss"}, "policy = 'loss' is not used", "set method: edgc"),
        ({"method": "topk", "warmup_bits": 8}, "warmup_bits = 8 is not used", "set method: edgc"),
        ({"method": "sign", "alignment": "given"}, "alignment = 'given' is not used", "set method: edgc"),
        (
            {"method": "edgc", "timing": {"seconds_fixed": 1}},
            "timing.seconds_fixed = 1 is",
            "alignment: given",
        ),
        ({"method": "edgc", "r_max": 16, "search_repeats": 5}, "search_repeats = 5", "without r_max"),
        ({**SCHEDULE, "search_start": 5}, "search_start = 5", "alignment: measured"),
        ({"method": "topk", "gate_interval": 5}, "gate_interval = 5", "cost_gate: true"),
        ({"cost_gate": True}, "cost_gate = True is not used with method: none", "set method: bf16, edgc, "),
        ({"compress_experts": False}, "compress_experts = False is not used", "set method: bf16, edgc, "),
        (
            {"compressed_stages": 0.5},
            "compressed_stages = 0.5 is not used",
            "set method: bf16, ",
        ),
        (
            {"entropy": {"entry_rate": 0.5}},
            "entropy.entry_rate = 0.5 is not used",
            "record_full_entropy: true",
        ),
        ({"pipeline": {"epilogue_only": True}}, "pipeline.epilogue_only = True", "give the rank beside it"),
    ],
)
def test_what_the_method_cannot_use_is_refused(values: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values, where="study.yaml")
    line = str(caught.value)
    assert message in line and "(in study.yaml); " in line and fix in line and "\n" not in line
    kept = EDGCConfig.from_record(values | {"pipeline": {}}).to_dict()
    assert EDGCConfig.from_dict(kept).to_dict() == kept


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
    for name, (kind, example) in examples.FOUND.items():
        assert examples.config_of(name).build() is not None and example.sent(8, 16) > 0, kind


def test_settings_of_other_traffic_and_of_records_go_with_every_method() -> None:
    for name in examples.FOUND:
        given: dict[str, Any] = {
            **examples.settings_of(name),
            "window": 20,
            "record_full_entropy": True,
            "entropy": {"iteration_rate": 0.5},
            "min_compression_elements": 64,
            "fused_embedding": True,
            "pipeline": {"rank": 8},
            "seed": 3,
        }
        assert flat(EDGCConfig.from_dict(given).to_dict()).items() >= flat(given).items()
        if name != "none":
            del given["record_full_entropy"]
            assert EDGCConfig.from_dict({**given, "cost_gate": True, "gate_interval": 9, "compress_experts": False})


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
    config = EDGCConfig(method="edgc", entropy={"iteration_rate": 0.5}, pipeline={"rank": 4}, **GIVEN)
    assert config.entropy == EntropyConfig(iteration_rate=0.5)
    assert config.timing.seconds_per_rank == 0.1 and config.pipeline == PipelineConfig(rank=4)
    assert EDGCConfig.from_dict(config.to_dict()) == config
    for key in ("entropy", "timing", "pipeline"):
        for value in (None, 5):
            with pytest.raises(UserError, match=f"^{key} = {value} is not valid; give a mapping"):
                EDGCConfig(method="edgc", **{key: value})
    with pytest.raises(UserError, match=r"^unknown key entropy\.alpha; known keys"):
        EDGCConfig(entropy={"alpha": 0.1})  # type: ignore[arg-type]


def test_whole_numbers_of_other_types_become_plain_ones() -> None:
    config = EDGCConfig(method="powersgd", rank=np.int64(8), window=np.int32(20), seed=torch.tensor(3))  # type: ignore[arg-type]
    assert config == EDGCConfig(method="powersgd", rank=8, window=20, seed=3)
    assert {type(config.rank), type(config.window), type(config.seed)} == {int}
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()
    for bad in (np.float64(8), np.array([8]), True, "8", 8.0):
        with pytest.raises(UserError, match=r"^rank = .* is not valid; use a whole number of at least 1"):
            EDGCConfig(method="powersgd", rank=bad)  # type: ignore[arg-type]


def test_a_fixed_rank_need_not_be_a_multiple() -> None:
    assert EDGCConfig(method="powersgd", rank=6).rank == 6
    assert EDGCConfig(method="edgc", policy="fixed", rank=6).rank == 6
    assert EDGCConfig.from_dict(SCHEDULE).schedule == ((0.0, 8),)
    assert EDGCConfig(method="edgc", rank_multiple=1, r_max=30).r_max == 30


@pytest.mark.parametrize(
    ("overrides", "r_max", "expected"),
    [
        ({}, 64, 16),
        ({}, 40, 8),  # 10 in whole multiples
        ({}, 12, 4),
        ({}, 4, 4),
        ({"rank_multiple": 1}, 7, 1),
        ({"rank_multiple": 8}, 8, 8),
        ({"r_min": 12}, 64, 12),
        ({"r_min": 32}, 24, 24),  # a searched r_max below the configured r_min
    ],
)
def test_lower_rank(overrides: dict[str, Any], r_max: int, expected: int) -> None:
    assert CQMConfig(**overrides).lower_rank(r_max) == expected


def test_import_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, edgc.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
