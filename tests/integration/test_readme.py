"""README's three lines compress any script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example, launched

pytestmark = pytest.mark.slow


def test_the_three_lines_of_the_readme_compress_any_script(tmp_path: Path) -> None:
    lines = block("edgc.ddp.register", ROOT / "README.md")
    assert len([line for line in lines.splitlines() if line]) == 3
    before, registered, after = block("init_process_group").partition("handle = ")
    rest = after.partition("\n")[2]
    assert registered
    program = tmp_path / "train.py"
    program.write_text(f"{before}total_steps = 200\n{lines}{rest}", encoding="utf-8")
    check_ddp_example(launched(program), share=0.51)
