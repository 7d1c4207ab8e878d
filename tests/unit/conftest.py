"""What several files of unit tests share."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared: how long one example of a property takes says nothing.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


@pytest.fixture(scope="session")
def synthetic_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one scale with invented runs of every study that trains, and their tables.

    Made once for all processes that test side by side, for it takes long. Only to be read: a test that
    changes something works on a copy.
    """
    # Here, for other tests of this folder run where there is neither pandas nor Snakemake.
    from experiments.analyse.__main__ import analyse
    from experiments.spec import matrix
    from tests.unit import synthetic_runs

    own = tmp_path_factory.getbasetemp()
    base = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    folder, done = base / "synthetic" / "ci", base / "synthetic" / "done"
    with (base / "synthetic.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            synthetic_runs.write_all(folder)
            for study in matrix.studies():
                if matrix.load_study(study).analysis and study not in synthetic_runs.COPIES:
                    analyse(study, folder / study)
            for study, original in synthetic_runs.COPIES.items():
                (folder / study).mkdir()
                for table in (folder / original).glob("*.csv"):
                    shutil.copy(table, folder / study)
            done.touch()
    return folder
