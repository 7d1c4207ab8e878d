"""A hundredth of `make soak`."""

from __future__ import annotations

import math
import re

import pytest

from tests.soak.lost import survivors
from tests.soak.program import trained

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world", [2, 4])
def test_random_steps(world: int) -> None:
    total = trained(46, world, 50, math.inf, longest=8)["total"]
    assert total["steps"] >= 50 and total["bytes"] > 0 and total["skipped"] > 0, total


@pytest.mark.parametrize(("how", "world", "subject"), [("dies", 4, "edgc cqm"), ("stands still", 2, "strategy diloco")])
def test_the_others_end_with_a_line_when_a_rank(how: str, world: int, subject: str) -> None:
    lines = survivors(46, world, subject, how)
    assert len(lines) == world - 1, lines
    for line in lines:
        assert re.match(r"edgc: .* stopped on rank \d in (step|iteration) \d+: RuntimeError: .", line), line
        assert "\n" not in line
