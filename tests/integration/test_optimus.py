"""Optimus-CC under Megatron-Core: fused embedding synchronisation, selective stages, and all of it; one launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from edgc.megatron import cpu_shims
from edgc.runtime.channel import all_reduce_bytes
from tests.integration.megatron_cases import configuration, everywhere, learns, losses, session_of
from tests.workers import Cases, refused

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from experiments.training.build import Session

pytestmark = pytest.mark.slow
case = Cases(4, __name__)

STEPS, SHORT = 7, 4
OVERLAP = {"overlap_grad_reduce": True, "bucket_elements": 15000}
TP2 = {"tensor": 2, "pipeline": 2, "data": 1}
POISONED = frozenset({1, 2})
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "": {},
    "overlap": {"train": OVERLAP},
    "interleaved": {
        "model": {"layers": 4},
        "parallel": {"virtual_pipeline": 2},
        "train": {"overlap_grad_reduce": True},
    },
    "tensor": {"parallel": TP2},
    "untied": {"model": {"tie_embeddings": False}},
}


def recorded(session: Session) -> Callable[[], dict[str, Any]]:
    """Bytes per iteration of this rank, and those of the gradients that are its alone or its tied weight's."""
    sent: list[int] = []
    engine = session.attachment.engine
    end = engine.end_iteration

    def end_iteration(*args: Any, **options: Any) -> None:
        end(*args, **options)
        assert engine.last is not None
        sent.append(engine.last.statistics.bytes)

    engine.end_iteration = end_iteration  # type: ignore[method-assign]
    parameters = [p for chunk in session.chunks for p in chunk.module.parameters()]
    tied = sum(p.main_grad.nbytes for p in parameters if getattr(p, "shared_embedding", False))
    size = sum(p.main_grad.nbytes for p in parameters)
    return lambda: {"sent": sent, "tied": tied, "size": size}


def poisoned(session: Session) -> Callable[[], dict[str, Any]]:
    """One entry of the embedding's gradient of one replica of stage 0 is not a number in some iterations."""
    finish = recorded(session)
    count = 0
    finalize = session.chunks[0].config.finalize_model_grads_func

    def finalize_model_grads(*args: Any, **options: Any) -> None:
        nonlocal count
        if count in POISONED and dist.get_rank() == 0:
            session.chunks[0].module.embedding.word_embeddings.weight.main_grad[0, 0] = torch.nan
        count += 1
        finalize(*args, **options)

    session.chunks[0].config.finalize_model_grads_func = finalize_model_grads
    return finish


@case
def fused_equals_two_steps() -> None:
    """The bytes of the one reduction count."""
    for layout, sections in LAYOUTS.items():
        two_steps, fused = (
            everywhere(
                configuration("fused", {"method": "none", "fused_embedding": on}, **sections),
                iterations=STEPS,
                prepare=recorded,
            )
            for on in (False, True)
        )
        learns(fused, 3, 0.02)
        assert (losses(fused) - losses(two_steps)).abs().max() < 1e-6 * losses(two_steps).max(), layout
        replicas = 1 if layout == "tensor" else 2
        for one, other in zip(fused, two_steps, strict=True):
            assert torch.allclose(one["weights"], other["weights"], rtol=1e-5, atol=1e-5), layout
            assert (one["tied"] > 0) == (layout != "untied")
            more = all_reduce_bytes(one["tied"], 2 * replicas) - all_reduce_bytes(one["tied"], replicas)
            assert [a - b for a, b in zip(one["sent"], other["sent"], strict=True)] == [more] * STEPS, layout


@case
def skips() -> None:
    """A gradient of the embedding that is not finite skips the step, also for what is kept of pipeline traffic."""
    for compression in (
        {"preset": "optimus_cc_embedding"},
        {"preset": "optimus_cc", "rank": 4, "pipeline": {"rank": 4}},
    ):
        run = configuration("fused", compression)
        bad = everywhere(run, iterations=SHORT + 2, prepare=poisoned)[dist.get_rank()]
        without = everywhere(run, iterations=SHORT + 2, omit=POISONED, prepare=recorded)[dist.get_rank()]
        assert bad["skipped"] == len(POISONED) and without["skipped"] == 0
        assert torch.equal(bad["weights"], without["weights"]) and bad["weights"].isfinite().all()


def sent_by(compression: dict[str, Any], **sections: Any) -> list[int]:
    ranks = everywhere(configuration("stages", compression, **sections), iterations=SHORT, prepare=recorded)
    sent = ranks[dist.get_rank()]["sent"]
    assert len(sent) == SHORT
    return sent


@case
def selective_stages() -> None:
    """Later stages send what they would without compression, and the whole method trains."""
    compressed, dense = sent_by({"method": "powersgd", "rank": 4}), sent_by({"method": "none"})
    fused = sent_by({"method": "none", "fused_embedding": True})
    stage = parallel_state.get_pipeline_model_parallel_rank()
    whole = {"preset": "optimus_cc", "rank": 8, "pipeline": {"rank": 8}}
    for sections in ({}, {"train": OVERLAP}):
        sent = sent_by({"preset": "optimus_cc_stages", "rank": 4}, **sections)
        if stage == 0:
            assert sent == compressed and max(sent) < min(dense)
        else:
            assert sent == dense and min(sent) > max(compressed)
        ranks = everywhere(configuration("whole", whole, **sections), prepare=recorded)
        learns(ranks)
        own = ranks[dist.get_rank()]
        assert own["skipped"] == 0
        # Stage 0 compresses all but the embedding, stage 1 nothing.
        assert max(own["sent"]) < fused[0] if stage == 0 else own["sent"][:SHORT] == fused


@case
def refusals() -> None:
    """What cannot work is refused on every rank."""
    fused = {"preset": "optimus_cc_embedding"}
    sharded = configuration("fused", fused, train={"distributed_optimizer": True})
    refused(lambda: session_of(sharded), "use_distributed_optimizer = True", "fused_embedding")
    parallel_state.destroy_model_parallel()
    session = session_of(configuration("fused", fused))
    refused(lambda: finalize_model_grads(session.chunks), "finalize_model_grads")
    parallel_state.destroy_model_parallel()


test_optimus = case.test()
