"""What several files of unit tests share."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Machines are shared: how long one example of a property takes says nothing.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference"
RESTORED = [("ci", "window_ablation")]
RESTORED += [("workstation", name) for name in ("orthonormal_q", "policies", "rank_sweep")]


@pytest.fixture(scope="session")
def kept_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with kept runs of small studies (``RESTORED``), and the tables that are made of them now.

    Only to be read: a test that changes something works on a copy.
    """
    # Here, for other tests of this folder run where there is neither pandas nor Snakemake.
    from experiments.analyse.__main__ import analyse
    from experiments.verdicts import archive

    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with (base / "kept.lock").open("w") as lock:  # made once for all processes that test side by side
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / "kept.done").exists():
            for scale, study in RESTORED:
                folder = base / "kept" / scale / study
                analyse(study, folder, archive.unpack(REFERENCE / scale / study, folder))
            (base / "kept.done").touch()
    return base / "kept"


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Callable[[str], Any]:
    """Put the ``Stand`` of a file of tests, made with what fails in it, in the place of Triton's kernels."""

    def use(fails: str) -> Any:
        kernels = request.module.Stand(fails)
        monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
        monkeypatch.setattr(kernels.__name__, kernels, raising=False)
        monkeypatch.setattr("edgc.compressors.kernels._tried", {})
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        return kernels

    return use
