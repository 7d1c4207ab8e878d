"""The examples of docs/library/trainers.md: they run, learn, compress, accumulate, log, and resume bit for bit.

On a CPU the frameworks make no loss scale, but they use one that they are given.
"""

from __future__ import annotations

import csv
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integration.readme import ROOT, block, check_ddp_example, launched
from tests.workers import same

pytestmark = pytest.mark.frameworks
PAGE = ROOT / "docs" / "library" / "trainers.md"
SCALER = 'torch.amp.GradScaler("cpu", init_scale=2.0**12)'
CONFIG = 'EDGCConfig(method="powersgd", rank=8)'
END = "torch.distributed.destroy_process_group()"  # of the last line of Lightning's example
LIGHTNING = ("lightning==2.6.6", "lightning-utilities==0.15.3", "torchmetrics==1.9.0")
TORCHTITAN = (
    "torchtitan==0.3.0",
    "torch-checkpointing==0.1.1",
    "torchdata==0.11.0",
    "spmd-types==0.2.3",
    "einops==0.8.2",
    "tyro==1.0.17",
    "docstring-parser==0.18.0",
    "typeguard==4.6.1",
)


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
    text = example("import Accelerator\n")
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


ON_CPU = """
import accelerate.state
from accelerate.utils import DistributedType

# Accelerate shards on accelerators only.
init = accelerate.state.AcceleratorState.__init__


def sharding(self, *args, fsdp_plugin=None, **kwargs):
    init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        accelerate.state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP


accelerate.state.AcceleratorState.__init__ = sharding
"""
LOADED = """
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
if int(os.environ["RANK"]) == 0:
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **sizes)).save_pretrained("start")
torch.distributed.init_process_group("gloo")
torch.distributed.barrier()
two = DistributedConfig(dp_replicate_size=2, fsdp_size=1)
model = LlamaForCausalLM.from_pretrained("start", distributed_config=two)
arguments = TrainingArguments("loaded", max_steps=4, save_strategy="no", logging_steps=2, use_cpu=True, **gradual)
trainer = Trainer(model=model, args=arguments, train_dataset=Text())
callback = CompressionCallback(trainer, EDGCConfig(method="powersgd", rank=8))
trainer.add_callback(callback)
trainer.train()
last = callback.handle.last
print("loaded", type(callback.handle).__module__, last.iteration, last.statistics.bytes < last.statistics.dense_bytes)
accelerate.state.AcceleratorState._reset_state(True)
"""


def test_sharded_by_accelerate_and_by_the_trainer(tmp_path: Path) -> None:
    """One launch: the Trainer with what transformers has sharded, then through Accelerate; Accelerate alone."""
    program, text = tmp_path / "train.py", example("from transformers import")
    quantised = text.replace(CONFIG, 'EDGCConfig(method="quantize", bits=4)')
    defined, made = quantised.split("torch.manual_seed(1)")
    assert "use_cpu=True, " in made
    again = """
torch.distributed.barrier()
if trainer.is_world_process_zero():
    os.rename("out/checkpoint-40", "whole")
torch.distributed.barrier()
sys.argv.append("out/checkpoint-20")
"""
    run = "torch.manual_seed(1)" + made.replace("use_cpu=True, ", "use_cpu=True, fsdp=True, ")
    run = run.replace("trainer.train(", "assert trainer.accelerator.is_fsdp2\ntrainer.train(")
    gradual = 'gradual = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4}\n'
    alone = example("import Accelerator\n").replace(CONFIG, 'EDGCConfig(method="quantize", bits=4)')
    line = "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
    assert line in alone
    plugin = block("fsdp_version=2", PAGE).replace("Accelerator(", "Accelerator(cpu=True, ")
    alone = alone.replace(line, f"accelerate.state.AcceleratorState._reset_state(True)\n{plugin}")
    ends = """
ends = []
for _ in range(2):
    accelerator.load_state("state")
    data.manual_seed(7 + accelerator.process_index)
    train(10)
    ends.append([parameter.detach().to_local().clone() for parameter in model.parameters()])
accelerator.print("alone", all(map(torch.equal, *ends)), handle.last.iteration)
"""
    parts = ("import os\n", defined, ON_CPU, gradual, LOADED, run, again, run, alone, ends)
    program.write_text("".join(parts), encoding="utf-8")
    printed = launched(program)
    assert printed.count("loaded edgc.fsdp.handle 4 True") == 2 and "alone True 210" in printed
    check_ddp_example(printed)
    resumed, whole = tmp_path / "out/checkpoint-40", tmp_path / "whole"
    for name in ("pytorch_model_fsdp.bin", "edgc-0-of-2.pt", "edgc-1-of-2.pt"):
        assert same(*(torch.load(folder / name, weights_only=True) for folder in (resumed, whole))), name
    history = json.loads((whole / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history if entry.get("edgc_bytes", 0) > 0] == [20, 40]


def fetched(folder: Path, packages: tuple[str, ...]) -> Path:
    """A folder with packages that want others than the suite, and are in no environment of it."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *packages]
    done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"{packages[0]} cannot be fetched: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fetched(tmp_path_factory.mktemp("packages") / "lightning", LIGHTNING)


def test_replicas_of_shards(tmp_path: Path, lightning: Path) -> None:
    """Two by two, one launch: Accelerate, the Trainer and Lightning, each by a low rank, resumed where it can be."""
    hybrid = "parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)"
    page = PAGE.read_text(encoding="utf-8")
    plugin, alone = block("fsdp_version=2", PAGE), example("import Accelerator\n")
    line = "accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)\n"
    assert hybrid in page and line in alone
    made = plugin.replace("Accelerator(", f"Accelerator(cpu=True, {hybrid}, ")
    alone = alone.replace(line, made).replace("train(50)", "train(2)")
    defined, trained = example("from transformers import").split("torch.manual_seed(1)")
    trained = trained.replace("use_cpu=True, ", f"use_cpu=True, fsdp=True, {hybrid}, ")
    for key in ("max_steps", "save_steps", "logging_steps"):
        trained = re.sub(rf"{key}=\d+", f"{key}=4", trained)
    module = example("import lightning\n").split("lightning.seed_everything(1)")[0]
    text = f"""
{ON_CPU}
from accelerate.parallelism_config import ParallelismConfig

{alone}
ends = []
for _ in range(2):
    accelerator.load_state("state")
    data.manual_seed(7 + accelerator.process_index)
    train(2)
    ends.append([parameter.detach().to_local().clone() for parameter in model.parameters()])


def check(handle):
    last = handle.last.statistics
    assert handle._layout.replicas.size() == 2 and last.bytes < 0.5 * last.dense_bytes, last


check(handle)
assert all(map(torch.equal, *ends))
accelerate.state.AcceleratorState._reset_state(True)
{defined}
torch.manual_seed(1)
{trained}
check(trainer.callback_handler.callbacks[-1].handle)
accelerate.state.AcceleratorState._reset_state(True)
{module}
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
{block("class Hybrid", PAGE)}
rows, ends = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)), []
for checkpoint in (None, "hybrid/epoch=0-step=2.ckpt"):
    lightning.seed_everything(1)
    callbacks = [CompressionCallback({CONFIG}), ModelCheckpoint("hybrid", save_top_k=-1)]
    how = {{"accelerator": "cpu", "devices": 4, "max_epochs": 2, "accumulate_grad_batches": 2, "logger": False}}
    strategy = ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1)
    trainer = lightning.Trainer(strategy=strategy, callbacks=callbacks, **how)
    trainer.fit(Hybrid(), torch.utils.data.DataLoader(rows, batch_size=16, shuffle=True), ckpt_path=checkpoint)
    ends.append([parameter.detach().to_local().clone() for parameter in trainer.strategy.model.parameters()])
check(callbacks[0].handle)
assert all(map(torch.equal, *ends)) and trainer.global_step == 4
{END}
"""
    program = tmp_path / "train.py"
    program.write_text(text, encoding="utf-8")
    launched(program, path=(lightning,), ranks=4)


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
    sharded = f"""
{example("class Sharded")}
iterations = callbacks[0].handle.last.iteration
ends = [trainer.strategy.model.state_dict()]
strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = lightning.Trainer(strategy=strategy, callbacks=callbacks, logger=False, **where, **how)
trainer.fit(Sharded(), data, ckpt_path="sharded/epoch=0-step=100.ckpt")
ends.append(trainer.strategy.model.state_dict())
equal = all(torch.equal(one.to_local(), other.to_local()) for one, other in zip(*(end.values() for end in ends)))
print("sharded", equal, iterations, callbacks[0].handle.last.iteration)
"""
    more = f"{text.partition(END)[0]}trainer.save_checkpoint('after.ckpt')\n{sharded}{scaled}{END}"
    program.write_text(more, encoding="utf-8")
    printed = launched(program, path=(lightning,))
    assert "scales 4096.0 4096.0 False" in printed and "sharded True 200 200" in printed
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
    assert same(torch.load(tmp_path / "after.ckpt", weights_only=True)["edgc"], whole["edgc"])
    shutil.rmtree(tmp_path / "logs")
    (out / last).unlink()
    launched(program, f"out/{first}", path=(lightning,))
    resumed = torch.load(out / last, weights_only=True)
    assert same(whole["state_dict"], resumed["state_dict"]) and same(whole["edgc"], resumed["edgc"])


def test_torchtitan(tmp_path: Path) -> None:
    """Two replicas, with accumulation; from the checkpoint in the middle it ends as it did."""
    titan = fetched(tmp_path / "torchtitan", TORCHTITAN)
    program, text = tmp_path / "train.py", example("from torchtitan")
    resumed = """
import torch

parts, taken = [trainer.model_parts[0]], []
config = ConfigManager().parse_args()
config.checkpoint.load_step = 3
trainer = config.build()
again, step = register(trainer, EDGCConfig(method="powersgd", rank=8)), trainer.train_step
trainer.train_step = lambda data: taken.append(step(data))
trainer.train()
parts.append(trainer.model_parts[0])
equal = all(torch.equal(*(end.to_local() for end in pair)) for pair in zip(*(part.parameters() for part in parts)))
print("equal", equal, len(taken), handle.last.iteration, again.last.iteration)
sent = handle.last.statistics
assert sent.bytes < 0.25 * sent.dense_bytes, sent
"""
    text = f"import tests.integration.torchtitan_on_cpu\n{text}{resumed}"
    program.write_text(text, encoding="utf-8")
    flags = "--module tests.integration.torchtitan_on_cpu --config small --training.disable-cuda-graphs"
    replicas = "--parallelism.spmd-backend partial_dtensor --parallelism.data-parallel-replicate-degree 2"
    printed = launched(program, *flags.split(), *replicas.split(), path=(titan,))
    assert printed.count("equal True 3 12 12") == 2, printed
