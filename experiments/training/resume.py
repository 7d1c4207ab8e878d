"""Whether a checkpoint is of the very run that is to go on from it: settings and data. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from edgc.checks import dotted
from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments.spec.settings import RunConfig

# Free to differ: they change nothing that the run computes.
FREE = ("label", "train.checkpoint_interval", "train.keep_warm_up")
# Nor before compression begins.
FREE_IN_WARM_UP = (*FREE, "variant", "branch", "follows", "compression")


def settings_of(run: RunConfig, fingerprint: str | None) -> dict[str, Any]:
    """All settings of a run, in JSON's types, with the fingerprint of its prepared data."""
    settings = run.model_dump(mode="json")
    settings["data"]["fingerprint"] = fingerprint
    return settings


def refuse_other(
    saved: Mapping[str, Any], now: Mapping[str, Any], checkpoint: Path, free: Collection[str] = FREE
) -> None:
    """``UserError`` for the first setting, with both values, in which ``checkpoint`` and the run to go on differ.

    Args:
        free: settings, or whole sections, that may differ.
    """
    before, after = dotted(_effective(saved)), dotted(_effective(now))
    missing = object()
    keys = [key for key in {**before, **after} if not {key, key.partition(".")[0]}.intersection(free)]
    other = [key for key in keys if before.get(key, missing) != after.get(key, missing)]
    if other:
        key = other[0]
        more = f" (and {len(other) - 1} more)" if len(other) > 1 else ""
        what = f"{key} = {after.get(key)!r}, but the run's checkpoint has {before.get(key)!r}{more}"
        fix = "restore the setting, or start anew with `python -m experiments.training.launch ... --fresh`"
        raise UserError(what, where=checkpoint / "run.yaml", fix=fix)


def _effective(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """``settings`` without those of compression that its method cannot use: earlier versions recorded them."""
    if not isinstance(compression := settings.get("compression"), Mapping):
        return settings
    return {**settings, "compression": EDGCConfig.usable(compression)}
