"""The contract of all methods on a GPU, and a state that goes from one device to the other."""

from __future__ import annotations

import pytest
import torch

from tests import contract

pytestmark = pytest.mark.gpu

# Without a GPU the masked path of the same laws is tested in `tests/unit/test_contract.py`.
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
MASKED = [param for param in contract.covering() if param.values[1].masked]


@on_a_gpu
@pytest.mark.parametrize(("name", "setting"), MASKED)
def test_all_laws_hold(name: str, setting: contract.Setting, device: torch.device) -> None:
    contract.course_holds(name, setting, device)


@on_a_gpu
@pytest.mark.parametrize("name", contract.variants())
def test_state_follows_a_loss_scale(name: str, device: torch.device) -> None:
    contract.scale_is_followed(name, contract.Setting(True, torch.float32, 2, "flat"), device)


@on_a_gpu
@pytest.mark.parametrize("name", contract.variants())
def test_a_cpus_state_goes_on_on_the_device(name: str, device: torch.device) -> None:
    """The other way is a law: every course is also ended on a CPU."""
    host, masked = (contract.Setting(on, torch.float32, 2, "flat") for on in (False, True))
    reference = contract.Team(name, host)
    for step in range(4):
        reference.advance(step, contract.RANKS[step])
    moved = [contract.Team(name, masked, device).load(reference.states, to) for to in (contract.CPU, device)]
    draws = getattr(reference.workers[0], "draws_at_random", False)
    for step in range(4, len(contract.RANKS)):
        others = contract.double(reference.advance(step, contract.RANKS[step]))
        for team in moved:
            results = contract.step_holds(team, step, contract.RANKS[step])
            if not draws:
                contract.near(name, results, others, device)
