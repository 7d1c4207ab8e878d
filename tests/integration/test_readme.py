"""The README's three lines, and the DDP example of the docs, do what is said of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example

pytestmark = pytest.mark.slow


def launched(program: Path, *arguments: str) -> str:
    """What a program prints that torchrun starts on two ranks, in its folder."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(program)]
    done = subprocess.run(
        [*launch, *arguments],
        cwd=program.parent,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HOME": str(program.parent)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_ddp_example_runs_and_learns(tmp_path: Path) -> None:
    example = block("init_process_group")
    code = [line for line in example.splitlines() if line and not line.startswith("#")]
    assert len(code) <= 20
    program = tmp_path / "train.py"
    program.write_text(example, encoding="utf-8")
    check_ddp_example(launched(program))


def test_the_three_lines_of_the_readme_compress_any_script(tmp_path: Path) -> None:
    lines = block("edgc.ddp.register", ROOT / "README.md")
    assert len([line for line in lines.splitlines() if line]) == 3
    before, registered, after = block("init_process_group").partition("handle = ")
    rest = after.partition("\n")[2]
    assert registered
    program = tmp_path / "train.py"
    program.write_text(f"{before}total_steps = 200\n{lines}{rest}", encoding="utf-8")
    check_ddp_example(launched(program), share=0.51)
