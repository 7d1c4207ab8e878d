"""Rehearse replicas of a GPT on one device for a given time, each variant as long: rehearsal.csv, rehearsal.json.

No compression, EDGC, one fixed rank and DiLoCo, through :class:`edgc.rehearsal.Rehearsal`, on the text of Python's
standard library (nothing is downloaded). All have the same first weights, batches, learning rates and number of steps,
which follows from steps that are timed first. The uncompressed warm-up is EDGC's: it is trained once, and every variant
goes on from its end. The fixed rank is the one whose bytes are nearest to those that EDGC has sent, so EDGC comes
first. One seed, nothing tuned: it judges no method. Seconds are those of one process that works for all replicas.
"""

from __future__ import annotations

import gc
import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pandas as pd
import torch
from pydantic import Field, model_validator
from torch import Tensor

from edgc.checks import dotted
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.rehearsal import Rehearsal
from edgc.strategies.base import StrategyConfig
from experiments.bench import terminal
from experiments.bench.gpt import GPT, Size, autocast, has_bf16
from experiments.bench.terminal import DEVICE, Device, Positive, Say, spread
from experiments.data.corpus import open_source
from experiments.data.tokenizer import encode_documents, train_bpe
from experiments.spec.settings import DataConfig

STRICT = True
SHOWN = "variant status rank steps tokens validation_loss over_none_nats bytes share replica_memory_mib step_ms"
EDGC, NONE, FIXED, DILOCO = VARIANTS = ("edgc", "none", "fixed rank", "diloco")
WARM_UP = 0.2  # share of the windows
RISE, LOWEST = 0.1, 0.1  # share of the steps in which the learning rate rises, and what is left of it at the end
MOMENTUM = 0.5  # of DiLoCo's outer steps: the best of those that study `strategies` tried
RESERVE = 0.85  # share of the time that is left of which steps are made, should they get slower
SETTLE, TIMED = 2, 4  # steps of each kind before the number of steps is known
HELD_OUT = 64  # sequences, at most
SEED = 1


class Plan(terminal.Plan, Size):
    """Settings of the benchmark; the defaults are the layers of GPT-2 with 124 million parameters.

    Attributes:
        autocast: whether forward runs in bf16 where the device has it.
    """

    layers: Positive = Field(12, description="transformer layers")
    hidden: Positive = Field(768, description="hidden size")
    heads: Positive = Field(12, description="attention heads")
    # As the text is prepared for scales ci and workstation; its few million tokens do not teach GPT-2's 50257.
    vocabulary: Annotated[int, Field(ge=261)] = Field(4096, description="tokens of the tokenizer that is trained")
    sequence: Positive = Field(1024, description="tokens of a sequence")
    batch: Positive = Field(4, description="sequences of a step and replica")
    replicas: Annotated[int, Field(ge=2)] = Field(4, description="of the model, on the one device")
    r_max: Positive = Field(64, description="highest rank of EDGC, whose lowest is a quarter of it")
    windows: Annotated[int, Field(ge=5)] = Field(20, description="of EDGC in a run, as long as DiLoCo's rounds")
    lr: Annotated[float, Field(gt=0)] = Field(6e-4, description="highest learning rate, of AdamW")
    seconds: Annotated[float, Field(gt=0)] = Field(300.0, description="that it may take, without its imports")
    steps: Positive = Field(2000, description="of each variant, at most")
    documents: Annotated[int, Field(ge=0)] = Field(0, description="of the text, at most; 0: all")
    device: Device = DEVICE
    autocast: bool = True

    @model_validator(mode="after")
    def _fits(self) -> Plan:
        EDGCConfig(method="edgc", r_max=self.r_max)  # which refuses some ranks
        return self

    @property
    def warm_up_windows(self) -> int:
        return round(WARM_UP * self.windows)

    def window(self, seconds: dict[str, float], left: float) -> int:
        """Steps of a window, of which all variants together take ``left`` seconds at most.

        Args:
            seconds: of a step without compression, at r_max, and of DiLoCo.

        Raises:
            UserError: not even windows of two steps fit.
        """
        after = self.windows - self.warm_up_windows
        kinds = self.warm_up_windows * seconds[NONE]
        kinds += after * (seconds[NONE] + 2 * seconds[FIXED] + seconds[DILOCO])  # EDGC's steps are as a fixed rank's
        length = min(self.steps // self.windows, int(RESERVE * left / kinds))
        if length < 2:
            problem = f"{left:.0f} seconds and {self.steps} steps are too little for {self.windows} windows"
            fix = "use more --seconds or --steps, fewer --windows, or a smaller model"
            raise UserError(problem, fix=fix)
        return length


def measure(plan: Plan, folder: Path, say: Say) -> Iterator[list[dict[str, Any]]]:
    """Train every variant; yields after each what :meth:`Course.train` says of all so far, of one that fails its
    ``status`` alone. Nothing is written to ``folder``."""
    began = time.perf_counter()
    course = Course(plan, tokens(plan))
    seconds = {
        NONE: course.try_out({"method": "none"}, {}),
        FIXED: course.try_out({"method": "powersgd", "rank": plan.r_max}, {}),
        DILOCO: course.try_out({"method": "none"}, {"name": "diloco", "every": 2}),
    }
    course.begin(plan.window(seconds, plan.seconds - (time.perf_counter() - began)), began + plan.seconds)
    found: list[dict[str, Any]] = []
    for variant in VARIANTS:
        say(f"{variant}, {course.steps} steps")
        try:
            found.append(course.train(variant))
        except Exception as error:  # what one has no memory for leaves the others alone
            status = f"{type(error).__name__}: {' '.join(str(error).split())}"
            found.append({"variant": variant, "status": status})
        yield found


def tables(plan: Plan, found: list[dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """One table, a row per variant; ``over_none_nats`` is its validation loss above that without compression."""
    table = pd.DataFrame(found).assign(device=plan.device)
    plain = table[(table["variant"] == NONE) & (table["status"] == "ok")]
    if len(plain):
        table["over_none_nats"] = table["validation_loss"] - plain["validation_loss"].iloc[0]
    return {"rehearsal": table}


def tokens(plan: Plan) -> dict[str, Tensor]:
    """The standard library as tokens of a tokenizer that is trained on its train split; by split."""
    source = open_source(DataConfig(source="stdlib", max_documents=plan.documents or None))
    documents = list(source.documents())
    learnt = [document.text for document in documents if source.split_of(document) == "train"]
    parts: dict[str, list[np.ndarray]] = {"train": [], "validation": [], "test": []}
    for document, numbers in encode_documents(documents, train_bpe(learnt, plan.vocabulary), np.int64):
        parts[source.split_of(document)].append(numbers)
    found = {split: torch.from_numpy(np.concatenate(parts[split])) for split in ("train", "validation") if parts[split]}
    for split in ("train", "validation"):
        if split not in found or len(found[split]) <= plan.sequence:
            problem = f"the text has no sequence of {plan.sequence} tokens for {split}"
            raise UserError(problem, fix="use more --documents or a shorter --sequence")
    return found


class Course:
    """Text, batches, and the weights and optimizer that all variants begin with.

    Attributes:
        steps, window: of a run.
        start: steps that every variant has behind it when it begins, the bytes that a replica has sent in them, and
            the state after them.
        rank: the mean of EDGC's ranks after warm-up, rounded. Bytes grow by as many with every rank, so no other
            rank's are nearer to those that EDGC has sent.
    """

    def __init__(self, plan: Plan, text: dict[str, Tensor]) -> None:
        self.plan, self.device, self.text = plan, torch.device(plan.device), text
        length = plan.sequence + 1
        count = min(HELD_OUT, len(text["validation"]) // length)
        held_out = text["validation"][: count * length].view(count, length)
        self.held_out = [each.to(self.device) for each in held_out.split(plan.batch)]
        self.bf16 = plan.autocast and has_bf16(self.device)
        torch.manual_seed(SEED)
        model = GPT(plan)
        self.parameters = sum(p.numel() for p in model.parameters())
        self.start = 0, 0.0, _saved(model, self._optimizer(model))
        self.steps = self.window = plan.windows
        self.rank: int | None = None
        self.deadline = math.inf

    @property
    def warm_up(self) -> int:
        """Steps of the warm-up."""
        return self.plan.warm_up_windows * self.window

    def begin(self, window: int, deadline: float) -> None:
        """Set the lengths of a window and so of a run, and when all has to be over."""
        self.window, self.steps, self.deadline = window, window * self.plan.windows, deadline

    def _optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.plan.lr, betas=(0.9, 0.95), weight_decay=0.1)

    def loss(self, model: torch.nn.Module, batch: Tensor) -> Tensor:
        """Loss of a batch, in nats a token."""
        with autocast(self.bf16):
            loss: Tensor = model(batch)
        return loss

    def batches(self, step: int) -> list[Tensor]:
        """Random pieces of the text, a batch for each replica: the same for every variant."""
        plan, text = self.plan, self.text["train"]
        generator = torch.Generator().manual_seed(1_000_003 * SEED + step)
        places = torch.randint(len(text) - plan.sequence, (plan.replicas, plan.batch, 1), generator=generator)
        return list(text[places + torch.arange(plan.sequence + 1)].to(self.device))

    def rate(self, step: int) -> float:
        """Learning rate: a line up, then half a cosine down."""
        rise = max(1, round(RISE * self.steps))
        if step <= rise:
            return self.plan.lr * step / rise
        down = (1 + math.cos(math.pi * (step - rise) / max(1, self.steps - rise))) / 2
        return self.plan.lr * (LOWEST + (1 - LOWEST) * down)

    def rehearsal(self, config: dict[str, Any], strategy: dict[str, Any]) -> Rehearsal:
        """A rehearsal that begins with ``start``."""
        done, _, state = self.start
        with self.device:
            model = GPT(self.plan)
        optimizer = self._optimizer(model)
        weights, moments = torch.load(io.BytesIO(state), map_location=self.device, weights_only=True)
        model.load_state_dict(weights)
        optimizer.load_state_dict(moments)
        return Rehearsal(
            model,
            optimizer=optimizer,
            config=EDGCConfig.from_dict(config),
            strategy=StrategyConfig.from_dict(strategy),
            replicas=self.plan.replicas,
            iterations=self.steps - done,
            loss=self.loss,
            clip=1.0,
        )

    def try_out(self, config: dict[str, Any], strategy: dict[str, Any]) -> float:
        """Seconds of a step of training that is thrown away."""
        rehearsal = self.rehearsal(config, strategy)
        for step in range(SETTLE + TIMED):
            if step == SETTLE:
                self._wait()
                began = time.perf_counter()
            rehearsal.step(self.batches(step))
        self._wait()
        seconds = (time.perf_counter() - began) / TIMED
        del rehearsal
        self._free()
        return seconds

    def settings(self, variant: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Settings of compression and strategy.

        Raises:
            UserError: the fixed rank is not known.
        """
        plan = self.plan
        # So that every window has an entropy, and a measurement of what the mean lacks.
        low_rank = {"window": self.window, "entropy": {"iteration_rate": max(0.1, 1 / self.window)}}
        if variant == EDGC:
            # Warm-up ends when it is over, whether entropy is stable or not: all variants begin there.
            share = dict.fromkeys(("warmup_fraction", "warmup_limit_fraction"), self.warm_up / self.steps)
            return {"method": "edgc", "r_max": plan.r_max, **share, **low_rank}, {}
        if variant == FIXED:
            if self.rank is None:
                raise UserError("EDGC had no rank after its warm-up", fix="see why in its row")
            return {"method": "powersgd", "rank": self.rank, **low_rank}, {}
        rounds = {"every": self.window, "momentum": MOMENTUM, "warmup_steps": self.warm_up - self.start[0]}
        return {"method": "none"}, {"name": "diloco", **rounds} if variant == DILOCO else {}

    def train(self, variant: str) -> dict[str, Any]:
        """Train a variant from ``start`` to the last step, or until the time is over: what there is to say of it.

        Where nobody has trained the warm-up yet, it does so, and leaves its end as ``start``.
        """
        self._free()
        config, strategy = self.settings(variant)
        rehearsal = self.rehearsal(config, strategy)
        first, sent, _ = self.start
        losses, seconds, ranks, warm_up_bytes = [], [], [], 0.0
        step = first
        while step < self.steps and time.perf_counter() < self.deadline:
            step += 1
            for group in rehearsal.optimizers[0].param_groups:
                group["lr"] = self.rate(step)
            batches, began = self.batches(step), time.perf_counter()
            losses.append(rehearsal.step(batches))
            seconds.append(time.perf_counter() - began)
            ranks += [last.rank for engine in rehearsal.engines[:1] if (last := engine.last) and last.rank is not None]
            if step == self.warm_up and first < step:
                warm_up_bytes = rehearsal.bytes
                self.start = step, warm_up_bytes, _saved(rehearsal.models[0], rehearsal.optimizers[0])
                self._wait()
        if variant == EDGC and ranks:
            self.rank = round(sum(ranks) / len(ranks))
        peak, report, rest = self._peak(), rehearsal.report(), step - self.warm_up
        seconds = seconds[self.warm_up - first :] or [math.nan]
        bytes_after = (rehearsal.bytes - warm_up_bytes) / rest if rest > 0 else math.nan
        trained = step * self.plan.replicas * self.plan.batch * self.plan.sequence
        tail = losses[-max(1, self.steps // 10) :]
        return {
            "variant": variant,
            "status": "ok" if step == self.steps else f"out of time after {step} of {self.steps} steps",
            "settings": " ".join(f"{key}={value}" for key, value in dotted({**config, **strategy}).items()),
            "rank": sum(ranks) / len(ranks) if ranks else None,
            "steps": step,
            "warmup_steps": self.warm_up,
            "tokens": trained,
            "epochs": trained / len(self.text["train"]),
            "validation_loss": self.validation(rehearsal),
            "training_loss": sum(tail) / len(tail) if tail else math.nan,
            "bytes": bytes_after,
            "share": bytes_after / rehearsal.dense_bytes,
            "share_of_run": (sent + rehearsal.bytes) / max(1, step) / rehearsal.dense_bytes,
            "mean_error": report.mean_error,
            "gap": report.gap,
            "skipped": report.skipped,
            "replicas": self.plan.replicas,
            "parameters": self.parameters,
            "autocast": "bf16" if self.bf16 else "",
            "replica_memory_mib": sum(each for _, each in report.memory.values()) / 2**20,
            "peak_memory_mib": peak,
            **spread("step_ms", 1e3 * np.array(seconds)),
        }

    @torch.no_grad()
    def validation(self, rehearsal: Rehearsal) -> float:
        """Mean loss of the text that is held out, of the mean of the replicas' weights."""
        model = rehearsal.averaged()
        losses = [self.loss(model, batch).double() * len(batch) for batch in self.held_out]
        return float(sum(losses)) / sum(len(batch) for batch in self.held_out)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _free(self) -> None:
        """Give back what the last rehearsal had."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def _peak(self) -> float | None:
        """MiB of all replicas at their highest; of a CPU nobody knows."""
        return torch.cuda.max_memory_allocated(self.device) / 2**20 if self.device.type == "cuda" else None


def _saved(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return file.getvalue()
