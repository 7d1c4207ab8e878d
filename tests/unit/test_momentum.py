"""What strategies that make the direction themselves refuse, and one packing of bits."""

from __future__ import annotations

import pytest
import torch

from edgc.compressors.bits import pack_bits, unpack_bits
from edgc.errors import UserError
from tests.strategy_cases import adamw, rehearsal

NAMES = ["demo", "dion", "onebit_adam", "shared_mask"]


@pytest.mark.parametrize("name", NAMES)
def test_an_optimizer_with_a_momentum_is_refused_and_told_which_one_to_use(name: str) -> None:
    with pytest.raises(UserError, match=rf"strategy {name} .*AdamW(.|\n)*torch.optim.SGD"):
        rehearsal({"name": name}, make=adamw)
    with pytest.raises(UserError, match="SGD"):
        rehearsal({"name": name}, make=lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    with pytest.raises(UserError, match="format of its own"):
        rehearsal({"name": name}, {"method": "powersgd", "rank": 4})


def test_bits_come_back_from_an_eighth_of_the_bytes() -> None:
    bits = torch.rand(64, generator=torch.Generator().manual_seed(0)) < 0.5
    packed = pack_bits(bits)
    assert packed.shape == (8,) and packed.dtype == torch.uint8
    assert torch.equal(unpack_bits(packed), bits)
    assert int(pack_bits(torch.arange(8) == 3)) == 8
