"""What the ranks of ``test_megatron_layouts.py`` do: every layout, three times."""

from __future__ import annotations

from typing import Any

from edgc.megatron import cpu_shims
from tests.integration.megatron_cases import configuration, train

STEPS = 7
OVERLAP = {"overlap_grad_reduce": True, "bucket_elements": 15000}
SHARDED = {"distributed_optimizer": True}
DP4 = {"pipeline": 1, "data": 4}
TP2 = {"tensor": 2, "pipeline": 1, "data": 2}
SP2 = {**TP2, "sequence": True}
PP2 = {"pipeline": 2, "data": 2}
VPP2 = {**PP2, "virtual_pipeline": 2}
EP2 = {**DP4, "expert": 2}
EXPERTS = {"experts": 4}
UNTIED = {"tie_embeddings": False}
BF16, FP16 = {"precision": "bf16"}, {"precision": "fp16"}

# name: parallel, train, model, compression. A covering set of the product: every layout without and under the
# distributed optimizer, every precision, and small buckets that overlap in every kind of group.
CELLS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DP4": (DP4, {}, {}, {}),
    "DP4 distributed optimizer": (DP4, SHARDED, {}, {}),
    "DP4 bf16, distributed optimizer, overlap, small buckets": (DP4, {**BF16, **SHARDED, **OVERLAP}, {}, {}),
    "DP4 fp16": (DP4, FP16, {}, {}),
    "TP2 x DP2 distributed optimizer": (TP2, SHARDED, {}, {}),
    "TP2 x DP2 sequence parallel, overlap, small buckets": (SP2, OVERLAP, {}, {}),
    "PP2 x DP2 untied embeddings": (PP2, {}, UNTIED, {}),
    "PP2 x DP2 distributed optimizer, overlap, small buckets": (PP2, {**SHARDED, **OVERLAP}, {}, {}),
    "PP2 x DP2 bf16, overlap": (PP2, {**BF16, "overlap_grad_reduce": True}, {}, {}),
    "PP2 x DP2 fp16, distributed optimizer": (PP2, {**FP16, **SHARDED}, {}, {}),
    "PP2 x VPP2 x DP2 overlap": (VPP2, {"overlap_grad_reduce": True}, {"layers": 4}, {}),
    "PP2 x VPP2 x DP2 distributed optimizer": (VPP2, SHARDED, {"layers": 4}, {}),
    "EP2 x DP4 experts dense": (EP2, {}, EXPERTS, {"compress_experts": False}),
    "EP2 x DP4 overlap, small buckets": (EP2, OVERLAP, EXPERTS, {}),
    "EP2 x DP4 distributed optimizer": (EP2, SHARDED, EXPERTS, {}),
}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DP2 distributed optimizer, overlap, small buckets": (
        {"pipeline": 1, "data": 2},
        {**SHARDED, **OVERLAP},
        {},
        {},
    ),
    "EP2 x DP2": ({"pipeline": 1, "data": 2, "expert": 2}, {}, EXPERTS, {}),
    "TP2": ({"tensor": 2, "pipeline": 1, "data": 1}, {}, {}, {}),
    "PP2": ({"pipeline": 2, "data": 1}, OVERLAP, {}, {}),
}


def run_cell(world: int, name: str) -> dict[str, Any]:
    """One layout without compression, at full rank, and at rank 4."""
    cpu_shims.install()
    parallel, how, model, options = (CELLS if world == 4 else PAIRS)[name]

    def run(method: str, **compression: Any) -> Any:
        given = {"method": method, **compression, **(options if method != "none" else {})}
        return configuration(method, given, parallel=parallel, train=how, model=model)

    return {
        "none": train(run("none"), iterations=STEPS),
        "full": train(run("powersgd", rank=1024), iterations=STEPS, full_rank=True),
        "low": train(run("powersgd", rank=4), iterations=STEPS),
    }
