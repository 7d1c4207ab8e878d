"""The examples of docs/library/trainers.md for packages that are installed: they run, learn, compress, and resume.

After its own run each is given a loss scale. On a CPU the trainers make none, but they use one that they have.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.readme import ROOT, block, check_ddp_example, launched

pytestmark = [pytest.mark.slow, pytest.mark.costly]
PAGE = ROOT / "docs" / "library" / "trainers.md"
SCALER = 'torch.amp.GradScaler("cpu", init_scale=2.0**12)'


def test_accelerate_compresses_takes_up_its_state_and_follows_a_loss_scale(tmp_path: Path) -> None:
    program, made = tmp_path / "train.py", "accelerator = Accelerator(cpu=True)\n"
    example = block("from accelerate import", PAGE)
    assert made in example
    scaled = example.replace(made, f"{made}accelerator.scaler = {SCALER}\n")
    scales = 'accelerator.print("scales", handle.engine.entropy.scale, accelerator.scaler.get_scale())\n'
    program.write_text(example + scaled + scales, encoding="utf-8")
    printed = launched(program)
    for part in printed.split("resumed")[:-1]:
        check_ddp_example(part)
    assert printed.count("resumed") == 2 and "scales 4096.0 4096.0" in printed
    assert {path.name for path in (tmp_path / "state").glob("edgc-*.pt")} == {"edgc-0.pt", "edgc-1.pt"}


def test_trainer_compresses_resumes_where_it_was_and_trains_again_with_a_loss_scale(tmp_path: Path) -> None:
    program, again = tmp_path / "train.py", tmp_path / "again.py"
    example = block("from transformers import", PAGE)
    program.write_text(example, encoding="utf-8")
    # A new optimizer, for the old one has been prepared without the scaler.
    scaled = f"trainer.accelerator.scaler = {SCALER}\ntrainer.optimizer = trainer.lr_scheduler = None\n"
    scales = "print('scales', compression.handle.engine.entropy.scale, trainer.accelerator.scaler.get_scale())\n"
    again.write_text(f"{example}{scaled}trainer.train()\n{scales}", encoding="utf-8")
    losses, sent = [], []
    for path, arguments in ((program, ()), (again, ("out/checkpoint-20",))):
        printed = launched(path, *arguments)
        own = re.split(r"(?<=bytes sent)", printed)[0]
        losses.append([float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", own)])
        sent += [int(count) for count in re.findall(r"(\d+) bytes sent", own)]
    assert "scales 4096.0 4096.0" in printed
    whole, resumed = losses
    assert len(whole) == 2 and whole[1] < whole[0] and resumed == whole[1:]
    # Two layers 64 wide: the matrices of attention and MLP, two embeddings, biases and norms, in four bytes each.
    dense = 4 * (2 * (12 * 64 * 64 + 13 * 64) + 64 * 64 + 32 * 64 + 2 * 64)
    assert len(sent) == 2 and all(0 < count < 0.25 * dense for count in sent)


def test_lightning_compresses(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    program = tmp_path / "train.py"
    program.write_text(block("import lightning", PAGE), encoding="utf-8")
    assert re.search(r"\d+ bytes sent", launched(program))
