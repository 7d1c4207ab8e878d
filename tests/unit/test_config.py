"""edgc.config: defaults of the paper, and one-line errors that name the key and the fix."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from edgc.config import EDGCConfig, EntropyConfig, PipelineConfig, TimingConfig
from edgc.errors import UserError


def test_defaults_are_the_papers() -> None:
    config = EDGCConfig()
    assert (config.window, config.step_limit, config.rank_multiple) == (1000, 8, 4)
    assert config.warmup_fraction == 0.1
    assert (config.entropy.iteration_rate, config.entropy.entry_rate) == (0.1, 0.25)
    assert config.method == "none"


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
        ({"entropy": {"iteration_rate": 0}}, "entropy.iteration_rate (alpha) = 0 is not valid", "above 0"),
        ({"entropy": {"iteration_rate": 1.5}}, "iteration_rate (alpha) = 1.5", "at most 1"),
        ({"entropy": {"entry_rate": 0.0}}, "entropy.entry_rate (beta) = 0.0", "above 0 and at most 1"),
        ({"entropy": {"entry_rate": math.nan}}, "entry_rate (beta) = nan", "use a number"),
        ({"entropy": {"estimator": "kde"}}, "estimator = 'kde'", "histogram, gaussian, vasicek, released"),
        ({"entropy": {"sampling": "stride"}}, "sampling = 'stride'", "diagonal, strided, random"),
        ({"entropy": {"source": "both"}}, "source = 'both'", "local, reduced"),
        ({"entropy": {"seed": -1}}, "seed = -1", "at least 0"),
        ({"method": "PowerSGD"}, "method = 'PowerSGD'", "use one of none, bf16, powersgd"),
        ({"policy": "linear"}, "policy = 'linear'", "cqm, released, loss, fixed"),
        ({"method": "edgc", "policy": "schedule"}, "schedule = ()", "give [[share of the run, rank], ...]"),
        ({"schedule": [[0.5, 8], [0.2, 4]]}, "schedule = [[0.5, 8], [0.2, 4]]", "shares that rise"),
        ({"schedule": [[0.5, 8], [1.2, 4]]}, "schedule = 1.2", "at most 1"),
        ({"schedule": [[0.5, 0]]}, "schedule = 0", "whole number of at least 1"),
        ({"schedule": [8, 4]}, "schedule = [8, 4]", "[[share of the run, rank], ...]"),
        ({"schedule": "8"}, "schedule = '8'", "[[share of the run, rank], ...]"),
        ({"alignment": True}, "alignment = True", "off, given, measured"),
        ({"method": "edgc", "r_min": 32, "r_max": 16}, "r_min = 32", "at most r_max = 16"),
        ({"method": "edgc", "r_max": 30}, "r_max = 30", "multiple of 4"),
        ({"method": "edgc", "r_max": 64, "r_min": 6}, "r_min = 6", "multiple of 4"),
        ({"r_max": 0}, "r_max = 0", "whole number of at least 1"),
        ({"rank": 2.5}, "rank = 2.5", "whole number"),
        ({"window": 0}, "window = 0", "at least 1"),
        ({"window": True}, "window = True", "whole number"),
        ({"window": "100"}, "window = '100'", "whole number"),
        ({"step_limit": 0}, "step_limit = 0", "at least 1"),
        ({"rank_multiple": 0}, "rank_multiple = 0", "at least 1"),
        ({"search_repeats": 0}, "search_repeats = 0", "at least 1"),
        ({"warmup_fraction": -0.1}, "warmup_fraction = -0.1", "at least 0"),
        ({"warmup_fraction": 0.6}, "warmup_limit_fraction = 0.5", "warmup_fraction = 0.6"),
        ({"stability_tolerance": 0}, "stability_tolerance = 0", "above 0"),
        ({"error_feedback": "no"}, "error_feedback = 'no'", "true or false"),
        ({"method": "powersgd"}, "rank = None", "give the rank"),
        ({"method": "edgc", "policy": "fixed"}, "rank = None", "give the rank"),
        ({"alignment": "given"}, "timing.seconds_per_rank = 0.0", "above 0"),
        ({"remeasure_above": 0}, "remeasure_above = 0", "above 0"),
        ({"remeasure_above": True}, "remeasure_above = True", "use a number"),
        ({"pipeline": {"rank": 0}}, "pipeline.rank = 0 is not valid", "whole number of at least 1"),
        ({"pipeline": {"epilogue": True}}, "unknown key pipeline.epilogue", "did you mean epilogue_only?"),
        ({"pipeline": {"error_feedback": 1}}, "pipeline.error_feedback = 1", "true or false"),
        ({"pipeline": {"factor_dtype": "int8"}}, "pipeline.factor_dtype = 'int8'", "use one of fp32, bf16"),
        ({"timing": {"backward_seconds": -1}}, "backward_seconds = -1", "at least 0"),
        ({"timing": {"seconds_fixed": math.inf}}, "seconds_fixed = inf", "use a number"),
    ],
)
def test_bad_settings_are_one_line_with_key_file_and_fix(
    values: dict[str, Any], message: str, fix: str
) -> None:
    with pytest.raises(UserError) as caught:
        EDGCConfig.from_dict(values, where="study.yaml")
    line = str(caught.value)
    assert "\n" not in line
    assert message in line
    assert "(in study.yaml)" in line
    assert fix in line


def test_errors_without_a_file_name_none() -> None:
    with pytest.raises(
        UserError, match="window = 0 is not valid; use a whole number of at least 1"
    ) as caught:
        EDGCConfig(window=0)
    assert caught.value.where is None


def test_a_fixed_rank_need_not_be_a_multiple() -> None:
    assert EDGCConfig(method="powersgd", rank=6).rank == 6
    assert EDGCConfig(method="edgc", policy="fixed", rank=6).rank == 6
    assert EDGCConfig.from_dict({"schedule": [[0, 8]]}).schedule == ((0.0, 8),)
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
    assert EDGCConfig(**overrides).lower_rank(r_max) == expected


def test_import_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, edgc.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
