"""What :mod:`edgc.doctor` measures, calculates from it, and says."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from edgc.compressors import Channel, Gradient
from edgc.compressors.base import Steps
from edgc.config import EDGCConfig
from edgc.runtime.channel import mark, seconds_between
from edgc.runtime.groups import gather_objects
from edgc.timing import benchmark
from edgc.timing.link import Cost, Link, break_even

GBIT = 1e9 / 8
_SIZES = [4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20]  # bytes of the timed all-reduces
_DENSITY = 0.01  # of top-k
_SLOW = 2.0  # seconds after which a measurement is not repeated


@dataclass(frozen=True)
class Request:
    """What is to be measured, and the network to assume where one is given (bytes per second, seconds)."""

    shapes: tuple[tuple[int, int], ...]
    ranks: tuple[int, ...]
    factor_dtypes: tuple[str, ...]
    repeats: int
    threads: int
    device: str
    bandwidth: float | None
    latency: float | None


# --------------------------------------------------------------------- measuring, on every rank


def measure(request: Request, device: torch.device) -> dict[str, Any]:
    """Measure with all ranks of the default process group; the same report on every rank, see :func:`assess`."""
    torch.set_num_threads(request.threads)
    points = _all_reduces(request, device)
    generator = torch.Generator("cpu").manual_seed(dist.get_rank())
    # Views of one buffer, as a bucket of DDP: a dense reduction then has nothing to pack.
    entries = sum(m * n for m, n in request.shapes)
    flat = torch.randn(entries, generator=generator, dtype=torch.float32, device="cpu").to(device)
    parts = torch.split(flat, [m * n for m, n in request.shapes])
    gradients = [
        Gradient(f"w{i}", part.view(shape)) for i, (part, shape) in enumerate(zip(parts, request.shapes, strict=True))
    ]
    methods: list[tuple[str, EDGCConfig]] = [("dense", EDGCConfig(method="none")), ("bf16", EDGCConfig(method="bf16"))]
    for dtype, rank in itertools.product(request.factor_dtypes, request.ranks):
        name = f"rank {rank}" if dtype == "fp32" else f"rank {rank} {dtype}"
        methods.append((name, EDGCConfig(method="powersgd", rank=rank, factor_dtype=dtype)))
    methods += [(f"quantize {bits}", EDGCConfig(method="quantize", bits=bits)) for bits in (8, 4)]
    methods.append((f"topk {_DENSITY:g}", EDGCConfig(method="topk", density=_DENSITY)))
    rows = [{"method": name, **_time(config, gradients, request)} for name, config in methods]
    machine = {
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }
    return assess(request, machine, points, rows)


def _slowest(seconds: float) -> float:
    """The largest of all ranks' values, so that all ranks decide alike."""
    return max(gather_objects(seconds))


def _all_reduces(request: Request, device: torch.device) -> list[tuple[float, float]]:
    """(bytes that a rank sends, median seconds of the slowest rank) of all-reduces of growing size."""
    world, points = dist.get_world_size(), []
    for size in _SIZES:
        tensor, times = torch.zeros(size // 4, dtype=torch.float32, device=device), []
        for _ in range(request.repeats + 1):
            dist.barrier()
            started = mark(device)
            dist.all_reduce(tensor)
            times.append(seconds_between(started, mark(device)))
        seconds = _slowest(statistics.median(times[1:]))
        points.append((2 * (world - 1) / world * size, seconds))
        if seconds * request.repeats > _SLOW and len(points) > 1:
            break
    return points


def _time(config: EDGCConfig, gradients: Sequence[Gradient], request: Request) -> dict[str, Any]:
    """Medians over repeats of what one method takes, then means over ranks."""
    compressor, made, rounds = config.build_to_time(), [], 0

    def reduction() -> Steps:
        made.append((yield from benchmark.timed(compressor, gradients, Channel(None), config.fixed_rank or 1)))

    for repeat in range(request.repeats + 1):
        rounds = sum(1 for _ in reduction())
        if repeat == 0 and _slowest(benchmark.seconds(made[0])) > _SLOW:
            break
    timed = made[1:] or made  # the first one also pays for memory
    mine = [
        statistics.median(item.compress.seconds for item in timed),
        statistics.median(item.decompress.seconds for item in timed),
        statistics.median(benchmark.seconds(item) for item in timed),
    ]
    columns = zip(*gather_objects(mine), strict=True)
    compress, decompress, total = (statistics.fmean(column) for column in columns)
    return {
        "rank": config.fixed_rank,
        "seconds_compress": compress,
        "seconds_decompress": decompress,
        "seconds_measured": total,
        "bytes": made[-1].bytes,
        "rounds": rounds,
    }


# --------------------------------------------------------------------- calculating


def assess(
    request: Request, machine: dict[str, Any], points: Sequence[tuple[float, float]], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The report: what was measured, and what follows from it at the measured or assumed network.

    Args:
        points: (bytes sent, seconds) of all-reduces.
        rows: per method, dense first, what ``_time`` returns and ``method``.

    Returns:
        ``machine``'s entries; ``network``; ``methods``: the rows with ``seconds_calculated``, ``of_dense`` and
        ``pays_below_gbit`` added (inf: at any bandwidth, 0: at none); ``verdicts``: a sentence per method and a
        conclusion.
    """
    fitted = Link.fit(points)
    link = Link(
        fitted.latency if request.latency is None else request.latency,
        fitted.bandwidth if request.bandwidth is None else request.bandwidth,
    )
    dense = _cost(rows[0])
    base, methods, said = link.seconds(dense), [], []
    for row in rows:
        cost = _cost(row)
        ratio = link.seconds(cost) / base
        below = break_even(dense, cost, link.latency) / GBIT if row is not rows[0] else None
        calculated = {"seconds_calculated": link.seconds(cost), "of_dense": ratio, "pays_below_gbit": below}
        methods.append({**row, **calculated})
        if below is not None:
            said.append(
                f"at {link.bandwidth / GBIT:.3g} Gbit/s {row['method']} would take {ratio:.2f}x of dense; "
                f"{_pays(below)}"
            )
    return {
        **machine,
        "shapes": [list(shape) for shape in request.shapes],
        "factor_dtypes": list(request.factor_dtypes),
        "network": {
            "bandwidth_gbit": link.bandwidth / GBIT,
            "bandwidth_source": "measured" if request.bandwidth is None else "assumed",
            "latency_seconds": link.latency,
            "latency_source": "measured" if request.latency is None else "assumed",
            "measured_bandwidth_gbit": fitted.bandwidth / GBIT,
            "measured_latency_seconds": fitted.latency,
            "fit_residual": fitted.residual,
            "points": [list(point) for point in points],
        },
        "methods": methods,
        "verdicts": [*said, _conclusion(methods, link.bandwidth)],
    }


def _cost(row: dict[str, Any]) -> Cost:
    return Cost(row["seconds_compress"] + row["seconds_decompress"], row["bytes"], row["rounds"])


def _pays(below: float) -> str:
    if below == math.inf:
        return "pays at any bandwidth"
    return f"pays below {below:.3g} Gbit/s" if below > 0 else "pays at no bandwidth"


def _conclusion(methods: Sequence[dict[str, Any]], bandwidth: float) -> str:
    best = min(methods[1:], key=lambda row: float(row["of_dense"]))
    if best["of_dense"] >= 1:
        return f"compression would not pay at {bandwidth / GBIT:.3g} Gbit/s"
    share = f"{best['of_dense']:.2f}x of dense"
    return f"compression would pay at {bandwidth / GBIT:.3g} Gbit/s: fastest is {best['method']}, {share}"


def text(report: dict[str, Any], local: bool) -> str:
    """The report for people; ``local``: all processes were started on this machine."""
    network, entries = report["network"], sum(m * n for m, n in report["shapes"])
    where = "between processes of this machine" if local else "between the processes of this job"
    lines = [
        f"{report['world']} processes ({report['backend']}, {report['device']}, {report['threads']} threads each); "
        f"{len(report['shapes'])} matrices with {entries / 1e6:.3g} M entries",
        f"all-reduce {where}, measured: {network['measured_bandwidth_gbit']:.3g} Gbit/s, "
        f"{network['measured_latency_seconds'] * 1e6:.3g} us a round (fit within {network['fit_residual']:.0%})",
        f"network below: {network['bandwidth_gbit']:.3g} Gbit/s ({network['bandwidth_source']}), "
        f"{network['latency_seconds'] * 1e6:.3g} us a round ({network['latency_source']})",
        "",
        f"{'':14}{'compress':>10}{'decompress':>12}{'sent':>10}{'rounds':>8}{'here':>10}  |"
        f"{'total':>10}{'of dense':>10}{'pays below':>13}",
        f"{'':14}{'ms':>10}{'ms':>12}{'MB':>10}{'':>8}{'ms':>10}  |{'ms':>10}{'':>10}{'Gbit/s':>13}",
    ]
    for row in report["methods"]:
        below = row["pays_below_gbit"]
        lines.append(
            f"{row['method']:14}{row['seconds_compress'] * 1e3:10.2f}{row['seconds_decompress'] * 1e3:12.2f}"
            f"{row['bytes'] / 1e6:10.3f}{row['rounds']:8}{row['seconds_measured'] * 1e3:10.2f}  |"
            f"{row['seconds_calculated'] * 1e3:10.2f}{row['of_dense']:10.2f}"
            f"{'' if below is None else f'{below:.3g}':>13}"
        )
    lines += [
        "",
        "Left of the line: measured (here: the whole reduction over the connection of these processes).",
        "Right of it: calculated, compress + decompress + rounds x latency + sent / bandwidth, without overlap.",
        "",
        *report["verdicts"],
    ]
    if local and network["bandwidth_source"] == "measured":
        lines += [
            "",
            "This is the connection inside one machine, not your network: give --bandwidth, or start one process "
            "per node with torchrun.",
        ]
    return "\n".join(lines)
