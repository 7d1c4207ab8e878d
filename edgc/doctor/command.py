"""Would compression pay on this machine? ``python -m edgc.doctor`` answers by measuring.

Alone it starts two processes here; under ``torchrun``, one process per node or GPU, it joins the others and measures
the real network. Measured: latency and bandwidth of all-reduces, compress and decompress times, bytes sent. Calculated
from these: the time of a reduction at a given bandwidth, and the bandwidth below which each rank pays.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from edgc.checks import plain
from edgc.compressors.powersgd import FACTOR_BITS
from edgc.doctor.diagnosis import GBIT, Request, measure, text
from edgc.errors import UserError


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix="see --help")


def parse(arguments: Sequence[str] | None) -> tuple[Request, bool]:
    """The request, and whether JSON is wanted.

    Raises:
        UserError: values that make no sense, naming the option.
    """
    parser = _Parser(prog="python -m edgc.doctor", description=__doc__)
    parser.add_argument("--shapes", nargs="+", metavar="MxN", help="matrices to reduce, e.g. 1024x3072 1024x1024")
    parser.add_argument("--hidden", type=int, help="instead: width of GPT blocks (default 1024, GPT-2 medium)")
    parser.add_argument("--layers", type=int, help="and their number (default 1)")
    parser.add_argument("--rank", type=int, nargs="+", default=[8, 32, 64, 128], help="default 8 32 64 128")
    parser.add_argument("--factor-dtype", nargs="+", choices=FACTOR_BITS, default=["fp32", "int8"], help="of the ranks")
    parser.add_argument("--bandwidth", type=float, metavar="GBIT", help="assume this network, in Gbit/s per rank")
    parser.add_argument("--latency", type=float, metavar="US", help="assume this latency of a round, in microseconds")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="per process (default: the cores shared out)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(arguments)
    for key in ("hidden", "layers", "repeats", "threads"):
        value = getattr(given, key)
        if value is not None and value < 1:
            raise UserError(f"--{key} = {value} is not valid", fix="use a whole number of at least 1")
    for rank in given.rank:
        if rank < 1:
            raise UserError(f"--rank = {rank} is not valid", fix="use whole numbers of at least 1")
    for key, low in (("bandwidth", "above 0"), ("latency", "of at least 0")):
        value = getattr(given, key)
        if value is not None and not (math.isfinite(value) and value >= 0 and (value > 0 or key == "latency")):
            raise UserError(f"--{key} = {value} is not valid", fix=f"use a number {low}")
    if given.shapes and (given.hidden or given.layers):
        raise UserError("--shapes and --hidden or --layers exclude each other", fix="give one of them")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device = cuda, but torch sees no GPU", fix="use --device cpu")
    h = given.hidden or 1024
    block = ((3 * h, h), (h, h), (4 * h, h), (h, 4 * h)) * (given.layers or 1)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "2"))
    request = Request(
        shapes=tuple(map(_shape, given.shapes)) if given.shapes else block,
        ranks=tuple(dict.fromkeys(given.rank)),
        factor_dtypes=tuple(dict.fromkeys(given.factor_dtype)),
        repeats=given.repeats,
        threads=given.threads or max(1, (os.cpu_count() or 1) // local),
        device=given.device,
        bandwidth=None if given.bandwidth is None else given.bandwidth * GBIT,
        latency=None if given.latency is None else given.latency * 1e-6,
    )
    return request, given.json


def _shape(value: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", value)
    if found is None:
        raise UserError(f"--shapes = {value} is not valid", fix="write rows x columns, e.g. 1024x3072")
    return int(found[1]), int(found[2])


def _device(request: Request, local_rank: int, joined: bool) -> torch.device:
    """The GPU of this process, if it may have one to itself; a GPU shared by two would be timed at half its speed."""
    gpus = torch.cuda.device_count()
    if request.device == "cpu" or gpus == 0 or (request.device == "auto" and not joined and gpus < 2):
        return torch.device("cpu")
    torch.cuda.set_device(local_rank % gpus)
    return torch.device("cuda", local_rank % gpus)


def _local(rank: int, world: int, folder: str, request: Request) -> None:
    """One of the processes that a run without torchrun starts."""
    device = _device(request, rank, joined=False)
    backend = "nccl" if device.type == "cuda" and torch.cuda.device_count() >= world else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=world)
    report = measure(request, device)
    if rank == 0:
        (Path(folder) / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _joined(request: Request) -> dict[str, Any] | None:
    """The report on rank 0 of the job that torchrun started, None elsewhere."""
    missing = [key for key in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if key not in os.environ]
    if missing:
        fix = "start with torchrun, or unset RANK for a run on this machine alone"
        raise UserError(f"RANK is set but not {', '.join(missing)}", where="environment", fix=fix)
    if os.environ["WORLD_SIZE"] == "1":
        raise UserError("one process has nobody to send to", where="WORLD_SIZE", fix="start at least two")
    device = _device(request, int(os.environ.get("LOCAL_RANK", "0")), joined=True)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    report = measure(request, device)
    first = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return report if first else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 0, or 2 after one line on stderr for bad input."""
    try:
        request, as_json = parse(arguments)
        local = "RANK" not in os.environ
        if local:
            with tempfile.TemporaryDirectory() as folder:
                processes: Any = mp
                processes.spawn(_local, (2, folder, request), nprocs=2)
                report = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        else:
            report = _joined(request)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if report is not None:
        print(json.dumps(plain(report), indent=2) if as_json else text(report, local))
    return 0
