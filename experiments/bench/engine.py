"""Time one step of every engine on the same gradients: engine.csv, engine_rounds.csv, engine.json, and with kernels
engine_kernels.csv; of a model all with -MODEL in their names.

Worker processes named after an allocator time engines without a network (communication takes no time); the two ranks
of ``gloo`` time them with a real all-reduce over the loopback interface. Only one process, or one pair of ranks, works
at any time. In a round each engine takes one step, in an order that turns round after round; ratios are taken within a
round, so that a machine that slows down for a while slows both sides.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor

from edgc.compressors.base import Statistics
from edgc.compressors.quantization import Blocks
from edgc.errors import UserError
from edgc.runtime.channel import Stopwatch, mark
from experiments.bench import lower_bound, machine, terminal
from experiments.bench.collectives import join
from experiments.bench.engines import Copy, Engine, Ours, Shape, TorchHook, entries, layer_shapes, make
from experiments.bench.kernels import Timings, kernels, timed
from experiments.bench.terminal import Advance, Positive, device_of, one_of, spread
from experiments.bench.workers import Group, Worker, ranks

SHOWN = "network allocator threads rank engine factor_dtype"
VALUES = "cpu_ms wall_ms kernel_ms relative_error speedup_cpu speedup_wall ratio_to_floor"
FLOOR = ("products", "orthogonalisation")
# THP_MEM_ALLOC_ENABLE is torch's: large blocks in huge pages. The other three tell glibc never to give memory back, so
# that a block that is freed and allocated again causes no page fault.
ALLOCATORS: dict[str, dict[str, str]] = {
    "default": {},
    "thp": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept": {
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        "MALLOC_TOP_PAD_": str(1 << 28),
    },
}
ALONE, GLOO = "none", "gloo"
# GPT-2 small with its embeddings; one of the four pipeline stages of the paper's 2.5B model that has none.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"layers": 12, "hidden": 768, "embeddings": (50257, 1024)},
    "gpt2-2.5b-stage": {"layers": 13, "hidden": 1920},
}
# Of all engines together, for each entry of the gradients: two sets and the buffer of them, what they are compared
# with, error feedback and a workspace of five engines.
BYTES_PER_ENTRY = 72
PROFILED = 3  # steps
GRADIENTS = 2  # sets of gradients that take turns
SETTLE = 4  # steps of an engine before it is timed
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # of gradients
FACTORS = ("fp32", "bf16", "int8", "int4")  # whose engines are measured, a selection of what there is
PARTS = ("cpu", "wall", "compress", "communicate", "decompress", "pack")


class Plan(terminal.Plan):
    """Settings of the benchmark: all ranks are measured with all numbers of threads.

    Attributes:
        embeddings: rows of each, see :func:`experiments.bench.engines.layer_shapes`.
    """

    layers: Positive = Field(3, description="transformer layers whose gradients are reduced; of a model all that fit")
    hidden: Positive = Field(1024, description="hidden size; GPT-2 medium has 1024")
    model: Annotated[str, one_of("", *MODELS)] = Field("", description=f"shapes of {' or '.join(MODELS)} instead")
    ranks: tuple[Positive, ...] = Field((8, 32, 64, 128), description="ranks, with commas")
    threads: tuple[Positive, ...] = Field((1, 2), description="threads, with commas; ignored on a GPU")
    repeats: Positive = Field(7, description="rounds; medians are taken over them")
    device: Annotated[str, one_of("auto", "cpu", "cuda")] = Field("auto", description="auto, cpu or cuda")
    dtypes: tuple[Annotated[str, one_of(*DTYPES)], ...] = Field(
        ("fp32",), description="of the gradients: fp32, bf16; on a GPU both"
    )
    # The first times all engines and the floor.
    allocators: tuple[Annotated[str, one_of(*ALLOCATORS)], ...] = Field(
        tuple(ALLOCATORS), description="ignored on a GPU"
    )
    gloo: bool = Field(True, description="also time two ranks with gloo; ignored on a GPU")
    kernels: bool = Field(False, description="also the time of every kernel (default: on a GPU)")
    quick: bool = Field(False, description="two ranks, fp32 gradients, three rounds: a minute on a GPU")
    embeddings: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _by_device_and_model(cls, options: dict[str, Any]) -> dict[str, Any]:
        device = device_of(options.get("device", "auto"))
        gpu = device == "cuda"
        values = {"kernels": gpu, "dtypes": ("fp32", "bf16") if gpu else ("fp32",)} | options | {"device": device}
        if options.get("quick"):
            values |= {"ranks": (32, 128), "dtypes": ("fp32",), "repeats": 3}
        if gpu:
            values |= {"threads": (1,), "allocators": ("default",), "gloo": False}
        if (model := options.get("model")) in MODELS:
            free = torch.cuda.mem_get_info()[0] if gpu else machine.free_memory()
            values |= MODELS[model] | {"layers": options.get("layers") or layers_that_fit(model, free)}
        return values

    @model_validator(mode="after")
    def _fits(self) -> Plan:
        largest = self.hidden // 4
        if max(self.ranks) > largest:
            problem = f"rank {max(self.ranks)} compresses matrices of {self.hidden} rows too little"
            raise UserError(problem, fix=f"use ranks up to {largest} or a larger --hidden")
        return self

    @property
    def shapes(self) -> list[Shape]:
        """Matrices of the gradients."""
        return layer_shapes(self.layers, self.hidden, self.embeddings)

    @property
    def turns(self) -> int:
        """Rounds of the whole benchmark, those of gloo included."""
        return len(self.dtypes) * len(self.ranks) * self.repeats * (len(self.threads) + self.gloo)

    @property
    def suffix(self) -> str:
        """Name of the model."""
        return f"-{self.model}" if self.model else ""

    def clock(self, threads: int) -> str:
        """Time that engines are held against the floor by: waiting threads count as busy in processor time."""
        return "cpu" if self.device == "cpu" and threads == 1 else "wall"


class Key(NamedTuple):
    """One engine in one setting."""

    gradient_dtype: str
    rank: int
    threads: int
    allocator: str
    network: str  # none or gloo
    variant: str  # copy, torch or the type of our factors

    def columns(self) -> dict[str, Any]:
        """Setting and engine in columns: ``int8`` is our engine with such factors."""
        columns = self._asdict()
        name = columns.pop("variant")
        ours = name not in ("copy", "torch")
        columns |= {"engine": "edgc" if ours else name, "factor_dtype": name if ours else ""}
        return columns | {"products": "" if name == "copy" else "fp32"}


@dataclass
class Measurements(Timings[Key]):
    """Answers of the workers.

    Attributes:
        floor: of a setting (a key whose variant is empty): seconds of each part, one entry a round.
    """

    floor: dict[Key, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))


def layers_that_fit(model: str, free: int) -> int:
    """Layers of a model that all engines together can hold in ``free`` bytes; UserError if not even one fits."""
    sizes = MODELS[model]
    embeddings = entries(layer_shapes(0, sizes["hidden"], sizes.get("embeddings", ())))
    layer = entries(layer_shapes(1, sizes["hidden"]))
    fit = int(0.9 * free / BYTES_PER_ENTRY - embeddings) // layer
    if fit < 1:
        need = (embeddings + layer) * BYTES_PER_ENTRY / 0.9 / 2**30
        raise UserError(f"--model {model} does not fit", fix=f"it needs {need:.1f} GiB of free memory")
    return min(fit, int(sizes["layers"]))


def measure(plan: Plan, folder: Path, advance: Advance) -> Measurements:
    """Run the benchmark; nothing is written to ``folder``.

    Raises:
        experiments.bench.workers.WorkerError: a worker has ended or reported an error that is not one engine's.
    """
    data = Measurements()
    for dtype in plan.dtypes:
        gradients: dict[str, Any] = {"shapes": plan.shapes, "dtype": dtype, "device": plan.device}
        with contextlib.ExitStack() as stack:
            groups = {}
            for name in plan.allocators:
                environment = {"OMP_NUM_THREADS": str(max(plan.threads)), **ALLOCATORS[name]}
                groups[name] = stack.enter_context(Group([Worker(Engines, environment)]))
                groups[name].ask("start", **gradients)
            for rank in plan.ranks:
                for threads in plan.threads:
                    _section(plan, data, groups, Key(dtype, rank, threads, "", ALONE, ""), advance)
        if plan.gloo:
            threads = min(plan.threads)
            with ranks(Engines, 2, threads=threads, **gradients) as group:
                for rank in plan.ranks:
                    key = Key(dtype, rank, threads, "", GLOO, "")
                    _section(plan, data, {plan.allocators[0]: group}, key, advance)
    return data


def _section(plan: Plan, data: Measurements, groups: dict[str, Group], base: Key, advance: Advance) -> None:
    """Rounds at one rank and number of threads."""
    keys: list[tuple[Group, Key]] = []
    alone, first = base.network == ALONE, groups[plan.allocators[0]]
    for allocator, group in groups.items():
        variants = ["copy", "torch", *FACTORS] if group is first else ["torch", "fp32"]
        setting = base._replace(allocator=allocator)
        [facts, *_] = group.ask("prepare", variants=variants, rank=base.rank, threads=base.threads)
        for variant, fact in facts.items():
            key = setting._replace(variant=variant)
            data.facts[key] = fact
            if not isinstance(fact, str):
                keys.append((group, key))
    if alone:
        first.ask("prepare_floor", rank=base.rank)
    for index in range(plan.repeats):
        for group, key in keys if index % 2 == 0 else keys[::-1]:
            answers = group.ask("run", name=key.variant)
            data.rounds[key].append({name: max(answer[name] for answer in answers) for name in answers[0]})
        if alone:
            parts = {name: first.ask("run", name=name)[0][plan.clock(base.threads)] for name in FLOOR}
            data.floor[base].append(parts)
        advance(f"rank {base.rank}, {base.threads} threads" + ("" if alone else ", gloo"))
    if plan.kernels and alone:
        for group, key in keys:
            [data.kernels[key]] = group.ask("kernels", name=key.variant)


def watch_packing() -> Stopwatch:
    """Return a stopwatch to which every call of :class:`Blocks` in this process adds from now on."""
    watch = Stopwatch()

    def watched(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(blocks: Blocks, source: Tensor, target: Tensor, **options: Any) -> None:
            started = mark(source.device)
            method(blocks, source, target, **options)
            watch.add(started, mark(source.device))

        return call

    for name in ("pack", "unpack"):
        setattr(Blocks, name, watched(getattr(Blocks, name)))
    return watch


class Engines:
    """The worker: gradients, engines and the floor of one rank at a time.

    Alone it times engines without a network, as one of two ranks with gloo.
    A variant is named ``copy``, ``torch`` or the ``factor_dtype`` of ours.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.packing = watch_packing()
        self.variants: dict[str, Engine] = {}
        self.floors: dict[str, list[lower_bound.Call]] = {}
        self.turn = 0

    def start(self, shapes: list[Shape], dtype: str, device: str) -> None:
        """Join the other rank, if there is one, and make the gradients."""
        if "WORLD_SIZE" in os.environ:
            join()
            self.group = dist.group.WORLD
        self.device, self.shapes = torch.device(device), shapes
        seed = 0 if self.group is None else dist.get_rank()
        self.gradients = make(shapes, GRADIENTS, seed=seed, dtype=DTYPES[dtype], device=self.device)
        self.buffer = torch.empty_like(self.gradients[0])

    def prepare(self, variants: list[str], rank: int, threads: int) -> dict[str, Any]:
        """Build the engines of a rank and run each for some steps; returns the relative error of the last one and
        its bytes. A variant that fails has its message in place of them.
        """
        torch.set_num_threads(threads)
        self.variants.clear()
        self.floors.clear()
        data: dict[str, Any] = {}
        for name in variants:
            try:
                self.variants[name] = self._build(name, rank)
                data[name] = self._settle(name)
            except Exception as error:
                if self.group is not None:
                    raise  # the peer waits in a collective: nothing can go on
                self.variants.pop(name, None)
                data[name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return data

    def prepare_floor(self, rank: int) -> None:
        """Choose the fastest way to do what the floor counts."""
        for part in (lower_bound.products, lower_bound.orthogonalisation):
            self.floors[part.__name__] = part(self.shapes, rank, self.device)

    def _build(self, name: str, rank: int) -> Engine:
        if name == "copy":
            return Copy(self.shapes, self.group, self.buffer)
        if name == "torch":
            return TorchHook(self.shapes, rank, self.group, self.buffer)
        return Ours(self.shapes, rank, self.group, name)

    def _settle(self, name: str) -> dict[str, Any]:
        """Steps that are not timed: the warm start follows the gradients, and buffers are there."""
        for _ in range(SETTLE - 1):
            self._load_gradient()
            self.variants[name].step(self.buffer)
        self._load_gradient()
        errors = self.variants[name].errors()
        mean = self.buffer.float() if errors is None else self.buffer.float() + errors
        if self.group is not None:
            dist.all_reduce(mean, group=self.group)
            mean /= dist.get_world_size(self.group)
        done = self.variants[name].step(self.buffer)
        return {"relative_error": float((mean - self.buffer.float()).norm() / mean.norm()), "bytes": done.bytes}

    def _load_gradient(self) -> None:
        self.buffer.copy_(self.gradients[self.turn % GRADIENTS])
        self.turn += 1

    def run(self, name: str) -> dict[str, float]:
        """One timed step of a variant, or one round of a part of the floor."""
        if name in self.floors:
            return timed(lambda: [call() for call in self.floors[name]], self.device)
        self._load_gradient()
        if self.group is not None:
            dist.barrier(group=self.group)
        packed = self.packing.seconds
        steps: list[Statistics] = []
        times = timed(lambda: steps.append(self.variants[name].step(self.buffer)), self.device)
        times |= {part: getattr(steps[0], part).seconds for part in ("compress", "communicate", "decompress")}
        return times | {"pack": self.packing.seconds - packed}

    def kernels(self, name: str) -> pd.DataFrame:
        """Kernels of one step of a variant, the longest first."""
        return kernels(
            lambda: self.variants[name].step(self.buffer), self.device, steps=PROFILED, before=self._load_gradient
        )


def tables(plan: Plan, data: Measurements) -> dict[str, pd.DataFrame]:
    """Tables of the measurements: a row per engine and setting, per step that was timed (in milliseconds), and per
    kernel of each engine: how often it ran in one step, and for how long in all.

    Times are of one step: ``cpu_ms`` processor time of all threads, the others wall time, of which ``pack_ms`` is
    inside ``compress_ms`` and ``decompress_ms``. Columns ending in ``_q1`` and ``_q3`` are quartiles over the rounds.
    ``speedup_*`` is the time of torch's hook over this engine's, round by round, in the same process;
    ``speedup_over_<allocator>_*`` that of torch's hook in the process with that allocator. ``ratio_to_floor`` is of
    processor time on one thread, of wall time on several and on a GPU (:mod:`experiments.bench.lower_bound`).
    ``kernel_ms`` is the time of all kernels (on a CPU: operations) of one step and ``kernel_calls`` their number, where
    they were profiled.
    """
    rows = [
        {"device": plan.device, **key.columns(), **data.summary(key, PARTS, "repeats"), **_ratios(plan, data, key)}
        for key in data.facts
    ]
    frames = {"engine": pd.DataFrame(rows), "engine_rounds": data.round_table(Key.columns, PARTS, "round")}
    return frames | ({"engine_kernels": data.kernel_table(Key.columns)} if plan.kernels else {})


def _ratios(plan: Plan, data: Measurements, key: Key) -> dict[str, float]:
    """Torch's time over this, round by round, and this over the floor."""
    if key not in data.rounds:
        return {}
    rounds, row = pd.DataFrame(data.rounds[key]), dict[str, float]()
    for allocator in plan.allocators:
        torch_key = key._replace(allocator=allocator, variant="torch")
        if torch_key in data.rounds:
            prefix = "speedup" if allocator == key.allocator else f"speedup_over_{allocator}"
            for clock in ("cpu", "wall"):
                row |= spread(f"{prefix}_{clock}", pd.DataFrame(data.rounds[torch_key])[clock] / rounds[clock])
    return row | (_floor(plan, data, key, rounds) if key.network == ALONE else {})


def _floor(plan: Plan, data: Measurements, key: Key, rounds: pd.DataFrame) -> dict[str, float]:
    """The floor of each round from the times of that round, and the engine's ratio to it."""
    clock = plan.clock(key.threads)
    need = lower_bound.work(plan.shapes, key.rank, DTYPES[key.gradient_dtype].itemsize)
    copies = pd.DataFrame(data.rounds[key._replace(allocator=plan.allocators[0], variant="copy")])[clock]
    parts = pd.DataFrame(data.floor[key._replace(allocator="", variant="")])
    bandwidth, rate = need.copied / copies, need.operations / parts["products"]
    least = lower_bound.seconds(need, bandwidth, rate, parts["orthogonalisation"])
    return {
        "floor_ms": 1e3 * float(least.median()),
        "floor_bytes": need.bytes,
        "floor_operations": need.operations,
        "floor_orthogonalisation_ms": 1e3 * float(parts["orthogonalisation"].median()),
        "bandwidth_gb_per_s": float(bandwidth.median()) / 1e9,
        "products_gflop_per_s": float(rate.median()) / 1e9,
        **spread("ratio_to_floor", rounds[clock] / least),
    }
