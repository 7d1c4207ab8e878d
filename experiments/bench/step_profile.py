"""Where the time of a training step goes on one device, with and without a hook that compresses its gradients.

A GPT trains under DDP in a world of one rank. What our hook would exchange with a second replica is answered on the
device by :class:`experiments.bench.variants.Mirror`, as a replica with the same gradients would: all work of
compressing and decompressing is done, nothing is sent, and communication takes no time. What a network adds is not
measured here. torch's hook runs as it is, its all-reduces in the world of one.

Every variant has a process of its own, one after another, so that memory is its own; plain DDP comes first and again
last, which shows how far the machine has drifted in between.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from edgc.errors import UserError
from experiments.bench.children import ChildError, ranks
from experiments.bench.engine_table import kernel_rows, kernel_sums, spread
from experiments.bench.gpt import Size
from experiments.bench.kernels import Kernel
from experiments.bench.machine import slug
from experiments.bench.options import FACTORS, at_least

MODULE = "experiments.bench.step_profile_worker"
DDP, AGAIN, TORCH = "ddp", "ddp again", "torch"
# Settings of EDGCConfig; each low-rank one is given the plan's rank.
OURS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "bf16": {"method": "bf16"},
    **{f"powersgd {of}": {"method": "powersgd", "factor_dtype": of} for of in FACTORS},
    "powersgd int8 one-sided": {"method": "powersgd", "factor_dtype": "int8", "one_sided": True},
    # What the mean lacks is measured at one step of ten, as entropy is (edgc.measurement.mean_error); here at each.
    "powersgd fp32 measured": {"method": "powersgd", "entropy": {"iteration_rate": 1.0}},
    "powersgd errors in bf16": {"method": "powersgd", "error_dtype": "bf16"},
    "topk": {"method": "topk", "density": 0.01},
    "quantize": {"method": "quantize", "bits": 8},
    # EDGC in warm-up, in which nothing is compressed, with the entropy of every step: what that takes beside none.
    "entropy of 25 %": {"method": "edgc", "r_max": 32, "entropy": {"iteration_rate": 1.0}},
    "entropy of all": {"method": "edgc", "r_max": 32, "entropy": {"iteration_rate": 1.0, "entry_rate": 1.0}},
}
ENTROPY = tuple(of for of in OURS if of.startswith("entropy"))
# DDP's own buckets, of which the first is smaller; in larger ones more matrices share an operation.
BUCKET_MB = 25
LARGER = (TORCH, "entropy of 25 %", "powersgd fp32", "powersgd fp32 measured", "powersgd int8")
LARGE = {f"{of} 100 MB": (of, 100) for of in LARGER}
VARIANTS = (DDP, TORCH, *OURS, *LARGE, AGAIN)
QUICK = (DDP, TORCH, "none", *ENTROPY, "powersgd fp32", "powersgd int8", "powersgd int4", *LARGE, AGAIN)
GPT2 = Size(layers=12, hidden=768, heads=12, vocabulary=50257, sequence=1024, batch=8)  # 124 million parameters
PARTS = ("step", "host", "forward", "backward", "optimizer", "compress", "communicate", "decompress")
PROFILED = 2
TOP = 40  # kernels of a variant that are kept
SECONDS = 300.0  # for an answer


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    size: Size = GPT2  # of the model and its batch
    rank: int = 32  # of low-rank methods
    steps: int = 20  # that are timed, of each variant
    device: str = "cpu"
    variants: tuple[str, ...] = VARIANTS
    autocast: bool = True  # whether forward runs in bf16 where the device has it
    traces: bool = True  # whether a trace of one step of each variant is written

    def __post_init__(self) -> None:
        at_least(1, rank=self.rank, steps=self.steps, **asdict(self.size))
        if self.size.hidden % self.size.heads:
            what = f"--hidden {self.size.hidden} is not valid"
            raise UserError(what, fix=f"use a multiple of --heads {self.size.heads}")


@dataclass
class Found:
    """Answers of the workers, by variant.

    Attributes:
        facts: memory, bytes, error and loss, or why there is no timing.
        steps: seconds of each part, one entry a step.
        kernels: of one step.
    """

    facts: dict[str, dict[str, Any] | str] = field(default_factory=dict)
    steps: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    kernels: dict[str, list[Kernel]] = field(default_factory=dict)


def bucketed(variant: str) -> tuple[str, int]:
    """What a variant is called with DDP's own buckets, and how many MB its buckets hold."""
    return LARGE.get(variant, (variant, BUCKET_MB))


def settings(variant: str, rank: int) -> dict[str, Any] | None:
    """Settings of our hook; None for the variants that have none."""
    options = OURS.get(bucketed(variant)[0])
    if options is None:
        return None
    return options | ({"rank": rank} if options["method"] == "powersgd" else {})


def measure(plan: Plan, folder: Path, advance: Callable[[str, Found], None]) -> Found:
    """Run every variant; ``advance`` is told of each, with all that was found so far. One that fails is noted, and the
    others go on.

    Args:
        folder: where traces are written, ``step_trace_<variant>.json.gz``.
    """
    found = Found()
    for variant in plan.variants:
        try:
            _one(plan, variant, folder, found)
        except ChildError as error:
            found.facts[variant] = str(error)
            found.steps.pop(variant, None)
            found.kernels.pop(variant, None)
        advance(variant, found)
    return found


def _one(plan: Plan, variant: str, folder: Path, found: Found) -> None:
    start: dict[str, Any] = {
        "size": plan.size,
        "device": plan.device,
        "autocast": plan.autocast,
        "variant": variant,
        "rank": plan.rank,
    }
    with ranks(MODULE, 1, threads=None, **start) as group:
        [found.steps[variant]] = group.ask({"do": "steps", "count": plan.steps}, SECONDS)
        [found.facts[variant]] = group.ask({"do": "facts"}, SECONDS)
        trace = folder / f"step_trace_{slug(variant)}.json.gz" if plan.traces else None
        request = {"do": "kernels", "steps": PROFILED, "trace": trace.resolve() if trace else None}
        [found.kernels[variant]] = group.ask(request, SECONDS)


def tables(plan: Plan, found: Found) -> dict[str, pd.DataFrame]:
    """All tables of what was found, by their files' names."""
    return {
        "step_profile": table(plan, found),
        "step_profile_steps": steps_table(found),
        "step_profile_kernels": kernels_table(found),
    }


def steps_table(found: Found) -> pd.DataFrame:
    """A row per step that was timed, in milliseconds."""
    rows = [
        {"variant": variant, "step": index, **{f"{part}_ms": 1e3 * times[part] for part in PARTS}}
        for variant, steps in found.steps.items()
        for index, times in enumerate(steps)
    ]
    return pd.DataFrame(rows)


def kernels_table(found: Found) -> pd.DataFrame:
    """The longest kernels of one step of each variant, and the rest in a row of its own."""
    rows = []
    for variant, kernels in found.kernels.items():
        top, rest = kernels[:TOP], kernels[TOP:]
        if rest:
            calls, seconds = sum(of.calls for of in rest), sum(of.seconds for of in rest)
            top = [*top, Kernel(f"{len(rest)} others", calls, seconds)]
        rows += [{"variant": variant, **row} for row in kernel_rows(top)]
    return pd.DataFrame(rows)


def table(plan: Plan, found: Found) -> pd.DataFrame:
    """A row per variant that was run.

    Times in ms, medians over the steps with quartiles in ``_q1`` and ``_q3``: ``step_ms`` from one step's start to its
    end on the device, ``host_ms`` until the host was through with it and could have gone on, the three parts of a step
    on the device, and what the hook took in its own stream beside them (ours alone tells). ``kernel_ms`` is the time of
    all kernels of a step, also of those that ran at once. ``over_ddp_*`` is the difference to plain DDP; its own second
    run shows what of that is drift. ``bytes`` are those that a replica of two would send.
    """
    rows = []
    for variant in [of for of in plan.variants if of in found.facts]:
        fact = found.facts[variant]
        method, bucket_mb = bucketed(variant)
        row: dict[str, Any] = {"device": plan.device, "variant": variant, "bucket_mb": bucket_mb}
        options = settings(variant, plan.rank) or {}
        row["rank"] = plan.rank if method == TORCH else options.get("rank")
        if isinstance(fact, str):
            rows.append({**row, "status": fact})
            continue
        mine = pd.DataFrame(found.steps[variant])
        row |= {"status": "ok", "steps": len(mine)}
        for part in PARTS:
            row |= spread(f"{part}_ms", 1e3 * mine[part])
        rows.append({**row, **kernel_sums(found.kernels[variant]), **fact})
    made = pd.DataFrame(rows)
    plain = made[(made["variant"] == DDP) & (made["status"] == "ok")]
    for column in ("step_ms", "host_ms", "kernel_ms", "peak_memory_mib"):
        if len(plain) and column in made:
            made[f"over_ddp_{column}"] = made[column] - plain[column].iloc[0]
    return made
