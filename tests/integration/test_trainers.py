"""The examples of docs/library/trainers.md for packages that are installed: they run, learn, compress, and resume."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example
from tests.integration.test_readme import launched

pytestmark = pytest.mark.slow
PAGE = ROOT / "docs" / "library" / "trainers.md"


def test_accelerate_compresses_and_takes_up_its_state(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(block("from accelerate import", PAGE), encoding="utf-8")
    printed = launched(program)
    check_ddp_example(printed)
    assert "resumed" in printed
    assert {path.name for path in (tmp_path / "state").glob("edgc-*.pt")} == {"edgc-0.pt", "edgc-1.pt"}


def test_trainer_compresses_and_resumes_where_it_was(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(block("from transformers import", PAGE), encoding="utf-8")
    losses, sent = [], []
    for arguments in ((), ("out/checkpoint-20",)):
        printed = launched(program, *arguments)
        losses.append([float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", printed)])
        sent += [int(count) for count in re.findall(r"(\d+) bytes sent", printed)]
    whole, resumed = losses
    assert len(whole) == 2 and whole[1] < whole[0] and resumed == whole[1:]
    # Two layers 64 wide: the matrices of attention and MLP, two embeddings, biases and norms, in four bytes each.
    dense = 4 * (2 * (12 * 64 * 64 + 13 * 64) + 64 * 64 + 32 * 64 + 2 * 64)
    assert len(sent) == 2 and all(0 < count < 0.25 * dense for count in sent)
