"""Every method keeps the contract of ``edgc/compressors/base.py``: laws in :mod:`tests.contract`."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from edgc.config import methods
from tests import contract, contract_ranks, examples
from tests.workers import run_workers


def test_every_method_has_an_example() -> None:
    """One that has none would be tested by nobody; the policies of one method share its compressor."""
    assert {kind.method for kind in methods()} == {kind.method for kind, _ in examples.FOUND.values()}


@pytest.mark.parametrize(("name", "setting"), contract.covering())
def test_all_laws_hold(name: str, setting: contract.Setting) -> None:
    contract.course_holds(name, setting)


@pytest.mark.parametrize("name", contract.variants())
def test_state_follows_a_loss_scale(name: str) -> None:
    contract.scale_is_followed(name, contract.SETTINGS[0])


@cache
def ranks(world: int) -> list[dict[str, Any]]:
    return run_workers(world, contract_ranks.everything)


@pytest.mark.parametrize("world", [2, 4])
def test_laws_over_real_collectives(world: int) -> None:
    found = {(rank, *key): said for rank, of in enumerate(ranks(world)) for key, said in of["wrong"].items() if said}
    assert not found


def test_ranks_of_a_group_and_workers_of_one_process_have_the_same_bits() -> None:
    for (name, masked), results in ranks(2)[0]["results"].items():
        setting = contract.Setting(masked, torch.float32, 2, "flat")
        assert contract.same(contract.Team(name, setting).advance(0, 4), results), (name, masked)


def test_lengths_on_the_wire() -> None:
    """Of two ranks, each sends an all-reduced tensor once, and half of it in each of two directions otherwise."""
    for rank in ranks(2):
        for name, (sent, _) in rank["lengths"].items():
            assert sent == examples.FOUND[name][1].sent(512, 512), name
    errors = {name: error for name, (_, error) in ranks(2)[0]["lengths"].items()}
    assert errors["none"] is None and errors["bf16"] is None
    # Gaussian entries: what 1, 2, 4 and 8 bits cannot but lose, and 95 % or 5 % of the largest entries left out.
    for name, low, high in (
        ("int8", 0.004, 0.012),
        ("int6", 0.02, 0.05),
        ("int4", 0.09, 0.2),
        ("int2", 0.4, 0.9),
        ("sign", 0.59, 1.2),
        ("topk", 0.8, 0.9),
        ("randomk", 0.96, 0.985),
    ):
        assert low < errors[name] < high, (name, errors[name])
