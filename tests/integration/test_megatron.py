"""EDGC under Megatron-Core: four gloo processes, DP2 x PP2 and others, one launch for all cases."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.examples import EACH, settings_of
from tests.integration.megatron_cases import EDGC, Ranks, configuration, everywhere, learns, losses, train
from tests.workers import Cases

pytestmark = pytest.mark.slow
case = Cases(4, __name__)

NONE: dict[str, Any] = {"method": "none"}
POWERSGD: dict[str, Any] = {"method": "powersgd", "rank": 4}
OVERLAP: dict[str, Any] = {"overlap_grad_reduce": True}
SMALL_BUCKETS: dict[str, Any] = {**OVERLAP, "bucket_elements": 15000}


def trained(
    compression: dict[str, Any],
    *,
    iterations: int = 9,
    full_rank: bool = False,
    attached: bool = True,
    **sections: Any,
) -> Ranks:
    run = configuration("test", compression, **sections)
    ranks = everywhere(run, iterations=iterations, full_rank=full_rank, attached=attached)
    learns(ranks)
    return ranks


@case
def reduction() -> None:
    """No compression is Megatron's own reduction, overlap and a second run change nothing, full rank is no compression,
    and compression sends less."""
    plain, none = trained(NONE, attached=False), trained(NONE)
    assert torch.equal(losses(plain), losses(none))
    low = trained(POWERSGD)
    for compression, reference in ((NONE, none), (POWERSGD, low)):
        assert torch.equal(losses(trained(compression, train=OVERLAP)), losses(reference)), compression
    assert torch.equal(losses(trained(POWERSGD)), losses(low))
    full = losses(trained({"method": "powersgd", "rank": 256}, full_rank=True))
    assert (full - losses(none)).abs().max() < 1e-5 * losses(none).max()
    assert not torch.equal(full, losses(none)), "nothing was factored: the comparison would be empty"
    assert not torch.equal(losses(low), losses(none))
    for compressed, dense in zip(low, none, strict=True):
        assert 0 < compressed["bytes"] < 0.5 * dense["bytes"]


@case
def methods() -> None:
    for name, settings in EACH.items():
        if name != "edgc":
            trained(settings)
    trained(POWERSGD, parallel={"pipeline": 1, "data": 4})
    trained(POWERSGD, model={"layers": 4}, parallel={"virtual_pipeline": 2})


def decisions(ranks: Ranks) -> list[dict[str, Any]]:
    """Those of every rank alike, although ranks measure different numbers."""
    first = ranks[0]["decisions"]
    assert first and all(repr(rank["decisions"]) == repr(first) for rank in ranks)
    assert len({repr(rank["entropies"]) for rank in ranks}) > 1, "the agreement would prove nothing"
    return first


@case
def phases() -> None:
    for parallel in ({}, {"tensor": 2, "pipeline": 1, "data": 2}):
        rows = decisions(trained(EDGC, iterations=20, parallel=parallel))
        assert rows[-1]["phase"] == "active"
        ranks = [rank for row in rows if row["phase"] == "active" for rank in row["ranks"]]
        assert ranks and all(4 <= rank <= 16 and rank % 4 == 0 for rank in ranks)


@case
def cost_gate() -> None:
    """It measures every group of every stage, again after its interval."""
    settings = {**EDGC, "policy": "spectral", "target_error": 0.7, "cost_gate": True, "gate_interval": 3}
    gates = [row["gate"] for row in decisions(trained(settings, iterations=20)) if row["gate"]]
    assert len(gates) >= 2
    for verdicts in gates:
        assert {verdict["stage"] for verdict in verdicts} == {0, 1}
        for verdict in verdicts:
            assert verdict["seconds_compressed"] > 0 and verdict["seconds_dense"] > 0
            assert verdict["compress"] == (verdict["seconds_compressed"] < verdict["seconds_dense"])


# ------------------------------------------------------------------ gradients that are not finite


def skipping(compression: dict[str, Any], steps: int, settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    optimizer = {"adam_beta1": 0.0} if "momentum" in compression else {}
    return train(configuration("skip", compression, train={**settings, **optimizer}), iterations=steps, **options)


@case
def skips() -> None:
    """A step with a gradient that is not finite never was."""
    each = {
        **{name: settings for name, settings in EACH.items() if name != "edgc"},
        "int8": {"method": "powersgd", "rank": 8, "factor_dtype": "int8", "error_dtype": "bf16"},
        "topk_dgc": settings_of("topk_dgc"),
        "one-sided": {**POWERSGD, "one_sided": True},
    }
    each.pop("powersgd", None)
    kinds = {"": {}, ", overlap": SMALL_BUCKETS, ", shards": {**SMALL_BUCKETS, "distributed_optimizer": True}}
    cases = [("powersgd" + kind, POWERSGD, settings) for kind, settings in kinds.items()]
    cases += [(name, settings, SMALL_BUCKETS if i % 2 else {}) for i, (name, settings) in enumerate(each.items())]
    bad = frozenset({0, 2, 3})
    for name, compression, settings in cases:
        poisoned = skipping(compression, 5, settings, poison=bad)
        without = skipping(compression, 5, settings, omit=bad)
        assert poisoned["skipped"] == 3 and poisoned["kept"] == [True] * 3 and without["skipped"] == 0, name
        assert poisoned["skipped_in_a_row"] == 0, name
        assert torch.equal(poisoned["weights"], without["weights"]), name
    assert skipping(POWERSGD, 22, {}, poison=frozenset(range(22)))["skipped_in_a_row"] == 22


@case
def controller_skips() -> None:
    """Windows of entropy and decisions do not see what is not finite."""
    rows = decisions(everywhere(configuration("edgc", EDGC), poison=frozenset({5, 9})))
    windows = [value for row in rows for value in row["entropy"] if not math.isnan(value)]
    assert windows and all(math.isfinite(value) for value in windows)
    assert rows[-1]["phase"] == "active"


@case
def loss_scale() -> None:
    """It begins so high that the first steps overflow, and takes error feedback along where it falls."""
    run = configuration("fp16", POWERSGD, train={"precision": "fp16"})
    ranks = everywhere(run, poison=frozenset({5, 8}))
    learns(ranks)
    for rank in ranks:
        assert rank["skipped"] >= 1 and rank["skipped_in_a_row"] == 0 and rank["scale"] < 2.0**16


test_megatron = case.test()
