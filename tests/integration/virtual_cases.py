"""The cases of ``test_dry_run.py``: real ranks whose memory is measured, and the same ranks on the meta device.

``python -m tests.integration.virtual_cases`` prints the latter and the paper's models as JSON; a process of its own,
because the meta device stands in for CUDA in all of it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks

from experiments.spec.settings import RunConfig, padded_vocabulary
from tests.integration.megatron_cases import VOCABULARY, configuration, train

RANKS = 4
STUDIES = ("gpt2_345m", "gpt2_2p5b_v100", "gpt2_12p1b_h100")
MODEL = {"layers": 4, "hidden": 64, "heads": 4, "sequence_length": 32}
TENSOR = {"tensor": 2, "pipeline": 1, "data": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "none": ({"method": "none"}, {}),
    "bf16": ({"method": "bf16"}, {}),
    "powersgd": ({"method": "powersgd", "rank": 4}, {}),
    "halves": ({"method": "powersgd", "rank": 8, "factor_dtype": "bf16", "error_dtype": "bf16"}, {}),
    "int8_factors": ({"method": "powersgd", "rank": 8, "factor_dtype": "int8"}, {}),
    "first_stage": ({"method": "powersgd", "rank": 4, "compressed_stages": 0.5}, {}),
    "int4": ({"method": "quantize", "bits": 4}, {}),
    "tensor": ({"method": "powersgd", "rank": 4}, {"parallel": TENSOR}),
    "shards": ({"method": "powersgd", "rank": 4}, {"train": {"distributed_optimizer": True}}),
    "masters": ({"method": "none"}, {"train": {"precision": "bf16"}}),
}


def run_of(name: str) -> RunConfig:
    compression, sections = CASES[name]
    run = configuration(name, compression, **({"model": MODEL} | sections))
    return run.model_copy(update={"data": run.data.model_copy(update={"vocab_size": VOCABULARY})})


def real() -> dict[str, dict[str, int]]:
    """What this rank holds after two steps of each case, in bytes, from the tensors themselves."""
    return {name: _trained(run_of(name)) for name in CASES}


def _trained(run: RunConfig) -> dict[str, int]:
    saved = 0

    def prepare(session: Any) -> Callable[[], dict[str, Any]]:
        nonlocal saved
        saved = _saved(session, run)

        def measure() -> dict[str, Any]:
            chunk, engine = session.chunks[0], session.attachment.engine
            parameters = [p.data for p in chunk.parameters()]
            own = {p.untyped_storage().data_ptr() for p in parameters}
            groups = [g for one in session.optimizer.chained_optimizers for g in one.optimizer.param_groups]
            held = [p for group in groups for p in group["params"]]
            moments = [
                t
                for one in session.optimizer.chained_optimizers
                for state in one.optimizer.state.values()
                for t in state.values()
                if isinstance(t, torch.Tensor) and t.dim()
            ]
            state = engine.state_dict()["compressor"]
            return {
                "held": {
                    "parameters": _bytes(parameters),
                    "gradients": _bytes(b.grad_data for b in chunk.buffers),
                    "optimizer": _bytes(moments) + _bytes(p for p in held if p.untyped_storage().data_ptr() not in own),
                    "error_feedback": _sizes(state.get("errors", {})),
                    "factors": _sizes(state.get("factors", {})),
                    "saved": saved,
                }
            }

        return measure

    result = train(run, iterations=2, prepare=prepare)
    return dict(result["held"]) | {"sent": result["bytes"]}


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _sizes(named: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in named.values())


def _saved(session: Any, run: RunConfig) -> int:
    """Bytes that autograd saves in the forward pass of one micro-batch; weights aside."""
    chunk = session.chunks[0]
    weights = {p.untyped_storage().data_ptr() for p in chunk.parameters()}
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    size, length = run.train.micro_batch, run.model.sequence_length
    inner = getattr(chunk.module, "module", chunk.module)
    last = session.is_last_stage
    if session.stage > 0:
        arriving = torch.randn(length, size, run.model.hidden, dtype=chunk.module.config.pipeline_dtype)
        inner.set_input_tensor(arriving.requires_grad_())
    tokens = torch.zeros(size, length, dtype=torch.int64)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = chunk(tokens, tokens, None, labels=tokens if last else None)
    inner.set_input_tensor(None)
    # Neighbours of a tensor-parallel group have to be as far.
    dist.barrier()
    del output
    return sum(found.values())


def virtual() -> dict[str, list[dict[str, Any]]]:
    """The same ranks on the meta device."""
    from experiments.simulation.virtual_rank import VirtualRank

    found: dict[str, list[dict[str, Any]]] = {}
    for name in CASES:
        run = run_of(name)
        for rank in range(RANKS):
            place = VirtualRank(run, rank)
            step = place.step()
            found.setdefault(name, []).append(asdict(step) | {"formula": activations(run, place.coordinates[2])})
    return found


def activations(run: RunConfig, stage: int) -> float:
    """Bytes that a stage keeps for one micro-batch on one GPU in fp32 and without dropout.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198,
    equation (2), s b h (10 + 24/t + 5 a s / (h t)) of 2-byte activations with masks: here both layernorms' inputs and
    those of QKV and of the first MLP product whole; Q, K, V, the projection's input, GeLU's input and output, and the
    scores divided by t. The last stage adds the final layernorm's input, that of the output layer, and probabilities.
    """
    model, t = run.model, run.parallel.tensor
    tokens = model.sequence_length * run.train.micro_batch
    scores = model.heads * model.sequence_length / model.hidden
    held = 4 * tokens * model.hidden * (4 + (12 + scores) / t) * model.layers / run.parallel.pipeline
    last = 2 * model.hidden + padded_vocabulary(VOCABULARY, t) / t
    return held + (4 * tokens * last if stage == run.parallel.pipeline - 1 else 0)


def models() -> dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]]:
    """Names and local shapes of the parameters of every stage and tensor-parallel shard of the paper's models."""
    from experiments.simulation.placement import study_run
    from experiments.simulation.virtual_rank import VirtualRank

    found: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = {study: {} for study in STUDIES}
    for study in STUDIES:
        run = study_run(study)
        for rank in range(run.parallel.world):
            virtual = VirtualRank(run, rank)
            data, tensor, pipeline = virtual.coordinates
            if data == 0:
                with virtual.place() as (chunks, _):
                    named = chunks[0].module.named_parameters()
                    found[study][f"{pipeline} {tensor}"] = [(name, tuple(p.shape)) for name, p in named]
    return found


def hygon() -> dict[str, list[tuple[int, int]]]:
    """The second stage of two of the paper's models without compression, under preset ``hygon`` at rank 64, and the
    same with errors and factors in fp32: bytes that a GPU needs, and those of weights, gradients and moments."""
    from experiments.simulation.placement import study_run
    from experiments.simulation.virtual_rank import VirtualRank

    fp32 = {"preset": "hygon", "error_dtype": "fp32", "factor_dtype": "fp32"}
    found: dict[str, list[tuple[int, int]]] = {}
    for study in STUDIES[:2]:
        run = study_run(study).model_dump()
        for compression in ({"method": "none"}, {"preset": "hygon"}, fp32):
            each = RunConfig(**{**run, "compression": compression})
            first_of_stage = each.parallel.tensor * each.parallel.data
            step = VirtualRank(each, first_of_stage).step(64 if "preset" in compression else None)
            found.setdefault(study, []).append((step.total, step.parameters + step.gradients + step.optimizer))
    return found


if __name__ == "__main__":
    json.dump({"ranks": virtual(), "models": models(), "hygon": hygon()}, sys.stdout)
