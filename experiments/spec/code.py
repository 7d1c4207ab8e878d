"""Which code a run is computed by, and which code the record of a run or of prepared data names."""

from __future__ import annotations

from pathlib import Path

import yaml

from experiments.common import source

TRAINING = "experiments.training.train"  # what every rank of a run executes
DATA = "experiments.data.prepare"


def training_code() -> str:
    """Fingerprint of the code that a training run is computed by (:func:`experiments.common.source.fingerprint`)."""
    return source.fingerprint(TRAINING)


def data_code() -> str:
    """Fingerprint of the code that prepares text."""
    return source.fingerprint(DATA, without=["experiments.spec.settings", "edgc.config"])


def recorded_code(record: Path) -> str | None:
    """The fingerprint in a ``run.yaml`` or ``data.yaml``; None without such a file, or where it names none.

    A run that went on from a checkpoint of other code has the fingerprints of both, joined by ``+``.
    """
    try:
        values = yaml.safe_load(record.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None
    values = values if isinstance(values, dict) else {}
    found = (values.get("provenance") or values).get("code")
    return str(found) if found else None
