"""The examples of docs/library/trainers.md: they run, learn, compress, accumulate, log, and resume bit for bit.

On a CPU the frameworks make no loss scale, but they use one that they are given.
"""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.readme import ROOT, block, check_ddp_example, launched
from tests.workers import same

pytestmark = [pytest.mark.slow, pytest.mark.costly]
PAGE = ROOT / "docs" / "library" / "trainers.md"
SCALER = 'torch.amp.GradScaler("cpu", init_scale=2.0**12)'
CONFIG = 'EDGCConfig(method="powersgd", rank=8)'
LIGHTNING = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")


def example(holding: str) -> str:
    text = block(holding, PAGE)
    assert len(text.splitlines()) <= 41, "a first line that says how to start it, and 40"
    return text


def test_trainer(tmp_path: Path) -> None:
    program, out = tmp_path / "train.py", tmp_path / "out"
    program.write_text(example("from transformers import"), encoding="utf-8")
    launched(program)
    history = json.loads((out / "checkpoint-40/trainer_state.json").read_text())["log_history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    numbers = [entry for entry in history if "edgc_bytes" in entry]
    assert len(losses) == len(numbers) == 2 and losses[1] < losses[0]
    # Two layers 64 wide: the matrices of attention and MLP, two embeddings, biases and norms, in four bytes each.
    dense = 4 * (2 * (12 * 64 * 64 + 13 * 64) + 64 * 64 + 32 * 64 + 2 * 64)
    for entry in numbers:
        assert 0 < entry["edgc_bytes"] < 0.25 * dense and entry["edgc_rank"] == 8 and 0 < entry["edgc_error"] < 1
    (out / "checkpoint-40").rename(tmp_path / "whole")
    launched(program, "out/checkpoint-20")
    resumed, whole = out / "checkpoint-40", tmp_path / "whole"
    assert (resumed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    for name in ("edgc-0-of-2.pt", "edgc-1-of-2.pt"):
        assert same(*(torch.load(folder / name, weights_only=True) for folder in (resumed, whole))), name


def test_trainer_follows_a_loss_scale_in_every_run_and_logs_entropies(tmp_path: Path) -> None:
    edgc = 'EDGCConfig.from_dict({"method": "edgc", "window": 5, "entropy": {"iteration_rate": 0.5}})'
    text = example("from transformers import")
    assert CONFIG in text
    again = f"""
# A new optimizer, for the old one has been prepared without the scaler.
trainer.accelerator.scaler = {SCALER}
trainer.optimizer = trainer.lr_scheduler = None
trainer.train()
handle = trainer.callback_handler.callbacks[-1].handle
print("scales", handle.engine.entropy.scale, trainer.accelerator.scaler.get_scale(), handle.active)
"""
    program = tmp_path / "train.py"
    program.write_text(text.replace(CONFIG, edgc) + again, encoding="utf-8")
    assert "scales 4096.0 4096.0 False" in launched(program)
    history = json.loads((tmp_path / "out/checkpoint-40/trainer_state.json").read_text())["log_history"]
    entropies = [entry["edgc_entropy"] for entry in history if "edgc_bytes" in entry]
    assert len(entropies) == 2 and all(-20 < entropy < 0 for entropy in entropies)


def test_accelerate(tmp_path: Path) -> None:
    program, made = tmp_path / "train.py", "gradient_accumulation_steps=2)\n"
    text = example("from accelerate import")
    assert made in text
    # Rank 0 saves late what is its alone, the model.
    resumed = """
import time
accelerator.register_save_state_pre_hook(lambda *_: time.sleep(2 * accelerator.is_main_process))
accelerator.save_state("late")
ends = []
for _ in range(2):
    accelerator.load_state("late")
    data.manual_seed(7 + accelerator.process_index)
    train(20)
    ends.append([parameter.detach().clone() for parameter in model.parameters()])
accelerator.print("equal", all(map(torch.equal, *ends)))
handle.remove()
register(accelerator, model, handle.engine.config, iterations=200)
accelerator.save_state("again")
"""
    scaled = text.replace(made, f"{made}accelerator.scaler = {SCALER}\n")
    scales = 'accelerator.print("scales", handle.engine.entropy.scale, accelerator.scaler.get_scale())\n'
    program.write_text(text + resumed + scaled + scales, encoding="utf-8")
    plain, scaled = launched(program).split("equal True")
    check_ddp_example(plain)
    check_ddp_example(scaled)
    assert "scales 4096.0 4096.0" in scaled
    assert {path.name for path in (tmp_path / "again").glob("edgc-*")} == {"edgc-0-of-2.pt", "edgc-1-of-2.pt"}


@pytest.fixture
def lightning(tmp_path: Path) -> Path:
    """A folder with Lightning, which wants other packages than the suite and is in no environment of it."""
    folder = tmp_path / "lightning"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *LIGHTNING]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{LIGHTNING[0]} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return folder


def test_lightning(tmp_path: Path, lightning: Path) -> None:
    program, out = tmp_path / "train.py", tmp_path / "out"
    text = example("import lightning\n")
    scaled = f"""
from lightning.pytorch.plugins.precision import MixedPrecision

callback, scaler = CompressionCallback({CONFIG}), {SCALER}
how = {{"max_steps": 4, "plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}}
lightning.Trainer(strategy="ddp", callbacks=[callback], logger=False, **where, **how).fit(Reverse(), data)
print("scales", callback.handle.engine.entropy.scale, scaler.get_scale(), callback.handle.active)
"""
    program.write_text(text + scaled, encoding="utf-8")
    assert "scales 4096.0 4096.0 False" in launched(program, path=(lightning,))
    program.write_text(text, encoding="utf-8")
    first, last = "epoch=0-step=100.ckpt", "epoch=1-step=200.ckpt"
    with (tmp_path / "logs/lightning_logs/version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    losses = [float(row["loss"]) for row in rows if row["loss"]]
    assert losses[-1] < 0.9 * losses[0]
    dense = 4 * sum(64 * 256 * 2 + bias for bias in (256 + 64,))
    sent = [int(float(row["edgc_bytes"])) for row in rows if row["edgc_bytes"]]
    assert len(sent) == 4 and all(0 < count < 0.25 * dense for count in sent)
    whole = torch.load(out / last, weights_only=True)
    assert [state["rank"] for state in whole["edgc"]] == [0, 1]
    shutil.rmtree(tmp_path / "logs")
    (out / last).unlink()
    launched(program, f"out/{first}", path=(lightning,))
    resumed = torch.load(out / last, weights_only=True)
    assert same(whole["state_dict"], resumed["state_dict"]) and same(whole["edgc"], resumed["edgc"])
