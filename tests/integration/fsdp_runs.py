"""A small sharded model for the tests of FSDP2, and training runs of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._dynamo  # which the first optimizer would import
import torch.distributed as dist
import torch.distributed.checkpoint  # and this one a second
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import edgc.fsdp
from edgc import EDGCConfig

WIDTH = 8
SMALL = {"min_compression_elements": 16}
POWERSGD = {"method": "powersgd", "rank": 1, **SMALL}
QUANTISED = {"method": "quantize", "bits": 4, **SMALL}
EDGC = {
    "method": "edgc",
    "r_max": 2,
    "r_min": 1,
    "rank_multiple": 1,
    "step_limit": 1,
    "window": 2,
    "stability_tolerance": 10.0,
    "entropy": {"iteration_rate": 1.0, "entry_rate": 1.0},
    **SMALL,
}


class Block(nn.Module):
    """Rows that two and four ranks cannot share evenly, a weight of three dimensions, vectors and a frozen matrix."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.again = again  # how activations are computed again in backward
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 13)
        self.conv, self.down = nn.Conv1d(13, 13, 3, padding=1, groups=13), nn.Linear(13, WIDTH)
        self.narrow, self.frozen = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH).requires_grad_(False)

    def inner(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x)).tanh()
        y = self.conv(y.mT).mT
        return x + self.down(y) + self.frozen(self.narrow(x))

    def forward(self, x: Tensor) -> Tensor:
        if self.again and torch.is_grad_enabled():
            result: Tensor = checkpoint(self.inner, x, use_reentrant=self.again == "reentrant")
            return result
        return self.inner(x)


class Net(nn.Module):
    """A language model of eleven words, whose output layer is tied to the embedding."""

    def __init__(self, again: str = "") -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.words.weight
        self.blocks = nn.ModuleList(Block(again) for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def mesh_of(replicas: int) -> DeviceMesh:
    """Of all ranks, so many replicas by shards."""
    shape = (replicas, dist.get_world_size() // replicas)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def plain_net(again: str = "", device: str = "cpu") -> Net:
    torch.manual_seed(0)
    with torch.device(device):
        return Net(again)


def sharded(
    mesh: DeviceMesh, *, again: str = "", meta: bool = False, root: dict[str, Any] | None = None, **options: Any
) -> Net:
    net = plain_net(again, "meta" if meta else "cpu")
    for block in net.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(net, mesh=mesh, **options | (root or {}))
    return net


def tensor_parallel(mesh: DeviceMesh, over: DeviceMesh) -> Any:
    """A net whose two layers in the middle are cut over ``mesh["tensor"]``, sharded over ``over``."""
    torch.manual_seed(0)
    layers = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH), nn.Linear(WIDTH, 11)
    net = nn.Sequential(*layers)
    parallelize_module(net, mesh["tensor"], {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return fully_shard(net, mesh=over)


def tokens(step: int, rank: int | None = None) -> Tensor:
    """A rank's tokens of a step."""
    rank = dist.get_rank() if rank is None else rank
    return torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(net: nn.Module, batch: Tensor) -> Tensor:
    return nn.functional.cross_entropy(net(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())


def locals_of(net: nn.Module) -> dict[str, Tensor]:
    """This rank's shards."""
    return {name: p.to_local().detach().clone() for name, p in net.named_parameters() if isinstance(p, DTensor)}


@dataclass
class Run:
    """Training of a sharded model on one rank.

    Args:
        mesh: of replicas by shards, or of shards.
        settings: of compression; None leaves torch as it is.
        accumulation: micro-batches a step, and how all but the last are kept back: ``gradients`` or ``shards``.
    """

    mesh: DeviceMesh
    settings: dict[str, Any] | None = None
    accumulation: int = 1
    keep_back: str = "gradients"
    clip: float = 0.0
    decay: float = 1.0  # of the rate, every step
    net: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    place: int | None = None  # whose tokens it has, if not its rank's
    make: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.5)

    def __post_init__(self) -> None:
        self.net = sharded(self.mesh) if self.net is None else self.net
        self.optimizer = self.make(self.net.parameters())
        self.handle: Any = None
        if self.settings is not None:
            config = EDGCConfig.from_dict(self.settings)
            options = {"optimizer": self.optimizer, **self.options} if "strategy" in self.options else self.options
            self.handle = edgc.fsdp.register(self.net, config, iterations=20, **options)
        self.losses: list[float] = []  # of the last micro-batch of every step
        self.norms: list[float] = []
        self.ranks: list[int | None] = []

    def backward(self, step: int) -> None:
        for micro in range(self.accumulation):
            last = micro == self.accumulation - 1
            if self.keep_back == "gradients":
                self.net.set_requires_gradient_sync(last)
            else:
                self.net.set_requires_all_reduce(last)
            loss = loss_of(self.net, tokens(step * self.accumulation + micro, self.place)) / self.accumulation
            loss.backward()
        self.losses.append(float(loss.detach()) * self.accumulation)

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.backward(step)
            if self.clip:
                norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
                self.norms.append(float(norm.full_tensor()))
            self.optimizer.step()
            self.optimizer.param_groups[0]["lr"] *= self.decay
            if isinstance(self.handle, edgc.fsdp.Handle):
                self.ranks.append(self.handle.last.rank)
        return self

    @property
    def weights(self) -> dict[str, Tensor]:
        return locals_of(self.net)


class Scaler:
    """A loss scale that the test sets."""

    factor = 1.0

    def scale(self, loss: Tensor) -> Tensor:
        return loss * self.factor


class _Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: float) -> Tensor:
        ctx.value = value
        return parameter.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.index_fill(0, torch.zeros(1, dtype=torch.int64), ctx.value), None


@contextmanager
def poisoned(net: Any, on: bool, *, matrix: bool = False, value: float = torch.nan) -> Iterator[None]:
    """Where ``on``, a part of one gradient is not finite: the first entry of a vector, or the first row of a matrix,
    which the first shard has."""
    narrow = net.blocks[0].narrow
    if on:

        def forward(x: Tensor) -> Tensor:
            weight, bias = (_Poison.apply(p, value) if p.dim() == 1 + matrix else p for p in narrow.parameters())
            return nn.functional.linear(x, weight, bias)

        narrow.forward = forward
    try:
        yield
    finally:
        if on:
            del narrow.forward


def replicas_equal(mesh: DeviceMesh, tensors: dict[str, Tensor]) -> bool:
    """True if this rank's shards are those of the other replicas, bit for bit. Collective."""
    flat = torch.cat([tensor.flatten().float() for tensor in tensors.values()])
    others = [torch.empty_like(flat) for _ in range(mesh["replicate"].size())]
    dist.all_gather(others, flat, group=mesh["replicate"].get_group())
    return all(torch.equal(flat, other) and bool(other.isfinite().all()) for other in others)


@contextmanager
def watched(run: Run) -> Iterator[list[float]]:
    """How far sent + kept is from what came in, of every reduction between replicas, relative to that."""
    engine, mesh, found = run.handle.engine, run.mesh, list[float]()
    reduce, group = engine.reduce, mesh["replicate"].get_group()

    def mean(tensors: dict[str, Tensor]) -> Tensor:
        total = torch.cat([tensor.flatten().double() for tensor in tensors.values()])
        dist.all_reduce(total, group=group)
        return total / group.size()

    def watching(gradients: Any, *options: Any) -> None:
        kept = lambda name: engine.compressor.kept.get(name, torch.zeros(()))  # noqa: E731
        before = mean({g.name: g.tensor.double() + kept(g.name) for g in gradients})
        reduce(gradients, *options)
        after = {g.name: g.tensor.double().clone() for g in gradients}
        waiting.append((before, after))

    def checked(**options: Any) -> None:
        end(**options)
        for before, after in waiting:
            kept = {n: engine.compressor.kept.get(n, torch.zeros(())) for n in after}
            gap = mean({n: t + kept[n] for n, t in after.items()}) - before
            found.append(float(gap.norm() / before.norm().clamp_min(1e-30)))
        waiting.clear()

    waiting, end = list[tuple[Tensor, dict[str, Tensor]]](), engine.end_iteration
    engine.reduce, engine.end_iteration = watching, checked
    try:
        yield found
    finally:
        del engine.reduce, engine.end_iteration


@contextmanager
def scattered(run: Run) -> Iterator[list[float]]:
    """Of a model sharded over all ranks: how far what a shard's owner has, plus the mean of what all keep of it, is
    from the mean of what they had; of every parameter and step, relative to that."""
    engine, found, waiting = run.handle.engine, list[float](), list[tuple[Any, Tensor, Tensor, bool]]()
    reduce, end = engine.reduce, engine.end_iteration
    world, me = dist.get_world_size(), dist.get_rank()

    def mean(parts: Any, source: Tensor | None = None) -> Tensor:
        """Of a unit's ``source`` and what is kept of it, this rank's shard."""
        kept = [engine.errors.get(part.name, torch.zeros(world, part.entries)) for part in parts]
        total = torch.cat(kept, 1).double() + (0 if source is None else source.view(world, -1))
        dist.all_reduce(total)
        return total[me] / world

    def watching(parts: Any, output: Tensor, source: Tensor, weight: float) -> None:
        before = mean(parts, source)
        reduce(parts, output, source, weight)
        waiting.append((parts, before, output.double(), output.dtype == torch.float32))

    def checked(**options: Any) -> None:
        end(**options)
        for parts, before, after, exact in waiting:
            gap = after + mean(parts) - before
            # Vectors go as they are, and in bf16 their means are rounded as torch rounds them.
            for part in parts if exact else [part for part in parts if len(part.whole) == 2]:
                found.append(float(gap[part.place].norm() / before[part.place].norm().clamp_min(1e-12)))
        waiting.clear()

    engine.reduce, engine.end_iteration = watching, checked
    try:
        yield found
    finally:
        del engine.reduce, engine.end_iteration
