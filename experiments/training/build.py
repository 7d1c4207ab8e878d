"""Building of all that a rank needs before its first iteration: process groups, model, optimizer, schedule, EDGC."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
    OptimizerConfig,
    ParamKey,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.megatron import Attachment, attach
from edgc.megatron.cpu_shims import install
from edgc.megatron.pipeline_traffic import CompressedP2P
from edgc.optimizers import muon
from edgc.runtime.groups import gather_objects
from experiments.spec.settings import RunConfig
from experiments.training.model import build_model, draw_experts, dtype_of, transformer_config
from experiments.training.probes import GradientProbe, Recorder, SamplingProbe, SpectraProbe, observe_with

# Of fp16. Megatron's own default of 2**32 skips some 16 steps before the first one counts.
INITIAL_LOSS_SCALE = 2.0**16


@dataclass
class Session:
    """One rank of a training job, ready to run."""

    run: RunConfig
    chunks: list[DistributedDataParallel]
    optimizer: Any
    scheduler: OptimizerParamScheduler
    attachment: Attachment
    recorders: list[Recorder]
    device: torch.device
    pipeline: CompressedP2P | None = None

    @property
    def stage(self) -> int:
        return int(parallel_state.get_pipeline_model_parallel_rank())

    @property
    def is_last_stage(self) -> bool:
        return bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))

    def pipeline_arguments(self, micro_batches: int, *, forward_only: bool = False) -> dict[str, Any]:
        """Arguments of the next call of the forward-backward function where backward traffic is compressed."""
        if self.pipeline is None:
            return {}
        if not forward_only:
            self.pipeline.begin_iteration(micro_batches)
        return self.pipeline.schedule_arguments()


def initialise(run: RunConfig) -> torch.device:
    """Join the process groups of this job and seed every generator; returns this rank's device."""
    on_gpu = torch.cuda.is_available()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if on_gpu:
        torch.cuda.set_device(local_rank)
    else:
        torch.set_num_threads(1)
        install()
    if not dist.is_initialized():
        dist.init_process_group("nccl" if on_gpu else "gloo")
    _end_earlier_sessions()
    parallel_state.initialize_model_parallel(
        run.parallel.tensor,
        run.parallel.pipeline,
        run.parallel.virtual_pipeline,
        expert_model_parallel_size=run.parallel.expert,
        create_gloo_process_groups=dist.get_backend() == "gloo",
    )
    random.seed(run.seed)
    torch.manual_seed(run.seed)
    # On CPU the tracker's public switch keeps forks of the generator away from torch.cuda.
    tensor_parallel.model_parallel_cuda_manual_seed(run.seed, inference_rng_tracker=not on_gpu)
    return torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")


def _end_earlier_sessions() -> None:
    """End the process groups of sessions that this process has had before: the threads of gloo's would pile up."""
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        gc.collect()


def build(run: RunConfig, vocab_size: int) -> Session:
    """Build this rank's part of the job. ``torch.distributed`` environment variables must be set."""
    device = initialise(run)
    config = transformer_config(run)
    chunks = build_chunks(run, vocab_size, config)
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer, scheduler = build_optimizer(run, chunks)
    config.grad_scale_func = optimizer.scale_loss
    config.finalize_model_grads_func = finalize_model_grads
    if run.train.overlap_grad_reduce:
        config.no_sync_func = [c.no_sync for c in chunks] if run.parallel.virtual_pipeline else chunks[0].no_sync
    attachment = attach(chunks, run.edgc, iterations=run.train.iterations, optimizer=optimizer)
    recorders = _recorders(run, attachment)
    attachment.engine.observer = observe_with(recorders)
    pipeline = attachment.pipeline if run.parallel.pipeline > 1 else None
    return Session(run, chunks, optimizer, scheduler, attachment, recorders, device, pipeline)


def build_chunks(run: RunConfig, vocab_size: int, config: TransformerConfig) -> list[DistributedDataParallel]:
    """This rank's model chunks, one without an interleaved schedule, each with its gradient buffers."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=run.train.precision != "fp32",
        overlap_grad_reduce=run.train.overlap_grad_reduce,
        bucket_size=run.train.bucket_elements,
        use_distributed_optimizer=run.train.distributed_optimizer,
    )
    chunks, virtual, degree = [], run.parallel.virtual_pipeline, run.parallel.expert
    for index in range(virtual or 1):
        vp_stage = index if virtual else None
        chunk = dict(ignore_virtual=virtual is None, vp_stage=vp_stage)
        module = build_model(
            run,
            vocab_size,
            pre_process=parallel_state.is_pipeline_first_stage(**chunk),
            post_process=parallel_state.is_pipeline_last_stage(**chunk),
            vp_stage=vp_stage,
            config=config,
        )
        if degree > 1 and run.model.experts is not None and config.use_cpu_initialization:
            first = int(parallel_state.get_expert_model_parallel_rank()) * (run.model.experts // degree)
            draw_experts(module, first, run.seed)
        if run.train.precision != "fp32":
            module = Float16Module(config, module)
        chunks.append(DistributedDataParallel(config, ddp, module, disable_bucketing=index > 0))
    return chunks


def _recorders(run: RunConfig, attachment: Attachment) -> list[Recorder]:
    """Recorders on this rank for the run's probes."""
    if not run.probe.every:
        return []
    if run.parallel.expert > 1:
        raise UserError("probe.every is set, but probes know no experts", fix="leave it out, or set parallel.expert: 1")
    leaders, group = _stage_leaders()
    reports, engine = dist.get_rank() in leaders, attachment.engine
    settings = run.probe, run.edgc, engine.stage
    recorders: list[Recorder] = [GradientProbe(*settings, reports=reports, leaders=leaders, group=group)]
    if run.probe.spectra:
        replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
        recorders.append(SpectraProbe(*settings, engine.compressor, reports=reports, group=replicas))
    if run.probe.entry_rates:
        recorders.append(SamplingProbe(*settings, reports=reports))
    return recorders


def build_optimizer(run: RunConfig, chunks: Sequence[Any]) -> tuple[Any, OptimizerParamScheduler]:
    """Megatron's optimizer over ``chunks``, or over models with a ``ddp_config``, and the schedule of its rates."""
    train = run.train
    config = OptimizerConfig(
        optimizer="sgd" if train.optimizer == "sgd" else "adam",
        sgd_momentum=0.0,
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        clip_grad=train.clip_grad,
        bf16=train.precision == "bf16",
        fp16=train.precision == "fp16",
        params_dtype=dtype_of(run),
        initial_loss_scale=INITIAL_LOSS_SCALE,
        use_distributed_optimizer=train.distributed_optimizer,
    )
    if train.optimizer == "muon":
        optimizer = _muon(run, chunks, config)
    else:
        overrides = None
        if train.matrix_lr is not None:
            tables = {id(p) for chunk in chunks for p in embeddings(chunk)}
            matrices = ParamPredicate("matrices", lambda p: p.dim() == 2 and id(p) not in tables)
            rates: Any = {"max_lr": train.matrix_lr, "min_lr": train.matrix_lr * train.min_lr / train.lr}
            overrides = {**get_standard_config_overrides(config), ParamKey(predicate=matrices): rates}
        optimizer = get_megatron_optimizer(
            config,
            list(chunks),
            config_overrides=overrides,
            # It makes them only where the ranks talk through gloo, see initialise.
            use_gloo_process_groups=dist.get_backend() == "gloo",
        )
    decay = train.lr_decay_iterations or train.iterations
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=min(max(1, round(train.lr_warmup_fraction * decay)), decay - 1),
        lr_decay_steps=decay,
        lr_decay_style="cosine",
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=train.iterations,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def _muon(run: RunConfig, chunks: Sequence[Any], config: OptimizerConfig) -> ChainedOptimizer:
    """Muon for the matrices of layers and AdamW for the rest, as an optimizer of Megatron's."""
    train = run.train
    # torch's decay comes times the rate; biases and norms decay, too, as in MuLoCo's code.
    rates: dict[str, Any] = dict(lr=train.matrix_lr or train.lr, weight_decay=train.weight_decay)
    others: dict[str, Any] = dict(
        others_lr=train.lr, others_betas=(train.adam_beta1, train.adam_beta2), others_decay=train.weight_decay
    )
    optimizer = muon(torch.nn.ModuleList(chunks), **rates, **others)
    for group in optimizer.param_groups:
        group |= {
            "max_lr": group["lr"],
            "min_lr": group["lr"] * train.min_lr / train.lr,
            "wd_mult": group["weight_decay"] / train.weight_decay if train.weight_decay else 1.0,
            "default_config": "betas" in group,  # has the rate that is logged
            # With what Megatron tells groups apart when it loads them.
            "lr_mult": group["lr"] / train.lr,
            "is_decoupled_lr": "betas" not in group,
            "is_expert_parallel": False,
        }

    def init_state(optimizer: torch.optim.Optimizer, _: Any = None) -> None:
        for group in optimizer.param_groups:
            names = ("exp_avg", "exp_avg_sq") if "betas" in group else ("momentum_buffer",)
            for p in group["params"]:
                for name in names:
                    optimizer.state[p].setdefault(name, torch.zeros_like(p))

    whole = FP32Optimizer(optimizer, config, init_state)
    whole.grad_stats_parallel_group = parallel_state.get_model_parallel_group()
    whole.tp_group = parallel_state.get_tensor_model_parallel_group()
    return ChainedOptimizer([whole])


def learning_rate(optimizer: Any) -> float:
    """Learning rate of the next step: that of groups which have ``train.lr``."""
    groups = optimizer.param_groups
    return float(next((group for group in groups if group.get("default_config")), groups[0])["lr"])


def _stage_leaders() -> tuple[list[int], dist.ProcessGroup | None]:
    """Global ranks that speak for their stage, by stage, and their group: those of data- and tensor-parallel rank 0."""
    stage, shard = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    places = enumerate(gather_objects((stage, parallel_state.get_data_parallel_rank(), shard)))
    leaders = [rank for _, rank in sorted((place[0], rank) for rank, place in places if not any(place[1:]))]
    return leaders, dist.new_group(leaders) if len(leaders) > 1 else None
