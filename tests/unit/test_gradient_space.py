"""Switches of gradient compressors against references in fp64, written from the papers: all workers in one process.

Each reference has one matrix [m, n], W workers and no tricks. Rounding to the nearest may fall to the other side in
fp32, for a block of 64 at a time. So a few entries may differ, and a step of a quantiser begins with the error feedback
that the library has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from edgc.compressors import Gradient
from edgc.compressors.ef21 import Estimates, EstimatingConfig
from edgc.compressors.powersgd import PowerSGDConfig
from edgc.compressors.powersgd.state import random_factor
from edgc.config import EDGCConfig, methods
from edgc.errors import UserError
from tests.examples import config_of
from tests.lockstep import reduce_together, room

ROWS, COLUMNS, STEPS = 48, 40, 20


class Reference(Protocol):
    """Every worker's gradient [m, n] to what all of them then have.

    Attributes:
        errors: of every worker, [W, m, n]: what it keeps.
        follows: whether a step begins with the error feedback of the library's last one.
    """

    errors: Tensor
    follows: bool

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor: ...


def gradient(step: int, worker: int, shape: tuple[int, int] = (ROWS, COLUMNS)) -> Tensor:
    """Something of low rank in common that stays for some steps, and noise of each worker's own; fp64."""
    common = torch.Generator().manual_seed(step // 5)
    own = torch.Generator().manual_seed(1000 + 10 * step + worker)
    left, right = (torch.randn(side, 3, generator=common, dtype=torch.float64) for side in shape)
    return left @ right.mT + 0.3 * torch.randn(shape, generator=own, dtype=torch.float64)


# --------------------------------------------------------------- quantisers


def step_of(amax: Tensor, *factors: float) -> Tensor:
    """The step as it is sent, in bf16: a product in fp32, for which of two it is, half way between, decides a block."""
    step = amax.float()
    for factor in factors:
        step = step * factor
    return step.bfloat16().double()


E4M3 = torch.tensor(
    sorted({sign * m / 8 * 2.0**-6 for sign in (-1, 1) for m in range(8)}
           | {sign * (1 + m / 8) * 2.0 ** (e - 7) for sign in (-1, 1) for e in range(1, 16) for m in range(8)
              if (e, m) != (15, 7)}),
    dtype=torch.float64,
)  # fmt: skip


def to_e4m3(blocks: Tensor) -> Tensor:
    step = step_of(blocks.abs().amax(1, keepdim=True), 1 / 448)
    nearest = (blocks / step)[..., None].sub(E4M3).abs().argmin(-1)
    return E4M3[nearest] * step


def to_int4(blocks: Tensor) -> Tensor:
    """Of the steps f amax / 7 that with the least squared error."""
    best, least = torch.zeros_like(blocks), torch.full((len(blocks), 1), torch.inf, dtype=torch.float64)
    for f in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5):
        exact = f * blocks.abs().amax(1, keepdim=True) / 7
        error = ((blocks / exact).round().clamp(-7, 7) * exact - blocks).square().sum(1, keepdim=True)
        step = step_of(blocks.abs().amax(1, keepdim=True), f, 1 / 7)
        best = torch.where(error < least, (blocks / step).round().clamp(-7, 7) * step, best)
        least = torch.minimum(error, least)
    return best


def hadamard(order: int) -> Tensor:
    """Sylvester's, by the parity of the bits that both indices have."""
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(order)] for i in range(order)]
    return torch.tensor(signs, dtype=torch.float64) / order**0.5


class Rounded:
    """Rounded by every worker, averaged by the owner of each shard, rounded again; error feedback filtered as LoCo's.

    Args:
        round: [blocks, 64] to what is left of them.
        group: entries that are not cut between owners.
    """

    follows = True

    def __init__(
        self, world: int, round: Callable[[Tensor], Tensor], group: int, order: int = 1, beta: float = 0, reset: int = 0
    ) -> None:
        self.round, self.beta, self.reset, self.step = round, beta, reset, 0
        self.turn = torch.block_diag(*[hadamard(order)] * (64 // order))
        self.shard = -(-ROWS * COLUMNS // (world * group)) * group
        self.errors = torch.zeros(world, ROWS, COLUMNS, dtype=torch.float64)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        world, entries = len(gradients), ROWS * COLUMNS
        flat = (torch.stack(list(gradients)) + self.errors).view(world, -1)
        flat = torch.nn.functional.pad(flat, (0, world * self.shard - entries))
        turned = flat.view(world, world, -1, 64) @ self.turn  # worker, owner, block
        sent = torch.stack([torch.stack([self.round(part) for part in own]) for own in turned])
        mean = sent.mean(0)
        result = torch.stack([self.round(part) for part in mean])
        unsent = turned - sent
        for owner in range(world):
            unsent[owner, owner] += world * (mean[owner] - result[owner])
        kept = (unsent @ self.turn.mT).view(world, -1)[:, :entries].view_as(self.errors)
        self.errors = self.beta * self.errors + (1 - self.beta) * kept
        self.step += 1
        if self.reset and self.step % self.reset == 0:
            self.errors.zero_()
        return (result @ self.turn.mT).reshape(-1)[:entries].view(ROWS, COLUMNS)


# ------------------------------------------------------- the other switches


def largest(x: Tensor, share: float) -> Tensor:
    """The entries of largest magnitude, that share of them, of one matrix; zeros elsewhere."""
    flat = x.reshape(-1)
    places = flat.abs().topk(round(share * flat.numel())).indices
    return torch.zeros_like(flat).index_put((places,), flat[places]).view_as(x)


class PowerIteration:
    """Low-rank parts of every worker's M (Vogels et al., 2019), from the library's random start."""

    def __init__(self, rank: int) -> None:
        self.right = random_factor(0, 1, "p", COLUMNS, rank).double()

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        basis = torch.linalg.qr(torch.stack([m @ self.right for m in inputs]).mean(0)).Q
        rights = [m.mT @ basis for m in inputs]
        self.right = torch.stack(rights).mean(0)
        return [basis @ right.mT for right in rights]


class EF21:
    """Algorithm of EF21-SGDM (Fatkhullin et al., 2023), its estimates h_w of every worker beginning with zero."""

    follows = False

    def __init__(self, world: int, compress: Callable[[Sequence[Tensor]], list[Tensor]], eta: float) -> None:
        self.compress, self.eta = compress, eta
        self.velocities: list[Tensor] = []
        self.own = [torch.zeros(ROWS, COLUMNS, dtype=torch.float64) for _ in range(world)]
        self.shared = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        last = self.velocities or gradients
        self.velocities = [(1 - self.eta) * v + self.eta * g for v, g in zip(last, gradients, strict=True)]
        sent = self.compress([v - h for v, h in zip(self.velocities, self.own, strict=True)])
        self.own = [h + c for h, c in zip(self.own, sent, strict=True)]
        self.shared = self.shared + torch.stack(sent).mean(0)
        self.errors = torch.stack([v - h for v, h in zip(self.velocities, self.own, strict=True)])
        return self.shared


class Refreshed:
    """PowerSGD+: every T-th mean is exact, and its leading singular vectors are what the iteration goes on with."""

    follows = False

    def __init__(self, world: int, rank: int, every: int) -> None:
        self.iteration, self.rank, self.every, self.step = PowerIteration(rank), rank, every, 0
        self.errors = torch.zeros(world, ROWS, COLUMNS, dtype=torch.float64)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        inputs = torch.stack(list(gradients)) + self.errors
        self.step += 1
        if self.step % self.every == 0:
            self.errors = torch.zeros_like(inputs)
            self.iteration.right = torch.linalg.svd(inputs.mean(0)).Vh[: self.rank].mT
            return inputs.mean(0)
        sent = torch.stack(self.iteration(list(inputs)))
        self.errors = inputs - sent
        return sent.mean(0)


class Voted:
    """Signum: majority of the signs of momenta; of ties the vote of the worker that owns that part of the entries."""

    follows = False

    def __init__(self, world: int, beta: float) -> None:
        self.beta, self.errors = beta, torch.zeros(world, ROWS, COLUMNS, dtype=torch.float64)
        self.momenta = torch.zeros_like(self.errors)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        self.momenta = self.beta * self.momenta + (1 - self.beta) * torch.stack(list(gradients))
        votes = torch.where(self.momenta >= 0, 1.0, -1.0).double().view(len(gradients), -1)
        owners = torch.arange(ROWS * COLUMNS) * len(gradients) // (ROWS * COLUMNS)
        vote = votes.sum(0) + votes.gather(0, owners[None])[0] / 2
        return (vote.sign() * self.momenta.abs().mean()).view(ROWS, COLUMNS)


class Widths:
    """DynamiQ's block widths, rounding to the nearest: 5 bits an entry, of which 0.8125 are means, norms and steps."""

    follows = False

    def __init__(self, world: int) -> None:
        self.errors, self.count = torch.zeros(world, ROWS, COLUMNS), -(-ROWS * COLUMNS // (256 * world))

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        world, entries = len(gradients), ROWS * COLUMNS
        flat = torch.stack(list(gradients)).view(world, -1)
        x = torch.nn.functional.pad(flat, (0, 256 * self.count * world - entries)).view(world, world, -1, 256)
        middle = x.mean((0, 3))[..., None]
        bits = [self.bits(shard) for shard in x.norm(dim=3).mean(0).square().tolist()]
        sent = torch.stack([self.rounded(own - middle, bits) for own in x])
        result = self.rounded(sent.mean(0), bits) + middle
        return result.view(-1)[:entries].view(ROWS, COLUMNS)

    def bits(self, squares: list[float]) -> list[int]:
        """By the lowest threshold of all that a norm can be on either side of."""
        found = []
        for t in (*sorted(s * factor for s in squares if s for factor in (1, 512 / 17)), float("inf")):
            found = [8 if s >= t else 2 if s * (512 / 17) <= t else 4 for s in squares]
            if sum(found) <= 2 * int(self.count * (5 - 0.8125) / 2):
                break
        return found

    def rounded(self, x: Tensor, bits: list[list[int]]) -> Tensor:
        top = x.unflatten(2, (16, 16)).abs().amax(3)
        coarse = (top.amax(2).float() * ((1 + 2**-7) / 255)).bfloat16().double()[..., None]
        levels = 2.0 ** (torch.tensor(bits)[..., None] - 1) - 1
        step = ((top / coarse).nan_to_num(0, 0, 0).ceil() * coarse / levels).repeat_interleave(16, 2)
        return torch.minimum((x / step + 0.5).nan_to_num(0, 0, 0).floor(), levels) * step


REFERENCES: dict[str, tuple[dict[str, Any], Callable[[int], Reference]]] = {
    "e4m3": ({"method": "quantize", "format": "e4m3"}, lambda world: Rounded(world, to_e4m3, 64)),
    "hadamard": (
        {"method": "quantize", "bits": 4, "hadamard": True},
        lambda world: Rounded(world, to_int4, 128, order=32),
    ),
    "loco": (
        {"method": "quantize", "bits": 4, "error_decay": 0.8, "error_reset_every": 7},
        lambda world: Rounded(world, to_int4, 128, beta=0.8, reset=7),
    ),
    "ef21 top-k": (
        {"method": "topk", "density": 0.05, "ef21": True, "momentum": 0.75},
        lambda world: EF21(world, lambda inputs: [largest(x, 0.05) for x in inputs], 0.25),
    ),
    "ef21 powersgd": (
        {"method": "powersgd", "rank": 3, "ef21": True},
        lambda world: EF21(world, PowerIteration(3), 1),
    ),
    "refreshed": (
        {"method": "powersgd", "rank": 3, "refresh_every": 6},
        lambda world: Refreshed(world, 3, 6),
    ),
    "majority": ({"method": "majority", "momentum": 0.9}, lambda world: Voted(world, 0.9)),
    "dynamiq": ({"method": "dynamiq"}, Widths),
}


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", REFERENCES)
def test_twenty_steps_are_those_of_the_paper(name: str, world: int) -> None:
    settings, reference = REFERENCES[name]
    workers: list[Any] = [EDGCConfig.from_dict(settings).build() for _ in range(world)]
    for worker in workers:
        worker.draws_at_random = False
    expected_of = reference(world)
    for step in range(STEPS):
        every = [gradient(step, worker) for worker in range(world)]
        given = [[Gradient("p", each.float())] for each in every]
        reduce_together(workers, given, 3)
        result = expected_of(every)
        none = torch.zeros(ROWS, COLUMNS)
        kept = torch.stack([worker.kept.get("p", none).double() for worker in workers])
        for found, expected in ((given[0][0].tensor.double(), result), (kept, expected_of.errors)):
            off = (found - expected).abs() > 1e-4 * result.abs().amax()
            assert int(off.sum()) <= 0.05 * off.numel(), (step, int(off.sum()))
        if expected_of.follows:
            expected_of.errors = kept


def test_every_method_with_error_feedback_has_ef21() -> None:
    kinds = [kind for kind in methods() if issubclass(kind, EstimatingConfig) and kind.method != "majority"]
    assert len(kinds) >= 6
    for kind in kinds:
        needed = {"rank": 4} if kind is PowerSGDConfig else {}
        assert isinstance(kind(error_feedback=True, ef21=True, **needed).build(), Estimates), kind


def test_who_asks_majority_vote_for_error_feedback_is_told_of_signs() -> None:
    for key in ("error_feedback", "ef21"):
        with pytest.raises(UserError, match="leave it out, or use method: sign"):
            EDGCConfig.from_dict({"method": "majority", key: True})


def test_of_an_unused_gradient_ef21_sends_nothing() -> None:
    workers: list[Any] = [EDGCConfig.from_dict(REFERENCES["ef21 top-k"][0]).build() for _ in range(2)]
    for step in range(3):
        before = [{key: of["p"].clone() for key, of in worker.state_dict().items() if of} for worker in workers]
        given = [[Gradient("p", gradient(step, rank).float(), unused=step == rank + 1)] for rank in range(2)]
        reduce_together(workers, given, 3)
        workers[1].take_back("p", given[1][0].tensor)
    kept, last = workers[1].kept["p"], workers[1].velocities["p"]
    assert torch.equal(kept, before[1]["errors"]) and torch.equal(last, before[1]["velocities"])
    sent = workers[0].velocities["p"] - before[0]["velocities"] + before[0]["errors"] - workers[0].kept["p"]
    torch.testing.assert_close(given[1][0].tensor, before[1]["estimates"] + sent / 2)


@pytest.mark.parametrize("name", ["majority signum", "topk_dgc"])
def test_of_an_unused_gradient_the_velocity_stays(name: str) -> None:
    workers: list[Any] = [config_of(name, min_compression_elements=64).build() for _ in range(2)]
    velocity = torch.zeros(ROWS, COLUMNS)
    for step in range(3):
        given = [[Gradient("p", gradient(step, rank).float(), unused=rank == 1 and step == 2)] for rank in range(2)]
        velocity = velocity if step == 0 else workers[1].velocities.tensors["p"].clone()
        reduce_together(workers, given, 3)
    assert velocity.any() and torch.equal(workers[1].velocities.tensors["p"], velocity)


# Bytes that a rank of W sends for an fp32 matrix in a step; with an exact mean in every sixth, in those six.
BYTES: dict[str, Callable[[int, int, int], float]] = {
    "e4m3": lambda world, m, n: 2 * (world - 1) / world * m * n * (1 + 2 / 64),
    "hadamard": lambda world, m, n: 2 * (world - 1) / world * m * n * (1 / 2 + 2 / 64),
    "loco": lambda world, m, n: 2 * (world - 1) / world * m * n * (1 / 2 + 2 / 64),
    "ef21 top-k": lambda world, m, n: (world - 1) * 8 * round(0.05 * m * n),
    "ef21 powersgd": lambda world, m, n: 2 * (world - 1) / world * 4 * 3 * (m + n),
    "refreshed": lambda world, m, n: 2 * (world - 1) / world * 4 * (5 * 3 * (m + n) + m * n),
    "majority": lambda world, m, n: 2 * (world - 1) / world * (m * n / 8 + 4),
    "dynamiq": lambda world, m, n: 2 * (world - 1) / world * m * n * 5 / 8,
}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_bytes_are_those_of_the_formula(world: int) -> None:
    shape = (256, 256)
    for name, formula in BYTES.items():
        settings = REFERENCES[name][0]
        workers = [EDGCConfig.from_dict(settings).build() for _ in range(world)]
        before, said = [sum(sent.values()) for sent in room(world).sent], [0.0] * world
        for _ in range(settings.get("refresh_every", 1)):
            given = [[Gradient("p", gradient(0, worker, shape).float())] for worker in range(world)]
            said = [a + each.bytes for a, each in zip(said, reduce_together(workers, given, 3), strict=True)]
        counted = [sum(sent.values()) - was for sent, was in zip(room(world).sent, before, strict=True)]
        assert said == counted == [formula(world, *shape)] * world, name


def test_widths_of_blocks_are_unbiased_and_pay_where_norms_differ() -> None:
    """The mean of many draws nears the mean of the workers; one draw is nearer to it than with four bits everywhere."""
    spread = torch.randn(ROWS * 16, 1, generator=torch.Generator().manual_seed(0)).mul(1.5).exp()
    every = [spread * gradient(0, worker, (ROWS * 16, 16 * 16)) for worker in range(2)]
    mean, apart = torch.stack(every).mean(0), {}
    for name, settings in {
        "dynamiq": {"method": "dynamiq"},
        "int4": {"method": "quantize", "bits": 4, "rounding": "stochastic"},
    }.items():
        workers, total = [EDGCConfig.from_dict(settings).build() for _ in every], torch.zeros_like(mean)
        for _ in range(draws := 16):
            given = [[Gradient("p", each.float())] for each in every]
            reduce_together(workers, given, 4)
            total += given[0][0].tensor
        one, many = (float((x - mean).norm() / mean.norm()) for x in (given[0][0].tensor, total / draws))
        assert many < 1.5 * one / draws**0.5, name
        apart[name] = one**2
    assert apart["dynamiq"] < apart["int4"] / 5
