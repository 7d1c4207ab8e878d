"""Megatron-Core GPT and BERT models from a run's settings, the same at every scale, and the experts that a rank holds.

Megatron numbers the experts of a rank from 0; here they get their number in the whole model.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from edgc.compressors import Channel
from experiments.spec.settings import RunConfig, padded_vocabulary

AUX_LOSS = 0.01  # weight of the experts' load-balancing loss, Megatron's customary value
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}
LOCAL = re.compile(r"\.local_experts\.(\d+)\.")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def dtype_of(run: RunConfig) -> torch.dtype:
    """Type of weights and activations."""
    return DTYPES[run.train.precision]


def transformer_config(run: RunConfig) -> TransformerConfig:
    """Megatron's configuration. The fused kernels are off on CPU, where they do not exist; nothing else differs."""
    on_cpu = not torch.cuda.is_available()
    model, parallel = run.model, run.parallel
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        ffn_hidden_size=model.ffn_hidden or 4 * model.hidden,
        hidden_dropout=model.dropout,
        attention_dropout=model.dropout,
        init_method_std=model.init_std,
        activation_func=ACTIVATIONS[model.activation],
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline,
        pipeline_dtype=dtype_of(run),
        params_dtype=dtype_of(run),
        bf16=run.train.precision == "bf16",
        fp16=run.train.precision == "fp16",
        sequence_parallel=parallel.sequence,
        expert_model_parallel_size=parallel.expert,
        num_moe_experts=model.experts,
        moe_router_topk=model.experts_per_token,
        moe_aux_loss_coeff=AUX_LOSS if model.experts else 0.0,
        add_bias_linear=model.experts is None,
        attention_backend=AttnBackend.local if model.architecture == "bert" else AttnBackend.auto,
        use_cpu_initialization=on_cpu,
        masked_softmax_fusion=not on_cpu,
        batch_p2p_comm=not on_cpu,
        batch_p2p_sync=not on_cpu,
    )


class SequenceParallelNorm(torch.nn.LayerNorm):
    """A layer norm whose gradients Megatron adds up over the ranks that share a sequence; its own refuses that
    where the fused one is not installed."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]


def _layers(run: RunConfig, config: TransformerConfig, vp_stage: int | None) -> Any:
    """The specification of this chunk's layers."""
    layer = get_gpt_layer_local_spec(num_experts=run.model.experts, moe_grouped_gemm=False)
    if not run.parallel.sequence:
        return layer
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = SequenceParallelNorm
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=SequenceParallelNorm)


def build_model(
    run: RunConfig,
    vocab_size: int,
    *,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: TransformerConfig | None = None,
) -> Any:
    """One stage (or chunk) of the model, on this rank's device.

    Args:
        vocab_size: of the tokenizer; the model pads it.
        pre_process, post_process: whether the stage holds the embedding and the output layer.
        vp_stage: chunk index under an interleaved schedule.
    """
    config = config or transformer_config(run)
    common: dict[str, Any] = dict(
        config=config,
        vocab_size=padded_vocabulary(vocab_size, run.parallel.tensor),
        max_sequence_length=run.model.sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=run.model.tie_embeddings,
        position_embedding_type="learned_absolute",
        vp_stage=vp_stage,
    )
    if run.model.architecture == "bert":
        common |= {"num_tokentypes": 0, "add_binary_head": False}
        model = BertModel(transformer_layer_spec=bert_layer_local_spec, **common)
    else:
        model = GPTModel(transformer_layer_spec=_layers(run, config, vp_stage), **common)
    return model if config.use_cpu_initialization else model.cuda()


# ------------------------------------------------------------------ expert parallelism


@dataclass(frozen=True)
class ExpertShare:
    """The experts of one expert-parallel rank.

    Attributes:
        rank: expert-parallel rank.
        local: experts per rank, of every layer.
        speaks_for_rest: whether this rank also describes what all ranks hold.
    """

    rank: int
    local: int
    speaks_for_rest: bool

    def in_model(self, name: str) -> str:
        """A local parameter name with the expert's number in the whole model; other names as they are."""
        return LOCAL.sub(lambda match: f".local_experts.{self.rank * self.local + int(match[1])}.", name)

    def holds(self, name: str) -> bool:
        """True for a parameter of an expert."""
        return LOCAL.search(name) is not None

    def describes(self, name: str) -> bool:
        """True for a parameter that this rank describes, for its replica."""
        return self.speaks_for_rest or self.holds(name)


def share_of(run: RunConfig) -> ExpertShare | None:
    """Experts that this rank holds; None without expert parallelism."""
    if run.parallel.expert == 1 or run.model.experts is None:
        return None
    rank, replica = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    return ExpertShare(int(rank), run.model.experts // run.parallel.expert, speaks_for_rest=int(replica) == 0)


def is_expert(parameter: Tensor) -> bool:
    """True where Megatron averages the gradient over the ranks of an expert alone."""
    return not getattr(parameter, "allreduce", True)


def draw_experts(model: torch.nn.Module, share: ExpertShare, seed: int) -> None:
    """Give every expert weights of its own.

    On CPU Megatron draws weights from the generator that all ranks have in common, so that expert 0 of each rank would
    start as the same. Each weight is drawn anew here, with the standard deviation that it has.
    """
    for name, parameter in model.named_parameters():
        if is_expert(parameter) and parameter.dim() == 2:
            # A number that tells names apart, the same in every process.
            number = int.from_bytes(share.in_model(name).encode(), "big") % 2_147_483_629
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                parameter.copy_(drawn * parameter.float().std())


class TokenCounts:
    """Counts the tokens that this rank's routers send to each expert in training; each token goes to several."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._counts: dict[str, Tensor] = {}
        for index, chunk in enumerate(chunks):
            prefix = f"chunk{index}." if len(chunks) > 1 else ""
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    module.register_forward_hook(functools.partial(self._count, prefix + name.removesuffix(".router")))

    def _count(self, layer: str, _module: object, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            self._counts[layer] = self._counts.get(layer, torch.tensor(0)) + output[1].sum(dim=0).cpu()

    def take(self) -> dict[str, Tensor]:
        """For each layer (``decoder.layers.0.mlp``) a count per expert of the model, since the last call."""
        counts, self._counts = self._counts, {}
        return counts


def place_of(name: str) -> tuple[str, int] | None:
    """Layer and number of the expert that a parameter (under its name in the model) belongs to; None for others."""
    match = LOCAL.search(name)
    return None if match is None else (name[: match.start()].removesuffix(".experts"), int(match[1]))


class ExpertTraffic:
    """Counts the bytes that this rank sends for experts; install as ``Engine.open_channel``."""

    def __init__(self) -> None:
        self._ranks = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
        self._opened: list[Channel] = []

    def __call__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> Channel:
        channel = Channel(group, shards)
        if group is not None and dist.get_process_group_ranks(group) == self._ranks:
            self._opened.append(channel)
        return channel

    def take(self) -> int:
        """Bytes since the last call."""
        total = sum(channel.bytes for channel in self._opened)
        self._opened.clear()
        return total
