"""Code that a run is computed by, and the code that the record of a run or of prepared data names."""

from __future__ import annotations

from pathlib import Path

from edgc.errors import UserError
from experiments.common import source
from experiments.common.yaml_settings import load_yaml

TRAINING = "experiments.training.train"  # what every rank of a run executes
DATA = "experiments.data.folder"


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
        values = load_yaml(record)
    except UserError:
        return None
    code = (values.get("provenance") or values).get("code")
    return str(code) if code else None
