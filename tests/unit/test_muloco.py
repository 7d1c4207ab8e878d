"""MuLoCo beside its algorithm, written down once more in float64; and its inner optimizer."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from edgc.errors import UserError
from edgc.optimizers import MuonAndAdamW, muon
from tests.strategy_cases import Workers, adamw, distance, follows, rehearsal, start, train, weights
from tests.unit.test_diloco import reference
from tests.workers import same

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")


def inner(tensors: Iterable[Tensor]) -> torch.optim.Optimizer:
    tensors = list(tensors)
    return MuonAndAdamW([p for p in tensors if p.dim() == 2], [p for p in tensors if p.dim() < 2])


@needs_muon
@pytest.mark.parametrize("world", [2, 4])
def test_muloco_is_its_algorithm(world: int) -> None:
    expected = reference(world, 20, every=5, lr=0.9, momentum=0.8, inner=inner)
    follows({"name": "muloco", "every": 5}, expected, world=world, make=muon, within=1e-8)


@pytest.mark.parametrize("world", [2, 4])
def test_error_feedback_decays_from_round_to_round(world: int) -> None:
    """What is compressed is of fp32 at most, so only up to its rounding."""
    settings, topk = {"name": "muloco", "every": 5}, {"method": "topk", "density": 0.25}
    trained = train(rehearsal(settings, topk, world=world, make=adamw), 20)
    anchor, velocity = start(), {name: torch.zeros_like(p) for name, p in start().items()}
    errors = [{name: torch.zeros_like(p) for name, p in start().items()} for _ in range(world)]
    workers = Workers(world)
    for step in range(20):
        workers.step(step)
        if (step + 1) % 5:
            continue
        for name, weight in anchor.items():
            sent = []
            for error, own in zip(errors, workers.weights, strict=True):
                owed = 0.95 * error[name] + weight - own[name].detach()
                limit = owed.abs().flatten().sort().values[-round(0.25 * owed.numel())] if owed.dim() == 2 else 0
                sent.append(torch.where(owed.abs() >= limit, owed, 0))
                error[name] = owed - sent[-1]
            delta = torch.stack(sent).mean(0)
            velocity[name] = 0.8 * velocity[name] + delta
            anchor[name] = weight - 0.9 * (delta + 0.8 * velocity[name])
            workers.restart(name, anchor[name])
    assert distance(weights(trained), anchor) < 1e-4


def test_error_feedback_of_warm_up_decays_too() -> None:
    warm_up = {"method": "edgc", "r_max": 4, "rank_multiple": 1, "warmup_bits": 4, "window": 20}
    decayed, plain = (
        train(rehearsal({"name": name, "every": 2}, warm_up, make=adamw, iterations=400), 2).strategies[0].engine  # type: ignore[attr-defined]
        for name in ("muloco", "diloco")
    )
    for name, error in plain.warm_up.kept.items():
        torch.testing.assert_close(decayed.warm_up.kept[name], 0.95 * error)
    assert plain.warm_up.kept


def test_what_decays_is_error_feedback_alone() -> None:
    all_sent = {"method": "topk", "density": 1.0, "momentum": 0.5}  # nothing is owed, so nothing decays
    one, other = (
        train(rehearsal({"name": "muloco", "every": 2, "error_decay": decay}, all_sent, make=adamw), 8)
        for decay in (1.0, 0.0)
    )
    assert same(weights(one), weights(other))
    with pytest.raises(UserError, match=r"ef21.*set compression.ef21: false"):
        rehearsal({"name": "muloco"}, {"method": "topk", "density": 0.25, "ef21": True}, make=adamw)


@needs_muon
def test_muon_scales_by_outputs_over_inputs_and_is_one_optimizer() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 16), nn.Linear(16, 4))
    optimizer = muon(model, weight_decay=0.0)
    before = copy.deepcopy(model)
    model(torch.tensor([1, 2, 3])).square().sum().backward()
    optimizer.step()
    for layer, scale in ((1, 2.0), (2, 0.5)):
        weight, old = (each.get_parameter(f"{layer}.weight").detach() for each in (model, before))
        moved = torch.linalg.matrix_norm(weight - old, 2)
        assert float(moved) == pytest.approx(0.044 * scale, rel=0.3)  # Newton-Schulz is not exact
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1, 3]  # two matrices and AdamW's
    twin_model, twin = copy.deepcopy((model, optimizer))
    twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each, steps in ((model, optimizer), (twin_model, twin)):
        steps.zero_grad()
        each(torch.tensor([0, 1])).square().sum().backward()
        steps.step()
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), twin_model.parameters(), strict=True))
    with pytest.raises(UserError, match="give it all at once"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
