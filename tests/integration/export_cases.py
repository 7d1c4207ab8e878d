"""What the ranks of ``test_export_layouts.py`` do: train a little, save, and compute logits with the split model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from edgc.megatron import cpu_shims
from experiments.spec.settings import RunConfig
from tests.integration.megatron_cases import configuration, steps
from tests.words import VOCABULARY

with cpu_shims.without_compiler():
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from experiments.training.build import Session, build
    from experiments.training.checkpoint import save_model

LENGTH = 16
TP2_PP2: dict[str, Any] = {"tensor": 2, "pipeline": 2, "data": 1}
PP2_VPP2: dict[str, Any] = {"pipeline": 2, "data": 2, "virtual_pipeline": 2}


def runs() -> dict[str, RunConfig]:
    """The exported runs, by layout; a rate so high that every weight and bias leaves its first value."""
    train = {"lr": 0.03, "global_batch": 8, "checkpoint": True}

    def run(name: str, parallel: dict[str, Any], **model: Any) -> RunConfig:
        return configuration(name, {"method": "none"}, parallel=parallel, model=model, train=train)

    return {
        "tp2_pp2": run("tp2_pp2", TP2_PP2),
        "tp2_pp2_untied_tanh": run("tp2_pp2_untied_tanh", TP2_PP2, tie_embeddings=False, activation="gelu_tanh"),
        "pp2_vpp2": run("pp2_vpp2", PP2_VPP2, layers=4),
        "pp2_vpp2_untied": run("pp2_vpp2_untied", PP2_VPP2, layers=4, tie_embeddings=False),
    }


def batches(run: RunConfig) -> list[torch.Tensor]:
    """Token ids for every micro-batch, [micro_batch, LENGTH] each, the same on all ranks."""
    generator = torch.Generator().manual_seed(9)
    shape = (run.train.micro_batch, LENGTH)
    return [torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(run.micro_batches)]


def logits(session: Session) -> torch.Tensor | None:
    """[sequences, LENGTH, padded vocabulary] through Megatron's own schedule; None before the last stage."""
    run = session.run
    positions = torch.arange(LENGTH).repeat(run.train.micro_batch, 1)

    def forward(tokens: Any, model: Any) -> Any:
        return model(next(tokens), positions, None), lambda output, non_loss_data: output.detach().clone()

    chunks, virtual = session.chunks, run.parallel.virtual_pipeline
    for chunk in chunks:
        chunk.eval()
    tokens = batches(run)
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(tokens) for _ in chunks] if virtual else iter(tokens),
            model=list(chunks) if virtual else chunks[0],
            num_microbatches=run.micro_batches,
            seq_length=LENGTH,
            micro_batch_size=run.train.micro_batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if not found:
        return None
    mine = torch.cat(found).contiguous()
    parts = [torch.empty_like(mine) for _ in range(run.parallel.tensor)]
    dist.all_gather(parts, mine, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, dim=-1)


def train_and_save(root: str) -> dict[str, torch.Tensor | None]:
    """One checkpoint per run in ``root``; this rank's logits."""
    cpu_shims.install()
    found = {}
    for name, run in runs().items():
        session = build(run, VOCABULARY)
        steps(session, run, 0, 3)
        save_model(session.chunks, run, Path(root) / name / "checkpoint")
        found[name] = logits(session)
        session.attachment.remove()
        parallel_state.destroy_model_parallel()
    return found
