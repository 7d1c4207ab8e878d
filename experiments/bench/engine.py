"""Time one step of every engine on the same gradients: engine.csv, engine.json, of a model with -MODEL in their names.

Worker processes named after an allocator time engines without a network (communication takes no time); the two ranks
of ``gloo`` time them with a real all-reduce over the loopback interface. Only one process, or one pair of ranks, works
at any time. In a round each engine takes one step, in an order that turns round after round; ratios are taken within a
round, so that a machine that slows down for a while slows both sides.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import Field, model_validator
from torch import Tensor

from edgc.compressors.base import Statistics
from edgc.compressors.quantization import Blocks
from edgc.errors import UserError
from edgc.runtime.channel import Stopwatch, mark
from experiments.bench import machine, terminal
from experiments.bench.collectives import join
from experiments.bench.engines import Copy, Engine, Ours, Shape, TorchHook, entries, layer_shapes, make
from experiments.bench.kernels import kernels, timed
from experiments.bench.terminal import DEVICE, Device, Positive, Say, device_of, one_of, spread
from experiments.bench.workers import Group, Worker, ranks

SHOWN = "network allocator threads rank engine factor_dtype cpu_ms wall_ms speedup_wall"
SETTING = ["device", "gradient_dtype", "rank", "threads", "allocator", "network"]
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
# GPT-2 small with its embeddings; one of the four pipeline stages of the paper's 2.5B model that has none.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"layers": 12, "hidden": 768, "embeddings": (50257, 1024)},
    "gpt2-2.5b-stage": {"layers": 13, "hidden": 1920},
}
# Of all engines together, for each entry of the gradients: two sets and the buffer of them, what they are compared
# with, error feedback and a workspace of five engines.
BYTES_PER_ENTRY = 72
GRADIENTS = 2  # sets of gradients that take turns
SETTLE = 4  # steps of an engine before it is timed
FACTORS = ("fp32", "bf16", "int8", "int4")  # whose engines are measured, a selection of what there is
FACTS = ["relative_error", "bytes", "kernel_ms", "kernel_calls"]
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
    device: Device = DEVICE
    # The first times all engines.
    allocators: tuple[Annotated[str, one_of(*ALLOCATORS)], ...] = Field(
        tuple(ALLOCATORS), description="ignored on a GPU"
    )
    quick: bool = Field(False, description="two ranks, three rounds: a minute on a GPU")
    embeddings: tuple[int, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _by_device_and_model(cls, options: dict[str, Any]) -> dict[str, Any]:
        values = options | {"device": device_of(options.get("device", "auto"))}
        if options.get("quick"):
            values |= {"ranks": (32, 128), "repeats": 3}
        if gpu := values["device"] == "cuda":
            values |= {"threads": (1,), "allocators": ("default",)}
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
    def suffix(self) -> str:
        """Name of the model."""
        return f"-{self.model}" if self.model else ""


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


def measure(plan: Plan, folder: Path, say: Say) -> Iterator[pd.DataFrame]:
    """Run the benchmark; nothing is written to ``folder``.

    Yields:
        All so far, whenever a rank has been measured: a row per setting, engine (``variant``) and round: what
        :meth:`Engines.prepare` and :meth:`Engines.run` say, of several ranks the slowest one's times. An engine that
        fails has one row, with its message as ``status``.

    Raises:
        experiments.bench.workers.WorkerError: a worker has ended or reported an error that is not one engine's.
    """
    rows: list[dict[str, Any]] = []
    gradients: dict[str, Any] = {"shapes": plan.shapes, "device": plan.device}
    base = {"device": plan.device, "gradient_dtype": "fp32"}
    with contextlib.ExitStack() as stack:
        alone = {}
        for name in plan.allocators:
            environment = {"OMP_NUM_THREADS": str(max(plan.threads)), **ALLOCATORS[name]}
            alone[name] = stack.enter_context(Group([Worker(Engines, environment)]))
            alone[name].ask("start", **gradients)
        for rank in plan.ranks:
            for threads in plan.threads:
                say(f"rank {rank}, {threads} threads")
                rows += _section(plan, alone, base | {"rank": rank, "threads": threads}, "none")
            yield pd.DataFrame(rows)
    if plan.device == "cpu":
        threads = min(plan.threads)
        with ranks(Engines, 2, threads=threads, **gradients) as group:
            for rank in plan.ranks:
                say(f"rank {rank}, {threads} threads, gloo")
                rows += _section(plan, {plan.allocators[0]: group}, base | {"rank": rank, "threads": threads}, "gloo")
                yield pd.DataFrame(rows)


def _section(plan: Plan, groups: dict[str, Group], base: dict[str, Any], network: str) -> list[dict[str, Any]]:
    """Rounds at one rank and number of threads."""
    rows: list[dict[str, Any]] = []
    turns: list[tuple[Group, str, dict[str, Any]]] = []
    for allocator, group in groups.items():
        variants = ["copy", "torch", *FACTORS] if allocator == plan.allocators[0] else ["torch", "fp32"]
        [facts, *_] = group.ask("prepare", variants=variants, rank=base["rank"], threads=base["threads"])
        for variant, fact in facts.items():
            about = base | {"allocator": allocator, "network": network, "variant": variant}
            if isinstance(fact, str):
                rows.append(about | {"status": fact, "round": 0})
            else:
                turns.append((group, variant, about | {"status": "ok"} | fact))
    rounds = []
    for index in range(plan.repeats):
        for group, variant, about in turns if index % 2 == 0 else turns[::-1]:
            answers = pd.DataFrame(group.ask("run", name=variant))
            rounds.append((about, {"round": index} | answers.max().to_dict()))
    if plan.device == "cuda":
        for group, variant, about in turns:
            about |= group.ask("kernels", name=variant)[0]
    return rows + [about | times for about, times in rounds]


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
    """The worker: gradients, and the engines of one rank at a time.

    Alone it times engines without a network, as one of two ranks with gloo.
    A variant is named ``copy``, ``torch`` or the ``factor_dtype`` of ours.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.packing = watch_packing()
        self.variants: dict[str, Engine] = {}
        self.turn = 0

    def start(self, shapes: list[Shape], device: str) -> None:
        """Join the other rank, if there is one, and make the gradients."""
        if "WORLD_SIZE" in os.environ:
            join()
            self.group = dist.group.WORLD
        self.device, self.shapes = torch.device(device), shapes
        seed = 0 if self.group is None else dist.get_rank()
        self.gradients = make(shapes, GRADIENTS, seed=seed, dtype=torch.float32, device=self.device)
        self.buffer = torch.empty_like(self.gradients[0])

    def prepare(self, variants: list[str], rank: int, threads: int) -> dict[str, Any]:
        """Build the engines of a rank and run each for some steps; returns the relative error of the last one and
        its bytes. A variant that fails has its message in place of them.
        """
        torch.set_num_threads(threads)
        self.variants.clear()
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

    def _build(self, name: str, rank: int) -> Engine:
        if name == "copy":
            return Copy(self.shapes, self.group, self.buffer)
        if name == "torch":
            return TorchHook(self.shapes, rank, self.group, self.buffer)
        return Ours(self.shapes, rank, self.group, name)

    def _settle(self, name: str) -> dict[str, Any]:
        """Steps that are not timed: the warm start follows the gradients, and buffers are there."""
        engine = self.variants[name]
        for _ in range(SETTLE - 1):
            self._load_gradient()
            engine.step(self.buffer)
        self._load_gradient()
        errors = engine.errors()
        mean = self.buffer.float() if errors is None else self.buffer.float() + errors
        if self.group is not None:
            dist.all_reduce(mean, group=self.group)
            mean /= dist.get_world_size(self.group)
        done = engine.step(self.buffer)
        return {"relative_error": float((mean - self.buffer.float()).norm() / mean.norm()), "bytes": done.bytes}

    def _load_gradient(self) -> None:
        self.buffer.copy_(self.gradients[self.turn % GRADIENTS])
        self.turn += 1

    def run(self, name: str) -> dict[str, float]:
        """One timed step of a variant: seconds of its :data:`PARTS`."""
        self._load_gradient()
        if self.group is not None:
            dist.barrier(group=self.group)
        packed = self.packing.seconds
        steps: list[Statistics] = []
        times = timed(lambda: steps.append(self.variants[name].step(self.buffer)), self.device)
        times |= {part: getattr(steps[0], part).seconds for part in ("compress", "communicate", "decompress")}
        return times | {"pack": self.packing.seconds - packed}

    def kernels(self, name: str) -> dict[str, float]:
        """Kernels of one step of a variant."""
        return kernels(lambda: self.variants[name].step(self.buffer), self.device, before=self._load_gradient)


def tables(plan: Plan, rounds: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """One table, a row per engine and setting.

    Times are of one step, in milliseconds: ``cpu_ms`` processor time of all threads, the others wall time, of which
    ``pack_ms`` is inside ``compress_ms`` and ``decompress_ms``. Columns ending in ``_q1`` and ``_q3`` are quartiles
    over the rounds. ``speedup_*`` is the time of torch's hook over this engine's, round by round, in the same process;
    ``speedup_over_<allocator>_*`` that of torch's hook in the process with that allocator. ``kernel_ms`` is the time of
    all kernels of one step on a GPU and ``kernel_calls`` their number.
    """
    rows = []
    hooks = rounds[(rounds["variant"] == "torch") & (rounds["status"] == "ok")].set_index("round")
    for (*setting, variant), part in rounds.set_index("round").groupby([*SETTING, "variant"], sort=False):
        row = dict(zip(SETTING, setting, strict=True))
        ours = variant not in ("copy", "torch")
        row |= {"engine": "edgc" if ours else variant, "factor_dtype": variant if ours else ""}
        row |= {"products": "" if variant == "copy" else "fp32", "status": part["status"].iloc[0]}
        rows.append(row)
        if row["status"] != "ok":
            continue
        row |= {"repeats": len(part), **part[part.columns.intersection(FACTS)].iloc[0]}
        for name in PARTS:
            row |= spread(f"{name}_ms", 1e3 * part[name])
        beside = (hooks[["rank", "threads", "network"]] == [row["rank"], row["threads"], row["network"]]).all(axis=1)
        for allocator, hook in hooks[beside].groupby("allocator", sort=False):
            prefix = "speedup" if allocator == row["allocator"] else f"speedup_over_{allocator}"
            for clock in ("cpu", "wall"):
                row |= spread(f"{prefix}_{clock}", hook[clock] / part[clock])
    return {"engine": pd.DataFrame(rows)}
