"""Profile a training step on one device, with and without a hook: step_profile.csv, step_profile.json, and
step_trace_*.json.gz for Perfetto.

A GPT trains under DDP in a world of one rank. What our hook would exchange with a second replica is answered on the
device by :class:`experiments.bench.engines.Mirror`, as a replica with the same gradients would: all work of
compressing and decompressing is done, nothing is sent, and communication takes no time. What a network adds is not
measured here. torch's hook runs as it is, its all-reduces in the world of one.

Every variant has a process of its own, one after another, so that memory is its own; plain DDP comes first and again
last, which shows how far the machine has drifted in between.
"""

from __future__ import annotations

import itertools
import math
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
from pydantic import Field, model_validator

from edgc.runtime.channel import Mark, seconds_between
from experiments.bench import terminal
from experiments.bench.collectives import join
from experiments.bench.engine import FACTORS
from experiments.bench.engines import Mirror
from experiments.bench.gpt import Options, Size, Trainer, batch
from experiments.bench.kernels import kernels
from experiments.bench.machine import slug
from experiments.bench.terminal import DEVICE, Device, Positive, Say, one_of, spread
from experiments.bench.workers import WorkerError, ranks

STRICT = True
SHOWN = "variant status step_ms host_ms kernel_ms peak_memory_mib over_ddp_step_ms"
DDP, AGAIN, TORCH = "ddp", "ddp again", "torch"
# Settings of EDGCConfig; each low-rank one is given the plan's rank.
OURS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "bf16": {"method": "bf16"},
    **{f"powersgd {dtype}": {"method": "powersgd", "factor_dtype": dtype} for dtype in FACTORS},
    # What the mean lacks is measured at one step of ten, as entropy is (edgc.measurement.mean_error); here at each.
    "powersgd fp32 measured": {"method": "powersgd", "entropy": {"iteration_rate": 1.0}},
    "powersgd errors in bf16": {"method": "powersgd", "error_dtype": "bf16"},
    "topk": {"method": "topk", "density": 0.01},
    "quantize": {"method": "quantize", "bits": 8},
    # EDGC in warm-up, in which nothing is compressed, with the entropy of every step: what that takes beside none.
    "entropy of 25 %": {"method": "edgc", "r_max": 32, "entropy": {"iteration_rate": 1.0}},
    "entropy of all": {"method": "edgc", "r_max": 32, "entropy": {"iteration_rate": 1.0, "entry_rate": 1.0}},
}
# DDP's own buckets, of which the first is smaller; in larger ones more matrices share an operation.
BUCKET_MB = 25
LARGER = (TORCH, "entropy of 25 %", "powersgd fp32", "powersgd fp32 measured", "powersgd int8")
LARGE = {f"{name} 100 MB": (name, 100) for name in LARGER}
VARIANTS = (DDP, TORCH, *OURS, *LARGE, AGAIN)
QUICK = (DDP, TORCH, "powersgd fp32", "powersgd int8", "powersgd int4", AGAIN)
SECONDS = 300.0  # for an answer
BATCHES = 4
SETTLE = 5  # DDP cuts its buckets anew after the first, torch's hook begins to compress after the second


class Plan(terminal.Plan, Size):
    """Settings of the benchmark; the defaults are GPT-2 with 124 million parameters.

    Attributes:
        autocast: whether forward runs in bf16 where the device has it.
    """

    layers: Positive = Field(12, description="transformer layers")
    hidden: Positive = Field(768, description="hidden size")
    heads: Positive = Field(12, description="attention heads")
    vocabulary: Positive = Field(50257, description="tokens that there are")
    sequence: Positive = Field(1024, description="tokens of a sequence")
    batch: Positive = Field(8, description="sequences of a step")
    rank: Positive = Field(32, description="of low-rank methods")
    steps: Positive = Field(20, description="steps that are timed, of each variant")
    variants: tuple[Annotated[str, one_of(*VARIANTS)], ...] = Field(VARIANTS, description="with commas")
    device: Device = DEVICE
    traces: bool = Field(True, alias="trace", description="also write a trace of one step of each variant")
    quick: bool = Field(False, description="six variants, ten steps: three minutes on a GPU")
    autocast: bool = True

    @model_validator(mode="before")
    @classmethod
    def _quickly(cls, options: dict[str, Any]) -> dict[str, Any]:
        return {"variants": QUICK} | options | {"steps": 10} if options.get("quick") else options

    @property
    def suffix(self) -> str:
        """So that a table of all variants stays beside one of a few."""
        return "-quick" if self.quick else ""


def bucketed(variant: str) -> tuple[str, int]:
    """Name of a variant with DDP's own buckets, and the MB that its buckets hold."""
    return LARGE.get(variant, (variant, BUCKET_MB))


def options(variant: str, rank: int) -> Options:
    """Options of the variant's :class:`experiments.bench.gpt.Trainer`."""
    name, bucket_mb = bucketed(variant)
    found: Options = {"hook": "edgc", **OURS[name]} if name in OURS else {"hook": "torch" if name == TORCH else "dense"}
    if name == TORCH or found.get("method") == "powersgd":
        found["rank"] = rank
    return found | ({"bucket_mb": bucket_mb} if bucket_mb != BUCKET_MB else {})


def measure(plan: Plan, folder: Path, say: Say) -> Iterator[list[dict[str, Any]]]:
    """Run every variant; yields after each what is known of all so far: :meth:`Training.facts`, kernels, and in
    ``times`` a row of seconds for each step that was timed. Of one that fails there is its ``status`` alone.

    Args:
        folder: where traces are written, ``step_trace_<variant>.json.gz``.
    """
    found: list[dict[str, Any]] = []
    for variant in plan.variants:
        say(variant)
        start: dict[str, Any] = {"size": plan, "device": plan.device, "autocast": plan.autocast}
        trace = (folder / f"step_trace_{slug(variant)}.json.gz").resolve() if plan.traces else None
        try:
            with ranks(Training, 1, threads=None, **start, variant=variant, rank=plan.rank) as group:
                [steps] = group.ask("steps", within=SECONDS, count=plan.steps)
                [facts] = group.ask("facts", within=SECONDS)
                [kernels] = group.ask("kernels", within=SECONDS, trace=trace)
            found.append({"variant": variant, "status": "ok", "steps": len(steps), **facts, **kernels, "times": steps})
        except WorkerError as error:
            found.append({"variant": variant, "status": str(error)})
        yield found


def tables(plan: Plan, found: list[dict[str, Any]]) -> dict[str, pd.DataFrame]:
    """One table, a row per variant that was run.

    Times in ms, medians over the steps with quartiles in ``_q1`` and ``_q3``: ``step_ms`` from one step's start to its
    end on the device, ``host_ms`` until the host was through with it and could have gone on, the three parts of a step
    on the device, and what the hook took in its own stream beside them (ours alone tells). ``kernel_ms`` is the time of
    all kernels of a step, also of those that ran at once. ``over_ddp_*`` is the difference to plain DDP; its own second
    run shows what of that is drift. ``bytes`` are those that a replica of two would send.
    """
    rows = []
    for facts in found:
        variant = facts["variant"]
        row = {"device": plan.device, "variant": variant, "bucket_mb": bucketed(variant)[1]}
        row |= {"rank": options(variant, plan.rank).get("rank")} | facts
        for name, seconds in pd.DataFrame(row.pop("times", [])).items():
            row |= spread(f"{name}_ms", 1e3 * seconds)
        rows.append(row)
    table = pd.DataFrame(rows)
    plain = table[(table["variant"] == DDP) & (table["status"] == "ok")]
    for column in ("step_ms", "host_ms", "kernel_ms", "peak_memory_mib"):
        if len(plain) and column in table:
            table[f"over_ddp_{column}"] = table[column] - plain[column].iloc[0]
    return {"step_profile": table}


class Training:
    """The worker: the model of one variant."""

    def start(self, size: Size, device: str, autocast: bool, variant: str, rank: int) -> None:
        """Build it and train a few steps."""
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        join(backend="nccl" if on_gpu else "gloo")
        how = options(variant, rank)
        self.trainer = Trainer(size, how, device, autocast=autocast, optimizer=torch.optim.AdamW)
        if self.trainer.handle is not None:
            self.trainer.handle.engine.open_channel = lambda *_: Mirror()
        generator = torch.Generator().manual_seed(1)
        self.batches = itertools.cycle([batch(size, generator).to(self.device) for _ in range(BATCHES)])
        for _ in range(SETTLE):
            self._step()
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def _step(self) -> list[Mark]:
        return self.trainer.step(next(self.batches))

    def steps(self, count: int) -> list[dict[str, float]]:
        """Seconds of each part of ``count`` steps; the device is idle at the start of each."""
        rows = []
        for _ in range(count):
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            began = time.perf_counter()
            marks = self._step()
            host = time.perf_counter() - began
            parts = [seconds_between(*span) for span in itertools.pairwise(marks)]
            times = dict(zip(("forward", "backward", "optimizer"), parts, strict=True))
            times |= {"step": seconds_between(marks[0], marks[-1]), "host": host}
            last = self._last()
            for name in ("compress", "communicate", "decompress"):
                times[name] = getattr(last, name).seconds if last else math.nan
            rows.append(times)
        return rows

    def _last(self) -> Any:
        """Statistics of our hook's last step, if there is one; its times are those of its own stream."""
        handle = self.trainer.handle
        return handle.last.statistics if handle is not None and handle.last else None

    def facts(self) -> dict[str, Any]:
        """Memory of the steps so far (of the whole process on a CPU), and what the hook reports."""
        if self.device.type == "cuda":
            peak, resting = torch.cuda.max_memory_allocated(self.device), torch.cuda.memory_allocated(self.device)
        else:
            peak, resting = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, None
        last = self._last()
        return {
            "parameters": self.trainer.entries,
            "autocast": "bf16" if self.trainer.autocast else "",
            "peak_memory_mib": peak / 2**20,
            "resting_memory_mib": None if resting is None else resting / 2**20,
            "bytes": last.bytes if last else None,
            "relative_error": last.worker_error if last else None,
            "loss": float(self.trainer.loss),
        }

    def kernels(self, trace: Path | None) -> dict[str, float]:
        """Kernels of one step."""
        return kernels(self._step, self.device, trace=trace)
