"""A small problem in any type, for the tests of strategies: a network that learns from a teacher, by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from edgc.config import EDGCConfig
from edgc.rehearsal import Rehearsal
from edgc.strategies import StrategyConfig, strategies

ROWS, HIDDEN, COLUMNS = 16, 24, 8
SHAPES = [(HIDDEN, ROWS), (HIDDEN,), (COLUMNS, HIDDEN), (COLUMNS,)]
EXAMPLES = {name: (kind, example) for kind in strategies() for name, example in kind.examples.items()}
Make = Callable[[nn.Module], torch.optim.Optimizer]


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def adamw(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr)


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(ROWS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, COLUMNS)).to(dtype)


class Odd(nn.Sequential):
    """A network for the same batches, whose kernels do not lie in memory as their shape says, and that has a number and
    nothing among its parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        kernels = nn.Conv2d(4, HIDDEN, 2)
        super().__init__(nn.Unflatten(1, (4, 2, 2)), kernels, nn.Flatten(), nn.Tanh(), nn.Linear(HIDDEN, COLUMNS))
        self.scale, self.nothing = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(0, 3))
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs) * self.scale + self.nothing.sum()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, without hooks of its own, as Accelerate's is."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Inputs of a replica's step, counted from 0."""
    return torch.randn(12, ROWS, generator=torch.Generator().manual_seed(1000 * step + rank)).to(dtype)


def loss(model: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    teacher = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(9)).to(inputs.dtype)
    return (model(inputs) - (inputs @ teacher).tanh()).square().mean()


def gradients(parameters: Mapping[str, Tensor], step: int, rank: int) -> dict[str, Tensor]:
    """Gradients of a replica at a step, at these parameters, in float64: for references."""
    leaves = {name: p.detach().double().requires_grad_() for name, p in parameters.items()}
    model = network(torch.float64)
    value = loss(lambda inputs: functional_call(model, leaves, (inputs,)), batch(step, rank, torch.float64))
    return dict(zip(leaves, torch.autograd.grad(value, list(leaves.values())), strict=True))


def start() -> dict[str, Tensor]:
    """The first weights, in float64."""
    return {name: p.detach().double().clone() for name, p in network().named_parameters()}


def rehearsal(
    strategy: Mapping[str, Any],
    compression: Mapping[str, Any] | None = None,
    *,
    world: int = 2,
    make: Make = sgd,
    dtype: torch.dtype = torch.float32,
    iterations: int = 40,
    model: nn.Module | None = None,
) -> Rehearsal:
    model = network(dtype) if model is None else model
    return Rehearsal(
        model,
        optimizer=make(model),
        config=EDGCConfig.from_dict({"min_compression_elements": 1, **(compression or {})}),
        strategy=StrategyConfig.from_dict(strategy),
        replicas=world,
        iterations=iterations,
        loss=loss,
    )


def settings_of(name: str) -> StrategyConfig:
    """Strategy of an example."""
    kind, example = EXAMPLES[name]
    return kind.from_dict(example.settings)


def optimizer_of(name: str) -> Make:
    """Inner optimizer of an example: plain SGD where the strategy makes the direction itself."""
    return sgd if EXAMPLES[name][0].directs else adamw


def made(name: str, world: int = 2, **options: Any) -> tuple[Rehearsal, StrategyConfig]:
    """Rehearsal of an example, and its settings."""
    settings = settings_of(name)
    return rehearsal(settings.to_dict(), EXAMPLES[name][1].compression, world=world, **options), settings


class Workers:
    """Replicas of a reference in float64, each with its weights and an inner optimizer of its own."""

    def __init__(self, world: int, inner: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None) -> None:
        self.weights = [start() for _ in range(world)]
        make = inner or (lambda tensors: torch.optim.AdamW(tensors, lr=3e-3))
        self.inner = [make(list(each.values())) for each in self.weights]

    def step(self, step: int) -> None:
        """Local step of every replica, counted from 0."""
        for rank, (each, optimizer) in enumerate(zip(self.weights, self.inner, strict=True)):
            for name, gradient in gradients(each, step, rank).items():
                each[name].grad = gradient
            optimizer.step()

    def mean(self, name: str) -> Tensor:
        return torch.stack([each[name] for each in self.weights]).mean(0)

    def restart(self, name: str, weight: Tensor) -> None:
        """Put all replicas at one weight."""
        for each in self.weights:
            each[name].data.copy_(weight)


def train(trained: Rehearsal, steps: int, *, dtype: torch.dtype = torch.float32) -> Rehearsal:
    for _ in range(steps):
        trained.step([batch(trained.taken, rank, dtype) for rank in range(trained.replicas)])
    return trained


def follows(
    strategy: Mapping[str, Any],
    expected: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]],
    compression: Mapping[str, Any] | None = None,
    *,
    make: Make = adamw,
    world: int,
    within: float = 1e-10,
) -> None:
    """Assert that after 20 steps in float64 every replica has the weights that are expected of it, or of all."""
    trained = rehearsal(strategy, compression, world=world, make=make, dtype=torch.float64)
    train(trained, 20, dtype=torch.float64)
    each = [expected] * world if isinstance(expected, Mapping) else expected
    for rank, own in enumerate(each):
        assert distance(weights(trained, rank), own) < within
    mean = {name: torch.stack([own[name] for own in each]).mean(0) for name in each[0]}
    assert distance(trained.mean_weights(), mean) < within


def weights(trained: Rehearsal, replica: int = 0) -> dict[str, Tensor]:
    model = trained.models[replica % len(trained.models)]
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """Largest difference of an entry, relative to the largest entry."""
    filled = [n for n in other if other[n].numel()]
    return max(float((one[n].double() - other[n].double()).abs().max() / other[n].abs().max()) for n in filled)
