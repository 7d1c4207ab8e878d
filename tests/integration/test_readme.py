"""The DDP example of the README does what the README says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example

pytestmark = pytest.mark.slow


def test_the_ddp_example_runs_and_learns(tmp_path: Path) -> None:
    example = block("edgc.ddp")
    code = [line for line in example.splitlines() if line and not line.startswith("#")]
    assert len(code) <= 20
    program = tmp_path / "train.py"
    program.write_text(example, encoding="utf-8")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(program),
    ]
    done = subprocess.run(
        launch,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    check_ddp_example(done.stdout)
