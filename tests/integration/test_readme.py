"""The DDP example of the README does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


def test_the_ddp_example_runs_and_learns(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if "edgc.ddp" in block]
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
    lines = re.findall(r"step (\d+): loss ([\d.]+), (\d+) bytes sent", done.stdout)
    assert [int(step) for step, _, _ in lines] == [50, 100, 150, 200], done.stdout
    assert float(lines[-1][1]) < 0.9 * float(lines[0][1])
    dense = 4 * sum(64 * 256 * 2 + bias for bias in (256 + 64,))
    assert all(0 < int(sent) < 0.25 * dense for _, _, sent in lines)
