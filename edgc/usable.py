"""Which settings mean something to which method, and to which way of training. Plain values: no torch.

Settings that cannot have an effect are refused instead of ignored, unless they have their default value: so a mistake
("rank" with top-k, a forgotten ``method``) is said at once, and a dictionary that spells out every default is valid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from edgc.errors import UserError

if TYPE_CHECKING:
    from edgc.config import EDGCConfig

Values = Mapping[str, Any]
"""All settings of an ``EDGCConfig`` by key; those that a rule of :data:`USES` looks at are not nested."""


class Use(NamedTuple):
    """Keys that mean something only where ``holds``, and how to get there, in words."""

    keys: tuple[str, ...]
    fix: str
    holds: Callable[[Values], bool]


def _method(*methods: str) -> Callable[[Values], bool]:
    return lambda settings: settings["method"] in methods


def _policy(*policies: str) -> Callable[[Values], bool]:
    return lambda settings: settings["method"] == "edgc" and settings["policy"] in policies


def _compresses(settings: Values) -> bool:
    return settings["method"] != "none"


def _searches(settings: Values) -> bool:
    """Whether method ``edgc`` times reductions: for alignment, or to find r_max."""
    wants_r_max = settings["r_max"] is None and settings["policy"] not in ("fixed", "schedule")
    return settings["method"] == "edgc" and (settings["alignment"] == "measured" or wants_r_max)


_LOW_RANK = ("warm_start", "factor_dtype", "one_sided", "error_dtype")
_CONTROLLER = (
    "policy",
    "r_max",
    "rank_multiple",
    "warmup_fraction",
    "warmup_bits",
    "warmup_limit_fraction",
    "stability_tolerance",
    "alignment",
    "remeasure_above",
)
_SPECTRAL = ("target_error", "smoothing", "monotone", "per_layer")

USES: tuple[Use, ...] = (
    Use(
        ("rank",),
        "set method: powersgd, or method: edgc with policy: fixed",
        lambda settings: settings["method"] == "powersgd" or _policy("fixed")(settings),
    ),
    Use(("schedule",), "set method: edgc with policy: schedule", _policy("schedule")),
    Use(_CONTROLLER, "set method: edgc", _method("edgc")),
    Use(
        ("r_min", "step_limit"),
        "set method: edgc with policy: cqm, released, loss or spectral",
        _policy("cqm", "released", "loss", "spectral"),
    ),
    Use(_SPECTRAL, "set method: edgc with policy: spectral", _policy("spectral")),
    Use(
        ("search_start", "search_repeats"),
        "have method: edgc measure times, with alignment: measured or without r_max",
        _searches,
    ),
    Use(
        ("timing",),
        "set method: edgc with alignment: given",
        lambda settings: settings["method"] == "edgc" and settings["alignment"] == "given",
    ),
    Use(_LOW_RANK, "set method: powersgd or edgc", _method("powersgd", "edgc")),
    Use(
        ("error_feedback",),
        "set a method that keeps what it did not send: powersgd, topk, randomk, quantize, sign or edgc",
        lambda settings: settings["method"] not in ("none", "bf16"),
    ),
    Use(("density",), "set method: topk or randomk", _method("topk", "randomk")),
    Use(("bits", "rounding"), "set method: quantize", _method("quantize")),
    Use(("cost_gate", "compress_experts"), "set a method that compresses", _compresses),
    Use(
        ("gate_interval",),
        "set a method that compresses with cost_gate: true",
        lambda settings: _compresses(settings) and bool(settings["cost_gate"]),
    ),
    Use(
        ("compressed_stages",),
        "set another method; under edgc alignment sets the ranks of the stages",
        lambda settings: settings["method"] not in ("none", "edgc"),
    ),
    # Studies record the entropy of all entries under any method.
    Use(
        ("entropy",),
        "set a method that compresses, or record_full_entropy: true",
        lambda settings: _compresses(settings) or bool(settings["record_full_entropy"]),
    ),
)
"""Keys that are not here mean something under every method: those of other traffic (``fused_embedding``,
``pipeline``) and of what is recorded (``window``, ``record_full_entropy``, ``min_compression_elements``), and ``seed``,
which is the job's, whether a method draws or not."""


def refuse_unusable(config: EDGCConfig) -> None:
    """Refuse a setting that differs from its default and that the method cannot use.

    Raises:
        UserError: naming the first such key, its value and the fix.
    """
    settings = vars(config)
    for use in USES:
        if use.holds(settings):
            continue
        for key in use.keys:
            if (found := _changed(config, key)) is not None:
                policy = f", policy: {config.policy}" if config.method == "edgc" else ""
                what = f"{found[0]} = {found[1]!r} is not used with method: {config.method}{policy}"
                raise UserError(what, fix=f"leave it out, or {use.fix}")


def _changed(settings: Any, key: str) -> tuple[str, Any] | None:
    """Dotted name and value of what differs from the default under ``key``; None if nothing does."""
    field = next(field for field in dataclasses.fields(settings) if field.name == key)
    value = getattr(settings, key)
    default: Any = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    if value == default:
        return None
    if not dataclasses.is_dataclass(value):
        return key, value
    inner = next(found for f in dataclasses.fields(value) if (found := _changed(value, f.name)) is not None)
    return f"{key}.{inner[0]}", inner[1]


def usable(values: Values, defaults: Values) -> dict[str, Any]:
    """``values`` without the settings that the method among them cannot use.

    For settings that were not written for this method: those that a study lays under all its variants, and those in
    the records of runs.

    Args:
        values: as for ``EDGCConfig.from_dict``, without ``preset``.
        defaults: what the other keys have, ``EDGCConfig().to_dict()``.
    """
    settings = {**defaults, **values}
    dropped = {key for use in USES if not use.holds(settings) for key in use.keys}
    return {key: value for key, value in values.items() if key not in dropped}


def refuse_stages(config: EDGCConfig, where: str) -> None:
    """Refuse what only pipeline stages, or Megatron's other parallelism, have a use for.

    Raises:
        UserError: naming the key, its value, ``where`` and the fix.
    """
    one = "a plain data-parallel job has one stage"
    for key, value, unused, fix in (
        ("pipeline.rank", config.pipeline.rank, None, f"{one}; set pipeline.rank: null"),
        ("fused_embedding", config.fused_embedding, False, f"{one}; set fused_embedding: false"),
        ("compressed_stages", config.compressed_stages, 1, f"{one}; set compressed_stages: 1"),
        ("alignment", config.alignment, "off", f"{one}; set alignment: off"),
        (
            "compress_experts",
            config.compress_experts,
            True,
            "a plain data-parallel job has no expert parallelism; set compress_experts: true",
        ),
    ):
        if value != unused:
            raise UserError(f"{key} = {value!r} cannot be used", where=where, fix=fix)
