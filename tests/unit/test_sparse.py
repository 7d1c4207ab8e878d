"""Deep Gradient Compression in topk and randomk: momentum correction with its masking, and the density's warm-up."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc import EDGCConfig
from edgc.checkpoints.saved_state import compare_settings
from edgc.compressors import Channel, Gradient
from edgc.compressors.entrywise.sparse import Sparse, SparseConfig, chosen, draw
from edgc.engine import Engine
from edgc.errors import UserError
from tests.lockstep import reduce_together

WORKERS = 3
SHAPES = {"a": (40, 30), "bias": (30,), "b": (25, 16)}
MATRICES = ("a", "b")
DGC: dict[str, Any] = {"momentum": 0.9, "density": 0.02, "density_warmup_steps": 4, "min_compression_elements": 64}

both = pytest.mark.parametrize("method", ["topk", "randomk"])


def made(method: str, count: int = WORKERS, **changes: Any) -> list[Any]:
    return [EDGCConfig(**{"method": method, **DGC, **changes}).build() for _ in range(count)]


def gradients(step: int, worker: int) -> list[Gradient]:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return [Gradient(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def everyone(step: int) -> list[list[Gradient]]:
    return [gradients(step, worker) for worker in range(WORKERS)]


# ------------------------------------------------------------------ the warm-up of the density


def test_the_density_falls_as_in_the_paper() -> None:
    """Sparsity of 75, 93.75, 98.4375, 99.6 and 99.9 %: section 3.3, there epoch by epoch."""
    config = EDGCConfig(method="topk", density=1 / 1024, density_warmup_steps=4)
    assert isinstance(config, SparseConfig)
    found = [config.density_after(step) for step in range(7)]
    assert found == pytest.approx([1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 1024, 1 / 1024, 1 / 1024], rel=1e-12)
    assert found[4] == config.density


def test_without_a_warm_up_the_density_is_always_the_same() -> None:
    config = EDGCConfig(method="topk", density=0.3)
    assert isinstance(config, SparseConfig)
    assert [config.density_after(step) for step in (0, 1, 1000)] == [0.3] * 3


@both
def test_as_many_entries_are_sent_as_the_density_of_the_step_says(method: str) -> None:
    compressors = made(method)
    for step in range(7):
        reduce_together(compressors, everyone(step), 4)
        share = 0.25 * (0.02 / 0.25) ** (min(step, 4) / 4)
        for compressor in compressors:
            sent = {name: int((compressor.errors[name] == 0).sum()) for name in MATRICES}
            assert sent == {"a": chosen(1200, share), "b": chosen(400, share)}


@both
def test_a_parameter_that_joins_later_has_a_warm_up_of_its_own(method: str) -> None:
    compressors = made(method)
    for step in range(4):
        reduce_together(compressors, [own[:2] for own in everyone(step)], 4)
    reduce_together(compressors, everyone(4), 4)
    assert int((compressors[0].errors["a"] == 0).sum()) == chosen(1200, 0.02)
    assert int((compressors[0].errors["b"] == 0).sum()) == chosen(400, 0.25)


def test_the_cost_gate_times_the_density_after_the_warm_up() -> None:
    config = EDGCConfig(method="topk", cost_gate=True, **DGC)
    engine = Engine(config, stage=0, shapes=[list(SHAPES.values())[::2]], iterations=10)
    for compressor, steps in ((engine.compressor, 4), (engine.monitor.benchmark.make(), 0)):
        assert isinstance(compressor, Sparse)
        settings = compressor.config
        assert (settings.density_warmup_steps, settings.density, settings.momentum) == (steps, 0.02, 0.9)


# ------------------------------------------------------------------ momentum correction


class Reference:
    """Sections 3.2 and 3.3 of the paper with u dampened, in fp64, entry by entry; what goes dense is not masked."""

    def __init__(self, momentum: float) -> None:
        self.momentum = momentum
        self.u = [{name: [0.0] * _size(name) for name in SHAPES} for _ in range(WORKERS)]
        self.v = copy.deepcopy(self.u)

    def step(self, given: list[list[Gradient]], choose: Callable[[str, list[float]], list[int]]) -> dict[str, Any]:
        means = {}
        for i, name in enumerate(SHAPES):
            mean = [0.0] * _size(name)
            for u, v, own in zip(self.u, self.v, given, strict=True):
                for k, g in enumerate(own[i].tensor.flatten().tolist()):
                    u[name][k] = self.momentum * u[name][k] + (1 - self.momentum) * g
                    v[name][k] += u[name][k]
                for k in choose(name, v[name]) if name in MATRICES else range(len(mean)):
                    mean[k] += v[name][k] / WORKERS
                    v[name][k] = 0.0
                    if name in MATRICES:
                        u[name][k] = 0.0
            means[name] = mean
        return means


def _size(name: str) -> int:
    return int(torch.Size(SHAPES[name]).numel())


def _close(tensor: Tensor, values: list[float]) -> bool:
    return torch.allclose(tensor.flatten().double(), torch.tensor(values, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@both
def test_against_the_algorithm_written_plainly(method: str) -> None:
    compressors, reference = made(method), Reference(0.9)
    for step in range(12):
        share = 0.25 * (0.02 / 0.25) ** (min(step, 4) / 4)

        def choose(name: str, v: list[float], share: float = share) -> list[int]:
            k = round(share * len(v))
            if method == "topk":
                return sorted(range(len(v)), key=lambda place: -abs(v[place]))[:k]
            return [int(place) for place in draw(len(v), k, compressors[0]._generator(name))]

        expected = reference.step(everyone(step), choose)
        given = everyone(step)
        reduce_together(compressors, given, 4)
        for i, name in enumerate(SHAPES):
            assert all(torch.equal(own[i].tensor, given[0][i].tensor) for own in given), "replicas differ"
            assert _close(given[0][i].tensor, expected[name]), (step, name)
            for compressor, u, v in zip(compressors, reference.u, reference.v, strict=True):
                assert _close(compressor.velocities.tensors[name], u[name])
                if name in MATRICES:
                    assert _close(compressor.errors[name], v[name])


@both
def test_what_was_sent_and_what_is_kept_are_the_velocities_that_came_in(method: str) -> None:
    compressors = made(method)
    u = [{name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in compressors]
    came_in = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    sent = copy.deepcopy(came_in)
    for step in range(20):
        given = everyone(step)
        for own, velocity in zip(given, u, strict=True):
            for g in own:
                velocity[g.name] = 0.9 * velocity[g.name] + 0.1 * g.tensor.double()
                came_in[g.name] += velocity[g.name] / WORKERS
        reduce_together(compressors, given, 4 if step != 10 else None)
        for compressor, velocity in zip(compressors, u, strict=True):
            for name, error in compressor.errors.items():
                velocity[name][error == 0] = 0  # what was sent
        for g in given[0]:
            sent[g.name] += g.tensor.double()
    for name in SHAPES:
        kept = sum(c.errors.get(name, torch.zeros(SHAPES[name])).double() for c in compressors) / WORKERS
        assert (sent[name] + kept - came_in[name]).norm() < 1e-5 * came_in[name].norm()
        assert name not in MATRICES or kept.norm() > 0.1 * came_in[name].norm(), "nothing was kept"


@both
@pytest.mark.parametrize("rank", [4, None], ids=["all sent", "uncompressed"])
def test_where_all_is_sent_it_is_sgd_with_momentum(method: str, rank: int | None) -> None:
    """torch's own, dampened; it takes its first gradient whole, here a zero."""
    [compressor] = made(method, 1, density=1.0, density_warmup_steps=0)
    names = list(SHAPES)
    ours, theirs = ([torch.nn.Parameter(torch.zeros(SHAPES[name])) for name in names] for _ in range(2))
    plain = torch.optim.SGD(ours, lr=0.1)
    with_momentum = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, dampening=0.9)
    for step in range(8):
        mine = [Gradient(g.name, g.tensor * (step > 0)) for g in gradients(step, 0)]
        for parameter, g in zip(theirs, mine, strict=True):
            parameter.grad = g.tensor.clone()
        compressor.reduce(mine, Channel(None), rank)
        for parameter, g in zip(ours, mine, strict=True):
            parameter.grad = g.tensor
        plain.step()
        with_momentum.step()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        assert one.abs().max() > 0.05


@both
def test_the_velocity_is_cleared_where_it_was_sent_and_nowhere_else(method: str) -> None:
    compressors = made(method)
    reduce_together(compressors, everyone(0), 4)
    for compressor in compressors:
        for name in MATRICES:
            assert torch.equal(compressor.velocities.tensors[name] == 0, compressor.errors[name] == 0)
        assert bool((compressor.velocities.tensors["bias"] != 0).all())


# ------------------------------------------------------------------ saved states


def test_a_state_without_velocities_is_refused_where_there_is_momentum() -> None:
    [old], [new] = made("topk", 1, momentum=0.0), made("topk", 1)
    for compressor in (old, new):
        compressor.reduce(gradients(0, 0), Channel(None), 4)
    before = old.state_dict()
    assert "velocities" not in before
    with pytest.raises(UserError, match=r"^the saved state has no compressor\.velocities; load what state_dict"):
        new.load_state_dict(before)
    old.load_state_dict(before)
    old.load_state_dict(new.state_dict())
    assert "velocities" not in old.state_dict()
    saved = {"method": "topk", "density": 0.02}
    with pytest.raises(UserError, match=r"momentum = 0\.0, now 0\.9"):
        compare_settings(saved, EDGCConfig(method="topk", density=0.02, momentum=0.9), allowed=False)
    assert not compare_settings(saved, EDGCConfig(method="topk", density=0.02), allowed=False)


def test_a_state_from_before_goes_on_with_the_same_bits() -> None:
    """One that topk saved when it had neither momentum nor warm-up."""
    first, second = made("topk", 2, momentum=0.0, density_warmup_steps=0)
    results: list[list[Tensor]] = []
    first.reduce(gradients(0, 0), Channel(None), 4)
    second.load_state_dict({"errors": {name: e.clone() for name, e in first.errors.items()}, "counts": {}})
    for compressor in (first, second):
        mine = gradients(1, 0)
        compressor.reduce(mine, Channel(None), 4)
        results.append([g.tensor for g in mine])
    assert all(map(torch.equal, *results))


def test_velocities_of_another_model_are_refused() -> None:
    first, second = made("topk", 2)
    first.reduce([Gradient("p", torch.randn(30))], Channel(None), 4)
    second.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match=r"^the velocity of p is \(30,\), its gradient \(40,\)"):
        second.reduce([Gradient("p", torch.randn(40))], Channel(None), 4)


# ------------------------------------------------------------------ settings


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"momentum": 1.0}, r"momentum = 1\.0 is not valid; use a number of at least 0 and below 1"),
        ({"momentum": -0.1}, r"momentum = -0\.1 is not valid"),
        (
            {"error_feedback": False},
            r"momentum = 0\.9 is not used with .*; leave it out, or set error_feedback",
        ),
        ({"density": 0.25}, r"density_warmup_steps = 4 is not valid; set density below 0\.25"),
        ({"density_warmup_steps": 2.5}, r"density_warmup_steps = 2\.5 is not valid; use a whole number"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(method: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(method, 1, **changes)


@pytest.mark.parametrize("method", ["topk", "randomk", "quantize", "sign"])
def test_error_feedback_is_on_unless_it_is_switched_off(method: str) -> None:
    for switch, kept in (({}, {"a"}), ({"error_feedback": True}, {"a"}), ({"error_feedback": False}, set())):
        workers = [EDGCConfig(method=method, min_compression_elements=64, **switch).build() for _ in range(2)]
        reduce_together(workers, [gradients(0, worker)[:1] for worker in range(2)], 4)
        assert all(set(worker.kept) == kept for worker in workers)
