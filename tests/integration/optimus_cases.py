"""What the ranks of ``test_optimus.py`` do: Optimus-CC's parts, alone and together, on four ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from edgc.errors import UserError
from edgc.megatron import cpu_shims
from tests.integration.megatron_cases import configuration, session_of, train

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads

    from experiments.training.build import Session

STEPS, SHORT = 10, 4
OVERLAP = {"overlap_grad_reduce": True, "bucket_elements": 15000}
TP2 = {"tensor": 2, "pipeline": 2, "data": 1}
POISONED = frozenset({1, 2})
LAYOUTS: dict[str, dict[str, dict[str, Any]]] = {
    "": {},
    "overlap": {"train": OVERLAP},
    "interleaved": {"model": {"layers": 4}, "parallel": {"virtual_pipeline": 2}},
    "interleaved overlap": {
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


def refusal(run: Any, call: Callable[[Session], Any] = lambda session: None) -> str:
    """The one line that stops a run, if any does."""
    try:
        session = session_of(run)
        call(session)
    except UserError as error:
        return str(error)
    finally:
        parallel_state.destroy_model_parallel()
    return ""


def past_the_schedule(session: Session) -> None:
    finalize_model_grads(session.chunks)


def all_cases() -> dict[str, Any]:
    cpu_shims.install()
    results: dict[str, Any] = {}
    for layout, sections in LAYOUTS.items():
        for fused in (False, True):
            run = configuration("fused", {"method": "none", "fused_embedding": fused}, **sections)
            results[f"{layout}/{fused}"] = train(run, iterations=STEPS, prepare=recorded)
    run = configuration("fused", {"preset": "optimus_cc_embedding"})
    results["poisoned"] = train(run, iterations=SHORT + 2, prepare=poisoned)
    results["without"] = train(run, iterations=SHORT + 2, omit=POISONED, prepare=recorded)
    stages = {"preset": "optimus_cc_stages", "rank": 4}
    for name, compression, sections in (
        ("all stages", {"method": "powersgd", "rank": 4}, {}),
        ("selective", stages, {}),
        ("selective overlap", stages, {"train": OVERLAP}),
    ):
        results[name] = train(configuration("stages", compression, **sections), iterations=SHORT, prepare=recorded)
    whole = {"preset": "optimus_cc", "rank": 8, "pipeline": {"rank": 8}}
    for name, sections in (("whole", {}), ("whole overlap", {"train": OVERLAP})):
        results[name] = train(configuration("whole", whole, **sections), prepare=recorded)
    fused = {"preset": "optimus_cc_embedding"}
    results["refused"] = [
        refusal(configuration("fused", fused, train={"distributed_optimizer": True})),
        refusal(configuration("fused", fused), past_the_schedule),
    ]
    return results
