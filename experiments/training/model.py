"""Megatron-Core GPT and BERT models from a run's settings, the same at every scale."""

from __future__ import annotations

import functools
import re
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

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


def is_expert(parameter: Tensor) -> bool:
    """True where Megatron averages the gradient over the ranks of an expert alone."""
    return not getattr(parameter, "allreduce", True)


def draw_experts(model: torch.nn.Module, first: int, seed: int) -> None:
    """Give every expert weights of its own.

    On CPU Megatron draws weights from the generator that all ranks have in common, so that expert 0 of each rank would
    start as the same. Each weight is drawn anew here, with the standard deviation that it has.

    Args:
        first: number in the whole model of the first expert on this rank; Megatron numbers those of a rank from 0.
    """
    for name, parameter in model.named_parameters():
        if is_expert(parameter) and parameter.dim() == 2:
            in_model = LOCAL.sub(lambda match: f".local_experts.{first + int(match[1])}.", name)
            # A number that tells names apart, the same in every process.
            number = int.from_bytes(in_model.encode(), "big") % 2_147_483_629
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                parameter.copy_(drawn * parameter.float().std())
