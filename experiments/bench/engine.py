"""The engine benchmark: every engine on the same gradients, one step at a time, in turns.

Worker processes named after an allocator time engines without a network (communication takes no time); the two ranks
of ``gloo`` time them with a real all-reduce over the loopback interface. Only one process, or one pair of ranks, works
at any time. In a round each engine takes one step, in an order that turns round after
round; ratios are taken within a round, so that a machine that slows down for a while slows both sides.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from edgc.errors import UserError
from experiments.bench import machine
from experiments.bench.children import Child, Group, ranks
from experiments.bench.gradients import Shape, entries, layer_shapes
from experiments.bench.kernels import Kernel
from experiments.bench.options import FACTORS, at_least

MODULE = "experiments.bench.engine_worker"
FLOOR = ("products", "orthogonalisation")
BF16_PRODUCTS = ("torch+bf16", "fp32+bf16")
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


@dataclass(frozen=True)
class Plan:
    """What is measured, all ranks with all numbers of threads."""

    layers: int = 3  # of the gradients, see :func:`experiments.bench.gradients.layer_shapes`
    hidden: int = 1024
    ranks: tuple[int, ...] = (8, 32, 64, 128)
    threads: tuple[int, ...] = (1, 2)
    repeats: int = 7  # rounds
    device: str = "cpu"
    dtypes: tuple[str, ...] = ("fp32",)  # of the gradients
    allocators: tuple[str, ...] = tuple(ALLOCATORS)  # the first times all engines and the floor
    gloo: bool = True  # also time two ranks with gloo, at the smallest number of threads
    embeddings: tuple[int, ...] = ()
    kernels: bool = False  # also profile each engine
    model: str = ""  # name in ``MODELS`` of what the gradients are of, or ""

    def __post_init__(self) -> None:
        at_least(1, layers=self.layers, hidden=self.hidden, repeats=self.repeats)
        at_least(1, ranks=self.ranks, threads=self.threads)
        largest = self.hidden // 4
        if max(self.ranks) > largest:
            what = f"rank {max(self.ranks)} compresses matrices of {self.hidden} rows too little"
            raise UserError(what, fix=f"use ranks up to {largest} or a larger --hidden")

    def clock(self, threads: int) -> str:
        """The time that engines are held against the floor by: waiting threads count as busy in processor time."""
        return "cpu" if self.device == "cpu" and threads == 1 else "wall"

    @property
    def shapes(self) -> list[Shape]:
        return layer_shapes(self.layers, self.hidden, self.embeddings)

    @property
    def rounds(self) -> int:
        """Rounds of the whole benchmark, those of gloo included."""
        return len(self.dtypes) * len(self.ranks) * self.repeats * (len(self.threads) + self.gloo)


@dataclass(frozen=True)
class Key:
    """One engine in one setting."""

    gradient_dtype: str
    rank: int
    threads: int
    allocator: str
    network: str  # none or gloo
    variant: str  # copy, torch or the type of our factors, with +bf16 behind it for bf16 products


@dataclass
class Measured:
    """Answers of the workers.

    Attributes:
        facts: relative error and bytes of one step, or why there is no timing.
        rounds: seconds of each part, one entry a round; of two ranks the slower one's.
        floor: of a setting (a key whose variant is empty): seconds of each part, one entry a round.
        kernels: of one step, the longest first.
    """

    facts: dict[Key, dict[str, Any] | str] = field(default_factory=dict)
    rounds: dict[Key, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    floor: dict[Key, list[dict[str, float]]] = field(default_factory=lambda: defaultdict(list))
    kernels: dict[Key, list[Kernel]] = field(default_factory=dict)


def layers_that_fit(model: str, free: int) -> int:
    """How many layers of a model all engines together can hold in ``free`` bytes; UserError if not even one fits."""
    sizes = MODELS[model]
    embeddings = entries(layer_shapes(0, sizes["hidden"], sizes.get("embeddings", ())))
    layer = entries(layer_shapes(1, sizes["hidden"]))
    fit = int(0.9 * free / BYTES_PER_ENTRY - embeddings) // layer
    if fit < 1:
        need = (embeddings + layer) * BYTES_PER_ENTRY / 0.9 / 2**30
        raise UserError(f"--model {model} does not fit", fix=f"it needs {need:.1f} GiB of free memory")
    return min(fit, int(sizes["layers"]))


def measure(plan: Plan, advance: Callable[[str], None]) -> Measured:
    """Run the benchmark; ``advance`` is told of every round.

    Raises:
        experiments.bench.children.ChildError: a worker has ended or reported an error that is not one engine's.
    """
    found = Measured()
    for dtype in plan.dtypes:
        gradients: dict[str, Any] = {"shapes": plan.shapes, "dtype": dtype, "device": plan.device}
        with contextlib.ExitStack() as stack:
            groups = {}
            for name in plan.allocators:
                environment = {"OMP_NUM_THREADS": str(max(plan.threads)), **ALLOCATORS[name]}
                groups[name] = stack.enter_context(Group([Child(MODULE, environment)]))
                groups[name].ask({"do": "start", **gradients})
            for rank in plan.ranks:
                for threads in plan.threads:
                    _section(plan, found, groups, Key(dtype, rank, threads, "", ALONE, ""), advance)
        if plan.gloo:
            threads = min(plan.threads)
            with ranks(MODULE, 2, threads=threads, **gradients) as group:
                for rank in plan.ranks:
                    key = Key(dtype, rank, threads, "", GLOO, "")
                    _section(plan, found, {plan.allocators[0]: group}, key, advance)
    return found


def _section(plan: Plan, found: Measured, groups: dict[str, Group], base: Key, advance: Callable[[str], None]) -> None:
    """All rounds at one rank and number of threads."""
    keys: list[tuple[Group, Key]] = []
    alone, first = base.network == ALONE, groups[plan.allocators[0]]
    for allocator, group in groups.items():
        variants = ["copy", "torch", *FACTORS] if group is first else ["torch", "fp32"]
        setting = replace(base, allocator=allocator)
        if group is first and alone and plan.device == "cpu":
            missing = machine.bf16_matmul()
            if missing is None:
                variants += BF16_PRODUCTS
            else:
                found.facts |= {replace(setting, variant=of): f"not available: {missing}" for of in BF16_PRODUCTS}
        request = {"do": "prepare", "variants": variants, "rank": base.rank, "threads": base.threads}
        for variant, fact in group.ask(request)[0].items():
            key = replace(setting, variant=variant)
            found.facts[key] = fact
            if not isinstance(fact, str):
                keys.append((group, key))
    if alone:
        first.ask({"do": "prepare_floor", "rank": base.rank})
    for index in range(plan.repeats):
        for group, key in keys if index % 2 == 0 else keys[::-1]:
            answers = group.ask({"do": "run", "name": key.variant})
            found.rounds[key].append({name: max(answer[name] for answer in answers) for name in answers[0]})
        if alone:
            parts = {name: first.ask({"do": "run", "name": name})[0][plan.clock(base.threads)] for name in FLOOR}
            found.floor[base].append(parts)
        advance(f"rank {base.rank}, {base.threads} threads" + ("" if alone else ", gloo"))
    if plan.kernels and alone:
        for group, key in keys:
            [found.kernels[key]] = group.ask({"do": "kernels", "name": key.variant, "steps": PROFILED})
