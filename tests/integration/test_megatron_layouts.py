"""The layout matrix: gloo ranks forked anew for every cell, from a server that has paid for the imports once.

In one process gloo's threads of earlier cells would pile up: under the distributed optimizer Megatron's models are
never freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration import layout_cases
from tests.workers import run_workers

# Over 20 s: three trainings a layout, and a layout needs new processes.
pytestmark = pytest.mark.slow

WORLDS = {4: layout_cases.CELLS, 2: layout_cases.PAIRS}
Result = list[dict[str, Any]]  # per rank


@pytest.fixture(scope="module", params=sorted(WORLDS, reverse=True))
def matrix(request: pytest.FixtureRequest) -> dict[str, dict[str, Result]]:
    """Per cell and per run (none, full, low) what every rank brought back."""
    world = request.param
    cells = {cell: run_workers(world, layout_cases.run_cell, world, cell) for cell in WORLDS[world]}
    return {
        cell: {run: [rank[run] for rank in per_rank] for run in ("none", "full", "low")}
        for cell, per_rank in cells.items()
    }


def losses(result: Result) -> torch.Tensor:
    last = max(rank["stage"] for rank in result)
    return torch.tensor([r["losses"] for r in result if r["stage"] == last], dtype=torch.float64).mean(0)


def bytes_sent(result: Result) -> int:
    return sum(rank["bytes"] for rank in result)


def test_every_layout_trains_compressed(
    matrix: dict[str, dict[str, Result]], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f"{'layout':58} {'loss':>15} {'full rank':>10} {'bytes':>7}"]
    for cell, runs in matrix.items():
        none, full, low = (losses(runs[run]) for run in ("none", "full", "low"))
        sent, dense = bytes_sent(runs["low"]), bytes_sent(runs["none"])
        gap = float((full - none).abs().max() / none.abs().max())
        share = f"{sent / dense:7.1%}" if dense else "   none"
        lines.append(f"{cell:58} {low[0]:7.3f}>{low[-1]:6.3f} {gap:10.1e} {share}")
    with capsys.disabled():
        print("", *lines, sep="\n")
    for cell, runs in matrix.items():
        low = losses(runs["low"])
        assert torch.isfinite(low).all(), cell
        assert low[-3:].mean() < low[:3].mean() - 0.02, (cell, low)


def test_full_rank_is_no_compression(matrix: dict[str, dict[str, Result]]) -> None:
    for cell, runs in matrix.items():
        none, full = losses(runs["none"]), losses(runs["full"])
        # 16-bit weights round to neighbours: a last bit of a gradient may move a weight by one step of 2**-9.
        limit = 2e-3 if "16" in cell else 1e-5
        assert (full - none).abs().max() < limit * none.abs().max(), cell


def test_replicas_and_copies_are_identical(matrix: dict[str, dict[str, Result]]) -> None:
    for cell, runs in matrix.items():
        for run, result in runs.items():
            seen: dict[Any, torch.Tensor] = {}
            again = 0
            for rank in result:
                for key, weight in rank["copies"].items():
                    if key in seen:
                        assert torch.equal(seen[key], weight), (cell, run, key)
                        again += 1
                    seen.setdefault(key, weight)
            assert again, cell


def test_fewer_bytes_are_sent(matrix: dict[str, dict[str, Result]]) -> None:
    for cell, runs in matrix.items():
        dense = bytes_sent(runs["none"])
        if dense:
            assert 0 < bytes_sent(runs["low"]) < 0.7 * dense, cell
            assert not torch.equal(losses(runs["low"]), losses(runs["none"])), cell
        else:
            assert bytes_sent(runs["low"]) == 0 and torch.equal(losses(runs["low"]), losses(runs["none"])), cell


def test_a_distributed_optimizer_sends_half_as_much_when_dense(matrix: dict[str, dict[str, Result]]) -> None:
    pairs = [
        (name, name.replace(" distributed optimizer", ""))
        for name in matrix
        if name.endswith(" distributed optimizer") and name.replace(" distributed optimizer", "") in matrix
    ]
    for sharded, plain in pairs:
        ratio = bytes_sent(matrix[sharded]["none"]) / bytes_sent(matrix[plain]["none"])
        # Buffers are padded to be cut into equal parts.
        assert 0.5 <= ratio < 0.56, (sharded, ratio)
        assert torch.allclose(losses(matrix[sharded]["low"]), losses(matrix[plain]["low"]), rtol=1e-4), sharded


def test_the_wait_for_gradients_is_measured(matrix: dict[str, dict[str, Result]]) -> None:
    for cell, runs in matrix.items():
        assert all(rank["exposed"] > 0 for result in runs.values() for rank in result), cell


def test_nothing_is_skipped(matrix: dict[str, dict[str, Result]]) -> None:
    for cell, runs in matrix.items():
        if "fp16" not in cell:
            assert all(rank["skipped"] == 0 for result in runs.values() for rank in result), cell
