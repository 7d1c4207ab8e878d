"""The layout matrix: gloo ranks forked anew for every cell, from a server that has paid for the imports once.

In one process gloo's threads of earlier cells would pile up: under the distributed optimizer Megatron's models are
never freed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integration.megatron_cases import Ranks, configuration, everywhere, learns, losses
from tests.workers import run_workers

# Over 20 s: three trainings a layout, and a layout needs new processes.
pytestmark = pytest.mark.slow

STEPS = 7
OVERLAP = {"overlap_grad_reduce": True, "bucket_elements": 15000}
SHARDED = {"distributed_optimizer": True}
DP2, DP4 = {"pipeline": 1, "data": 2}, {"pipeline": 1, "data": 4}
TP2 = {"tensor": 2, "pipeline": 1, "data": 2}
SP2 = {**TP2, "sequence": True}
PP2 = {"pipeline": 2, "data": 2}
VPP2 = {**PP2, "virtual_pipeline": 2}
EP2 = {**DP4, "expert": 2}
EXPERTS = {"experts": 4}
UNTIED = {"tie_embeddings": False}
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}
LAYERS = {"layers": 4}

# name: parallel, train, model, compression. A covering set of the product: every layout without and under the
# distributed optimizer, every precision, and small buckets that overlap in every kind of group.
Cell = tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]
CELLS: dict[str, Cell] = {
    "DP2": (DP2, {}, {}, {}),
    "DP2 distributed optimizer": (DP2, SHARDED, {}, {}),
    "DP4 bf16, distributed optimizer, overlap, small buckets": (DP4, {**BF16, **SHARDED, **OVERLAP}, {}, {}),
    "DP2 fp16": (DP2, FP16, {}, {}),
    "TP2 x DP2 distributed optimizer": (TP2, SHARDED, {}, {}),
    "TP2 x DP2 sequence parallel, overlap, small buckets": (SP2, OVERLAP, {}, {}),
    "PP2 x DP2 untied embeddings": (PP2, {}, UNTIED, {}),
    "PP2 x DP2 distributed optimizer, overlap, small buckets": (PP2, {**SHARDED, **OVERLAP}, {}, {}),
    "PP2 x DP2 bf16, overlap": (PP2, {**BF16, "overlap_grad_reduce": True}, {}, {}),
    "PP2 x DP2 fp16, distributed optimizer": (PP2, {**FP16, **SHARDED}, {}, {}),
    "PP2 x VPP2 x DP2 overlap": (VPP2, {"overlap_grad_reduce": True}, LAYERS, {}),
    "PP2 x VPP2 x DP2 distributed optimizer": (VPP2, SHARDED, LAYERS, {}),
    "EP2 x DP4 experts dense": (EP2, {}, EXPERTS, {"compress_experts": False}),
    "EP2 x DP4 overlap, small buckets": (EP2, OVERLAP, EXPERTS, {}),
    "EP2 x DP4 distributed optimizer": (EP2, SHARDED, EXPERTS, {}),
    "EP2 x DP2": ({**DP2, "expert": 2}, {}, EXPERTS, {}),
    "TP2": ({"tensor": 2, "pipeline": 1, "data": 1}, {}, {}, {}),
    "PP2": ({"pipeline": 2, "data": 1}, OVERLAP, {}, {}),
}


def bytes_sent(ranks: Ranks) -> int:
    return sum(rank["bytes"] for rank in ranks)


def check(name: str) -> None:
    """One layout without compression, at full rank, and at rank 4."""
    parallel, how, model, options = CELLS[name]

    def run(method: str, how: dict[str, Any] = how, full_rank: bool = False, **compression: Any) -> Ranks:
        given = {"method": method, **compression, **(options if method != "none" else {})}
        settings = configuration(method, given, parallel=parallel, train=how, model=model)
        ranks = everywhere(settings, iterations=STEPS, full_rank=full_rank)
        assert all(rank["exposed"] > 0 for rank in ranks), "the wait for gradients is measured"
        assert "fp16" in name or all(rank["skipped"] == 0 for rank in ranks)
        return ranks

    none, full, low = run("none"), run("powersgd", rank=1024, full_rank=True), run("powersgd", rank=4)
    learns(low, 3, 0.02)
    # 16-bit weights round to neighbours: a last bit of a gradient may move a weight by one step of 2**-9.
    limit = 2e-3 if "16" in name else 1e-5
    assert (losses(full) - losses(none)).abs().max() < limit * losses(none).abs().max()
    if parallel["data"] > 1:
        assert 0 < bytes_sent(low) < 0.7 * bytes_sent(none)
    else:
        assert bytes_sent(low) == bytes_sent(none) == 0
    assert torch.equal(losses(low), losses(none)) == (parallel["data"] == 1)
    if name == "DP2 distributed optimizer":  # sends half as much when dense; buffers are padded to equal parts
        plain = run("none", {}), run("powersgd", {}, rank=4)
        assert 0.5 <= bytes_sent(none) / bytes_sent(plain[0]) < 0.56
        assert torch.allclose(losses(low), losses(plain[1]), rtol=1e-4)


@pytest.mark.parametrize("name", CELLS)
def test_a_layout_trains_compressed_and_at_full_rank_as_without(name: str) -> None:
    parallel = CELLS[name][0]
    world = parallel.get("tensor", 1) * parallel["pipeline"] * parallel["data"]
    run_workers(world, check, name)
