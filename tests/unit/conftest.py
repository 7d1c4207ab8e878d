"""What several files of unit tests share."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# Machines are shared: how long one example of a property takes says nothing.
settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

REFERENCE = Path(__file__).resolve().parents[2] / "results" / "reference"
RESTORED = {
    "ci": ("moe", "optimus_cc", "window_ablation"),
    "workstation": ("orthonormal_q", "policies_bert", "rank_sweep", "tuning"),
}


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that is made once for all processes that test side by side."""
    base = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    with (base / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (base / f"{name}.done").exists():
            make(base / name)
            (base / f"{name}.done").touch()
    return base / name


@pytest.fixture(scope="session")
def kept_results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A results folder with kept runs of small studies (``RESTORED``), and the tables that are made of them now.

    Only to be read: a test that changes something works on a copy.
    """
    # Here, for other tests of this folder run where there is neither pandas nor Snakemake.
    from experiments.analyse.__main__ import analyse
    from experiments.verdicts import archive

    def make(results: Path) -> None:
        for scale, studies in RESTORED.items():
            for study in studies:
                folder = results / scale / study
                analyse(study, folder, archive.unpack(REFERENCE / scale / study, folder))

    return once(tmp_path_factory, "kept", make)


@pytest.fixture(scope="session")
def kept_tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one scale with the kept tables of every study, long ones as CSV too. Only to be read."""
    import pandas as pd

    def make(scale: Path) -> None:
        for source in (REFERENCE / name for name in ("ci", "long", "workstation")):
            for path in (*source.glob("*/*.csv"), *source.glob("*/*.parquet")):
                table = scale / path.parent.name / f"{path.stem}.csv"
                table.parent.mkdir(parents=True, exist_ok=True)
                if path.suffix == ".csv":
                    shutil.copy(path, table)
                else:
                    pd.read_parquet(path).to_csv(table, index=False)

    return once(tmp_path_factory, "tables", lambda folder: make(folder / "ci")) / "ci"
