"""Would compression pay on this machine? ``python -m edgc.doctor`` answers by measuring.

Alone it starts two processes here; under ``torchrun``, one process per node or GPU, it joins the others and measures
the real network. Measured: latency and bandwidth of all-reduces, compress and decompress times, bytes sent. Calculated
from these: the time of a reduction at a given bandwidth, and the bandwidth below which each rank pays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from edgc.checks import integer, number, plain
from edgc.compressors import Channel, Gradient
from edgc.compressors.base import Steps
from edgc.compressors.powersgd import FACTOR_BITS
from edgc.config import EDGCConfig
from edgc.errors import Parser, UserError
from edgc.runtime.channel import mark, seconds_between
from edgc.runtime.groups import gather_objects
from edgc.timing import benchmark

GBIT = 1e9 / 8
_SIZES = [4 * 2**10, 64 * 2**10, 2**20, 4 * 2**20, 16 * 2**20]  # bytes of the timed all-reduces
_DENSITY = 0.01  # of top-k
_SLOW = 2.0  # seconds after which a measurement is not repeated

# --------------------------------------------------------------------- command line


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text} is not valid, use rows x columns, e.g. 1024x3072")
    return int(match[1]), int(match[2])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ``bandwidth`` and ``latency`` of the network to assume, in bytes per second and seconds, or None.

    Raises:
        UserError: values that make no sense, naming the option.
    """
    parser = Parser(prog="python -m edgc.doctor", description=__doc__)
    add = parser.add_argument
    add("--shapes", type=_shape, nargs="+", metavar="MxN", help="matrices to reduce, e.g. 1024x3072 1024x1024")
    add("--hidden", type=int, default=1024, help="instead: width of a GPT block (default 1024, GPT-2 medium)")
    add("--rank", type=int, nargs="+", default=[8, 32, 64, 128], help="default 8 32 64 128")
    add("--factor-dtype", nargs="+", choices=FACTOR_BITS, default=["fp32", "int8"], help="of the ranks")
    add("--bandwidth", type=float, metavar="GBIT", help="assume this network, in Gbit/s per rank")
    add("--latency", type=float, metavar="US", help="assume this latency of a round, in microseconds")
    add("--repeats", type=int, default=5)
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", action="store_true", help="print the report as JSON")
    options = parser.parse_args(arguments)
    for key, value in (("hidden", options.hidden), ("repeats", options.repeats), *(("rank", r) for r in options.rank)):
        integer(f"--{key}", value, 1)
    for key, above in (("bandwidth", True), ("latency", False)):
        if getattr(options, key) is not None:
            number(f"--{key}", getattr(options, key), 0, open_low=above)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device = cuda, but torch sees no GPU", fix="use --device cpu")
    h = options.hidden
    options.shapes = options.shapes or [(3 * h, h), (h, h), (4 * h, h), (h, 4 * h)]
    options.bandwidth = None if options.bandwidth is None else options.bandwidth * GBIT
    options.latency = None if options.latency is None else options.latency * 1e-6
    return options


def _measured(options: argparse.Namespace, local_rank: int, **job: Any) -> dict[str, Any] | None:
    """Measure in a process group; the report on rank 0, None elsewhere. ``job``: of processes that are started here."""
    gpus, device = torch.cuda.device_count(), torch.device("cpu")
    # A process may have a GPU to itself; one that is shared by two would be timed at half its speed.
    if options.device == "cuda" or (options.device == "auto" and gpus >= (2 if job else 1)):
        device = torch.device("cuda", local_rank % gpus)
        torch.cuda.set_device(device)
    nccl = device.type == "cuda" and gpus >= job.get("world_size", 1)
    dist.init_process_group("nccl" if nccl else "gloo", **job)
    report = measure(options, device)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return report if first else None


def _local(rank: int, world: int, folder: str, options: argparse.Namespace) -> None:
    """One of the processes that a run without torchrun starts."""
    report = _measured(options, rank, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    if report is not None:
        (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")


def _joined(options: argparse.Namespace) -> dict[str, Any] | None:
    """The report on rank 0 of the job that torchrun started, None elsewhere."""
    missing = [key for key in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        fix = "start with torchrun, or unset RANK for a run on this machine alone"
        raise UserError(f"RANK is set but not {', '.join(missing)}", where="environment", fix=fix)
    for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        if not os.environ.get(key, "0").isdecimal():
            raise UserError(f"{key} = {os.environ[key]!r} is no number", where="environment", fix="start with torchrun")
    if os.environ["WORLD_SIZE"] == "1":
        raise UserError("one process has nobody to send to", where="WORLD_SIZE", fix="start at least two")
    return _measured(options, int(os.environ.get("LOCAL_RANK", "0")))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 after one line on stderr for bad input."""
    try:
        options = parse(arguments)
        local = "RANK" not in os.environ
        if local:
            with tempfile.TemporaryDirectory() as folder:
                processes: Any = mp
                processes.spawn(_local, (2, folder, options), nprocs=2)
                report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        else:
            report = _joined(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report is not None:
        print(as_json(report) if options.json else text(report, local))
    return 0


# --------------------------------------------------------------------- measuring, on every rank


def measure(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measure with all ranks of the default process group; the same report on every rank, see :func:`assess`."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "2"))))
    points = _all_reduces(options.repeats, device)
    generator = torch.Generator("cpu").manual_seed(dist.get_rank())
    # Views of one buffer, as a bucket of DDP: a dense reduction then has nothing to pack.
    sizes = [m * n for m, n in options.shapes]
    flat = torch.randn(sum(sizes), generator=generator, dtype=torch.float32, device="cpu").to(device)
    parts = zip(torch.split(flat, sizes), options.shapes, strict=True)
    gradients = [Gradient(f"w{i}", part.view(shape)) for i, (part, shape) in enumerate(parts)]
    methods = {"dense": EDGCConfig(method="none"), "bf16": EDGCConfig(method="bf16")}
    for dtype, rank in itertools.product(dict.fromkeys(options.factor_dtype), dict.fromkeys(options.rank)):
        name = f"rank {rank}" if dtype == "fp32" else f"rank {rank} {dtype}"
        methods[name] = EDGCConfig(method="powersgd", rank=rank, factor_dtype=dtype)
    methods |= {f"quantize {bits}": EDGCConfig(method="quantize", bits=bits) for bits in (8, 4)}
    methods[f"topk {_DENSITY:g}"] = EDGCConfig(method="topk", density=_DENSITY)
    machine = {
        "world": dist.get_world_size(),
        "backend": dist.get_backend(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "shapes": [list(shape) for shape in options.shapes],
    }
    if dist.get_rank() == 0:
        print(f"measuring {len(methods)} ways to send {sum(sizes) / 1e6:.3g} M entries", file=sys.stderr)
    rows = [{"method": name, **_time(config, gradients, options.repeats)} for name, config in methods.items()]
    return assess(machine, points, rows, options.bandwidth, options.latency)


def _all_reduces(repeats: int, device: torch.device) -> list[tuple[float, float]]:
    """(bytes that a rank sends, median seconds of the slowest rank) of all-reduces of growing size."""
    world, points = dist.get_world_size(), []
    for size in _SIZES:
        tensor, times = torch.zeros(size // 4, dtype=torch.float32, device=device), []
        for _ in range(repeats + 1):
            dist.barrier()
            started = mark(device)
            dist.all_reduce(tensor)
            times.append(seconds_between(started, mark(device)))
        seconds = max(gather_objects(statistics.median(times[1:])))  # so that all ranks decide alike
        points.append((2 * (world - 1) / world * size, seconds))
        if seconds * repeats > _SLOW and len(points) > 1:
            break
    return points


def _time(config: EDGCConfig, gradients: Sequence[Gradient], repeats: int) -> dict[str, Any]:
    """Medians over repeats of what one method takes, then means over ranks."""
    compressor, results, rounds = config.build_to_time(), [], 0

    def reduction() -> Steps:
        results.append((yield from benchmark.timed(compressor, gradients, Channel(None), config.fixed_rank or 1)))

    for repeat in range(repeats + 1):
        rounds = sum(1 for _ in reduction())
        if repeat == 0 and max(gather_objects(benchmark.seconds(results[0]))) > _SLOW:
            break
    timed = results[1:] or results  # the first one also pays for memory
    seconds = (
        statistics.median(item.compress.seconds for item in timed),
        statistics.median(item.decompress.seconds for item in timed),
        statistics.median(benchmark.seconds(item) for item in timed),
    )
    means = map(statistics.fmean, zip(*gather_objects(seconds), strict=True))
    named = dict(zip(("seconds_compress", "seconds_decompress", "seconds_measured"), means, strict=True))
    return {"rank": config.fixed_rank, **named, "bytes": results[-1].bytes, "rounds": rounds}


# --------------------------------------------------------------------- calculating: the network as two numbers


@dataclass(frozen=True)
class Cost:
    """Cost of one reduction on one rank: seconds of its own computing, bytes sent, dependent rounds."""

    seconds: float
    bytes: float
    rounds: int


@dataclass(frozen=True)
class Link:
    """Latency of a round in seconds and bandwidth in bytes per second, of one rank's sending: bytes are counted as in
    :class:`edgc.runtime.channel.Channel`, by the ring or direct formula."""

    latency: float
    bandwidth: float

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> Self:
        """Link on which the smallest and the largest of (bytes sent, seconds) take as long as they did.

        A time that does not grow with the size gives an infinite bandwidth.
        """
        (small, quick), (large, slow) = min(points), max(points)
        slope = max(0.0, (slow - quick) / (large - small))
        return cls(max(0.0, quick - slope * small), 1 / slope if slope > 0 else math.inf)

    def seconds(self, cost: Cost) -> float:
        """Time of a reduction over this link, on which each of its rounds waits for the one before."""
        return cost.seconds + cost.rounds * self.latency + cost.bytes / self.bandwidth


def break_even(dense: Cost, compressed: Cost, latency: float) -> float:
    """Bandwidth in bytes per second below which ``compressed`` is the faster one; ``inf`` if always, 0 if never.

    What saves no bytes never is: that it took less time is chance.
    """
    saved = dense.bytes - compressed.bytes
    if saved <= 0:
        return 0.0
    lost = compressed.seconds - dense.seconds + (compressed.rounds - dense.rounds) * latency
    return saved / lost if lost > 0 else math.inf


def assess(
    machine: dict[str, Any],
    points: Sequence[tuple[float, float]],
    rows: Sequence[dict[str, Any]],
    bandwidth: float | None = None,
    latency: float | None = None,
) -> dict[str, Any]:
    """The report: what was measured, and what follows from it at the measured or assumed network.

    Args:
        points: (bytes sent, seconds) of all-reduces.
        rows: per method, dense first: its name, rank, seconds, bytes and rounds.
        bandwidth, latency: to assume, in bytes per second and seconds; None takes the measured one.

    Returns:
        ``machine``'s entries; ``network``; ``methods``: the rows with ``seconds_calculated``, ``of_dense`` and
        ``pays_below_gbit`` added (inf: at any bandwidth, 0: at none); ``verdicts``: a sentence per method and a
        conclusion.
    """
    fitted = Link.through(points)
    link = Link(fitted.latency if latency is None else latency, fitted.bandwidth if bandwidth is None else bandwidth)
    costs = [Cost(row["seconds_compress"] + row["seconds_decompress"], row["bytes"], row["rounds"]) for row in rows]
    at, dense, methods, verdicts = f"at {link.bandwidth / GBIT:.3g} Gbit/s", link.seconds(costs[0]), [], []
    for index, (row, cost) in enumerate(zip(rows, costs, strict=True)):
        seconds, ratio = link.seconds(cost), link.seconds(cost) / dense
        limit = break_even(costs[0], cost, link.latency) / GBIT if index else None
        methods.append({**row, "seconds_calculated": seconds, "of_dense": ratio, "pays_below_gbit": limit})
        if limit is not None:
            pays = f"pays below {limit:.3g} Gbit/s" if limit > 0 else "pays at no bandwidth"
            pays = "pays at any bandwidth" if limit == math.inf else pays
            verdicts.append(f"{at} {row['method']} would take {ratio:.2f}x of dense; {pays}")
    saving = [row for row in methods[1:] if row["bytes"] < rows[0]["bytes"]]
    best = min(saving, key=lambda row: float(row["of_dense"]), default=None)
    if best is None or best["of_dense"] >= 1:
        verdicts.append(f"compression would not pay {at}")
    else:
        verdicts.append(f"compression would pay {at}: fastest is {best['method']}, {best['of_dense']:.2f}x of dense")
    network = {
        "bandwidth_gbit": link.bandwidth / GBIT,
        "bandwidth_source": "measured" if bandwidth is None else "assumed",
        "latency_seconds": link.latency,
        "latency_source": "measured" if latency is None else "assumed",
        "measured_bandwidth_gbit": fitted.bandwidth / GBIT,
        "measured_latency_seconds": fitted.latency,
        "points": [list(point) for point in points],
    }
    return {**machine, "network": network, "methods": methods, "verdicts": verdicts}


def as_json(report: dict[str, Any]) -> str:
    """The report for programs: a ``pays_below_gbit`` of "inf" is not dense's null, other infinite numbers are null."""
    limitless = {"pays_below_gbit": "inf"}
    rows = [{**row, **(limitless if row["pays_below_gbit"] == math.inf else {})} for row in report["methods"]]
    return json.dumps(plain({**report, "methods": rows}), indent=2)


def text(report: dict[str, Any], local: bool) -> str:
    """The report for people; ``local``: all processes were started on this machine."""
    network, entries = report["network"], sum(m * n for m, n in report["shapes"])
    where = "between processes of this machine" if local else "between the processes of this job"
    lines = [
        f"{report['world']} processes ({report['backend']}, {report['device']}, {report['threads']} threads each); "
        f"{len(report['shapes'])} matrices with {entries / 1e6:.3g} M entries",
        f"all-reduce {where}, measured: {network['measured_bandwidth_gbit']:.3g} Gbit/s, "
        f"{network['measured_latency_seconds'] * 1e6:,.0f} us a round",
        f"network below: {network['bandwidth_gbit']:.3g} Gbit/s ({network['bandwidth_source']}), "
        f"{network['latency_seconds'] * 1e6:,.0f} us a round ({network['latency_source']})",
        "",
        f"{'':14}{'compress':>10}{'decompress':>12}{'sent':>10}{'rounds':>8}{'here':>10}  |"
        f"{'total':>10}{'of dense':>10}{'pays below':>13}",
        f"{'':14}{'ms':>10}{'ms':>12}{'MB':>10}{'':>8}{'ms':>10}  |{'ms':>10}{'':>10}{'Gbit/s':>13}",
    ]
    for row in report["methods"]:
        limit = row["pays_below_gbit"]
        below = "" if limit is None else {0: "never", math.inf: "always"}.get(limit, f"{limit:.3g}")
        lines.append(
            f"{row['method']:14}{row['seconds_compress'] * 1e3:10.2f}{row['seconds_decompress'] * 1e3:12.2f}"
            f"{row['bytes'] / 1e6:10.3f}{row['rounds']:8}{row['seconds_measured'] * 1e3:10.2f}  |"
            f"{row['seconds_calculated'] * 1e3:10.2f}{row['of_dense']:10.2f}"
            f"{below:>13}"
        )
    lines += [
        "",
        "Left of the line: measured (here: the whole reduction over the connection of these processes).",
        "Right of it: calculated, compress + decompress + rounds x latency + sent / bandwidth, without overlap.",
        "",
        report["verdicts"][-1],
    ]
    if local and network["bandwidth_source"] == "measured":
        advice = "give --bandwidth, or start one process per node with torchrun."
        lines += ["", f"This is the connection inside one machine, not your network: {advice}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
