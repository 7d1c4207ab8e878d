"""PowerSGD with its warm-started Q orthonormal or as it is before P = M Q."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from edgc.compressors import Gradient
from edgc.errors import UserError
from edgc.runtime.device import masked_path
from tests.lockstep import reduce_together
from tests.low_rank import power_sgd


def six_steps(masked: bool, **settings: Any) -> tuple[torch.Tensor, float]:
    """The mean of the sixth step, and how far sent + kept is from what came in, as a share of it."""
    with masked_path(masked):
        pair = [power_sgd(**settings) for _ in range(2)]
        sent, came_in = torch.zeros(64, 48, dtype=torch.float64), torch.zeros(64, 48, dtype=torch.float64)
        for step in range(6):
            draws = [torch.randn(64, 48, generator=torch.Generator().manual_seed(10 * step + w)) for w in range(2)]
            came_in += (draws[0].double() + draws[1].double()) / 2
            reduce_together(pair, [[Gradient("w", draw)] for draw in draws], 8)
            sent += draws[0].double()
        kept = sum(compressor.errors["w"].double() for compressor in pair) / 2
    return draws[0], float((sent + kept - came_in).norm() / came_in.norm())


@pytest.mark.parametrize("masked", [False, True])
def test_in_fp32_the_mean_is_the_same_and_nothing_is_lost(masked: bool) -> None:
    (plain, lost), (orthonormal, lost_too) = (six_steps(masked, orthonormal_q=q) for q in (None, True))
    assert lost < 1e-6 and lost_too < 1e-6
    assert (plain - orthonormal).norm() < 1e-4 * plain.norm()
    assert not torch.equal(plain, orthonormal)


@pytest.mark.parametrize("masked", [False, True])
def test_int8_factors_of_a_q_as_it_is_lose_nothing_either(masked: bool) -> None:
    (orthonormal, lost), (plain, lost_too) = (
        six_steps(masked, factor_dtype="int8", orthonormal_q=q) for q in (None, False)
    )
    assert lost < 1e-6 and lost_too < 1e-6
    assert not torch.equal(plain, orthonormal)


def test_one_sided_has_no_such_choice() -> None:
    with pytest.raises(UserError, match="orthonormal_q"):
        power_sgd(one_sided=True, orthonormal_q=False)
