"""Which saved state a rank goes on from, and what happens to error feedback when the number of ranks changes."""

from __future__ import annotations

import copy
import itertools
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgc.checkpoints.saved_state import merge, refuse_other_parameters, state_for
from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.errors import UserError
from tests.lockstep import reduce_together
from tests.workers import same


def state(rank: int, world: int, errors: dict[str, torch.Tensor] | None) -> dict[str, Any]:
    compressor: dict[str, Any] = {} if errors is None else {"errors": errors, "draws": 7}
    return {
        "world": world,
        "rank": rank,
        "engine": {"iteration": 5, "compressor": compressor},
        "layout": [["a"]],
    }


def states(world: int, dtype: torch.dtype = torch.float32, missing: int | None = None) -> list[dict[str, Any]]:
    saved = []
    for rank in range(world):
        generator = torch.Generator().manual_seed(rank)
        errors = {
            name: torch.randn(shape, generator=generator).to(dtype)
            for name, shape in (("a", (3, 4)), ("b", (5,)), ("empty", (0, 2)))
        }
        if rank == missing:
            del errors["b"]
        saved.append(state(rank, world, errors))
    return saved


def owed(saved: list[Any]) -> dict[str, torch.Tensor]:
    """What the average still owes: the sum of all error feedback over the number of ranks."""
    names = {name for item in saved for name in item["engine"]["compressor"]["errors"]}
    return {
        name: sum(
            (item["engine"]["compressor"]["errors"].get(name, torch.zeros(())).double() for item in saved),
            start=torch.zeros((), dtype=torch.float64),
        )
        / len(saved)
        for name in names
    }


@settings(max_examples=40, deadline=None)
@given(
    before=st.integers(1, 6),
    after=st.integers(1, 6),
    missing=st.none() | st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    order=st.randoms(use_true_random=False),
)
def test_the_average_owes_what_it_owed(before: int, after: int, missing: int | None, dtype: Any, order: Any) -> None:
    if before == after or missing == 0 == before - 1:
        return
    saved = states(before, dtype, missing)
    shuffled, pristine = list(saved), copy.deepcopy(saved)
    order.shuffle(shuffled)
    with pytest.warns(UserWarning, match=f"a state of {before} ranks goes on with {after}") as caught:
        loaded = [state_for(shuffled, world=after, rank=rank) for rank in range(after)]
    assert len(caught) == after and caught[0].filename == __file__
    assert same(saved, pristine), "nothing is changed that was given"
    wanted = owed(saved)
    for name, value in owed(loaded).items():
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(value.expand_as(wanted[name]), wanted[name], rtol=tolerance, atol=tolerance)
    for rank, item in enumerate(loaded):
        assert (item["world"], item["rank"]) == (after, rank)
        assert item["engine"]["compressor"]["draws"] == 7 and item["engine"]["iteration"] == 5
        assert all(error.dtype == dtype for error in item["engine"]["compressor"]["errors"].values())


def test_the_differences_between_ranks_are_not_carried_on() -> None:
    up, down = torch.ones(2, 2), -torch.ones(2, 2)
    merged = merge([state(0, 2, {"a": 1e6 * up + up}), state(1, 2, {"a": 1e6 * down + up})])
    torch.testing.assert_close(merged["engine"]["compressor"]["errors"]["a"], up)


def test_velocities_of_other_parameters_are_refused() -> None:
    saved = state(0, 1, {"a": torch.ones(3, 4)})
    saved["engine"]["compressor"]["velocities"] = {"a": torch.ones(3, 4), "bias": torch.ones(3)}
    refuse_other_parameters(saved, {"a": (3, 4), "bias": (3,)})
    with pytest.raises(UserError, match=r"the saved state has velocity of bias, \(3,\), which has \(4,\) here"):
        refuse_other_parameters(saved, {"a": (3, 4), "bias": (4,)})


def test_states_without_error_feedback_go_on_as_they_are() -> None:
    with pytest.warns(UserWarning, match="2 ranks goes on with 3"):
        loaded = state_for([state(rank, 2, None) for rank in range(2)], world=3, rank=2)
    assert loaded["engine"]["compressor"] == {} and loaded["rank"] == 2


def test_the_same_number_of_ranks_takes_its_own_state_without_a_word() -> None:
    saved = states(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rank, given_ in itertools.product(range(3), (saved, saved[::-1])):
            assert state_for(given_, world=3, rank=rank) is saved[rank]
        assert state_for(saved[1], world=3, rank=1) is saved[1]


@pytest.mark.parametrize(
    ("saved", "world", "message"),
    [
        (states(4)[1], 2, "is of rank 1 of 4, but there are 2 ranks now"),
        (states(2)[1], 2, "is of rank 1, but this is rank 0"),
        ([], 2, "not those of all ranks of one run: none"),
        (states(4)[:3], 2, "0 of 4, 1 of 4, 2 of 4"),
        ([states(2)[0], states(3)[1]], 2, "0 of 2, 1 of 3"),
        ({"errors": {}}, 2, "this is not a saved state of edgc"),
        ([3], 2, "this is not a saved state of edgc"),
        (
            [state(0, 2, {"a": torch.ones(2, 3)}), state(1, 2, {"a": torch.ones(3, 2)})],
            1,
            r"error feedback of a has shapes \[\(2, 3\), \(3, 2\)\]; load states that were saved together",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:edgc")
def test_states_that_do_not_fit_are_refused(saved: Any, world: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        state_for(saved, world=world, rank=0)


def test_estimates_do_not_begin_with_what_was_owed_without_them() -> None:
    plain, estimating = (
        EDGCConfig.from_dict({"method": "topk", "density": 0.5, "min_compression_elements": 1, "ef21": ef21}).build()
        for ef21 in (False, True)
    )
    reduce_together([plain], [[Gradient("a", torch.arange(16.0).view(4, 4))]], 4)
    with pytest.raises(UserError, match="without ef21"):
        estimating.load_state_dict(plain.state_dict())
