"""From the rounds of the engine benchmark to its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.bench import floor
from experiments.bench.engine import ALONE, Key, Measured, Plan
from experiments.bench.kernels import Kernel

PARTS = ("cpu", "wall", "compress", "communicate", "decompress", "pack")
BYTES = {"fp32": 4, "bf16": 2}


def spread(name: str, values: Any) -> dict[str, float]:
    """Median and quartiles as three columns."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), [0.25, 0.5, 0.75])
    return {name: float(middle), f"{name}_q1": float(low), f"{name}_q3": float(high)}


def engine_and_options(variant: str) -> dict[str, str]:
    """``fp32+bf16`` -> our engine with fp32 factors and bf16 products."""
    name, _, matmul = variant.partition("+")
    ours = name not in ("copy", "torch")
    return {
        "engine": "edgc" if ours else name,
        "factor_dtype": name if ours else "",
        "products": "" if name == "copy" else (matmul or "fp32"),
    }


def rounds_table(found: Measured) -> pd.DataFrame:
    """A row per step that was timed, in milliseconds."""
    rows = [
        {**_setting(key), "round": index, **{f"{part}_ms": 1e3 * times[part] for part in PARTS}}
        for key, rounds in found.rounds.items()
        for index, times in enumerate(rounds)
    ]
    return pd.DataFrame(rows)


def kernels_table(found: Measured) -> pd.DataFrame:
    """A row per kernel of each engine: how often it ran in one step, and for how long in all."""
    rows = (_setting(key) | row for key, kernels in found.kernels.items() for row in kernel_rows(kernels))
    return pd.DataFrame(rows)


def kernel_rows(kernels: Iterable[Kernel]) -> Iterator[dict[str, Any]]:
    """Name, calls and milliseconds of each kernel."""
    for of in kernels:
        yield {"kernel": of.name, "calls": of.calls, "ms": 1e3 * of.seconds}


def kernel_sums(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Columns of all kernels together."""
    return {"kernel_ms": 1e3 * sum(of.seconds for of in kernels), "kernel_calls": sum(of.calls for of in kernels)}


def table(plan: Plan, found: Measured) -> pd.DataFrame:
    """A row per engine and setting.

    Times are of one step: ``cpu_ms`` processor time of all threads, the others wall time, of which ``pack_ms`` is
    inside ``compress_ms`` and ``decompress_ms``. Columns ending in ``_q1`` and ``_q3`` are quartiles over the rounds.
    ``speedup_*`` is the time of torch's hook over this engine's, round by round, in the same process;
    ``speedup_over_<allocator>_*`` that of torch's hook in the process with that allocator. ``ratio_to_floor`` is of
    processor time on one thread, of wall time on several and on a GPU; :mod:`experiments.bench.floor` explains it.
    ``kernel_ms`` is the time of all kernels (on a CPU: operations) of one step and ``kernel_calls`` their number, where
    they were profiled.
    """
    rows = []
    for key, fact in found.facts.items():
        row: dict[str, Any] = {"device": plan.device, **_setting(key)}
        if isinstance(fact, str):
            rows.append({**row, "status": fact})
            continue
        mine = pd.DataFrame(found.rounds[key])
        row |= {"status": "ok", "repeats": len(mine), **fact}
        for part in PARTS:
            row |= spread(f"{part}_ms", 1e3 * mine[part])
        row |= _ratios(plan, found, key, mine)
        if key.network == ALONE:
            row |= _floor(plan, found, key, mine)
        if key in found.kernels:
            row |= kernel_sums(found.kernels[key])
        rows.append(row)
    return pd.DataFrame(rows)


def _setting(key: Key) -> dict[str, Any]:
    setting = asdict(key)
    variant = setting.pop("variant")
    return {**setting, **engine_and_options(variant)}


def _ratios(plan: Plan, found: Measured, key: Key, mine: pd.DataFrame) -> dict[str, float]:
    """How much longer torch's hook takes."""
    row: dict[str, float] = {}
    for allocator in plan.allocators:
        rounds = found.rounds.get(replace(key, allocator=allocator, variant="torch"))
        if rounds is None:
            continue
        torch = pd.DataFrame(rounds)
        prefix = "speedup" if allocator == key.allocator else f"speedup_over_{allocator}"
        for clock in ("cpu", "wall"):
            row |= spread(f"{prefix}_{clock}", torch[clock] / mine[clock])
    return row


def _floor(plan: Plan, found: Measured, key: Key, mine: pd.DataFrame) -> dict[str, float]:
    """The floor of each round from what was measured in that round, and the engine's ratio to it."""
    clock = plan.clock(key.threads)
    need = floor.work(plan.shapes, key.rank, BYTES[key.gradient_dtype])
    copies = pd.DataFrame(found.rounds[replace(key, allocator=plan.allocators[0], variant="copy")])[clock]
    parts = pd.DataFrame(found.floor[replace(key, allocator="", variant="")])
    bandwidth, rate = need.copied / copies, need.operations / parts["products"]
    least = pd.Series(
        [floor.seconds(need, *measured) for measured in zip(bandwidth, rate, parts["orthogonalisation"], strict=True)]
    )
    return {
        "floor_ms": 1e3 * float(least.median()),
        "floor_bytes": need.bytes,
        "floor_operations": need.operations,
        "floor_orthogonalisation_ms": 1e3 * float(parts["orthogonalisation"].median()),
        "bandwidth_gb_per_s": float(bandwidth.median()) / 1e9,
        "products_gflop_per_s": float(rate.median()) / 1e9,
        **spread("ratio_to_floor", mine[clock] / least),
    }
