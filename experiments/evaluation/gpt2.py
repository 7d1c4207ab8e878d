"""Megatron's GPT weights under Hugging Face's GPT-2 names, and the check that both compute the same.

Weights that differ:

- Megatron's fused qkv rows are grouped per head as [q, k, v]; GPT-2 wants all q, then all k, then all v.
- Megatron stores linear weights as [out, in]; GPT-2's Conv1D as [in, out].
- Megatron pads the vocabulary; the padding rows are dropped.
- `gelu` is the error-function form in both worlds; `gelu_tanh` is called `gelu_new` by transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from edgc.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import GPT2LMHeadModel

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}  # ours -> transformers
MODULES = {  # of a layer, ours -> GPT-2's
    "input_layernorm": "ln_1",
    "pre_mlp_layernorm": "ln_2",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def gpt2_weights(state: Mapping[str, torch.Tensor], heads: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Rename and reorder an unsplit Megatron GPT state to GPT-2 names, fp32.

    Args:
        state: ``GPTModel.state_dict()``: learned positions, LayerNorm; linear weights are [out, in].
        heads: attention heads; as many key-value groups.
        vocab_size: rows of the embedding to keep.

    Raises:
        UserError: a weight is missing or has no place in GPT-2 (gated layers, grouped attention, BERT).
    """
    remaining = {key: value.detach() for key, value in state.items() if not key.endswith("_extra_state")}

    def take(key: str) -> torch.Tensor:
        if key not in remaining:
            raise UserError(f"the model has no {key}: it is not a GPT-2", fix="export GPT runs only")
        return remaining.pop(key).float()

    weights = {
        "transformer.wte.weight": take("embedding.word_embeddings.weight")[:vocab_size].clone(),
        "transformer.wpe.weight": take("embedding.position_embeddings.weight"),
        "transformer.ln_f.weight": take("decoder.final_layernorm.weight"),
        "transformer.ln_f.bias": take("decoder.final_layernorm.bias"),
    }
    for layer in sorted({int(key.split(".")[2]) for key in remaining if key.startswith("decoder.layers.")}):
        for source, target in MODULES.items():
            for part in ("weight", "bias"):
                tensor = take(f"decoder.layers.{layer}.{source}.{part}")
                if target == "attn.c_attn":  # [q, k, v] of head 0, of head 1, ... -> all q, all k, all v
                    tail = tensor.shape[1:]
                    tensor = tensor.view(heads, 3, -1, *tail).transpose(0, 1).reshape(-1, *tail)
                tensor = tensor.t().contiguous() if tensor.dim() > 1 else tensor
                weights[f"transformer.h.{layer}.{target}.{part}"] = tensor
    if "output_layer.weight" in remaining:
        weights["lm_head.weight"] = take("output_layer.weight")[:vocab_size].clone()
    if remaining:
        fix = "export GPT runs with LayerNorm and GELU only"
        raise UserError(f"GPT-2 has no place for {sorted(remaining)[0]}", fix=fix)
    return weights


def to_gpt2(model: Any, *, vocab_size: int, activation: str, end_of_text: int = 0) -> GPT2LMHeadModel:
    """Hugging Face twin of an unsplit Megatron ``GPTModel``.

    Args:
        model: the Megatron model; its ``config`` gives sizes, LayerNorm epsilon and activation function.
        vocab_size: of the tokenizer, at most the (padded) rows of the embedding.
        activation: what the run's settings say, ``gelu`` or ``gelu_tanh``.
        end_of_text: token id written as bos and eos.

    Raises:
        UserError: the model computes another activation than ``activation``, or is no GPT-2.
    """
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.activations import ACT2FN

    x = torch.linspace(-6.0, 6.0, 1001, dtype=torch.float64)  # the two look alike
    if not torch.allclose(model.config.activation_func(x), ACT2FN[ACTIVATIONS[activation]](x), rtol=0.0, atol=1e-7):
        fix = "export with the settings that the run was trained with"
        raise UserError(f"model.activation = {activation!r}, but the model computes another", fix=fix)
    state = model.state_dict()
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=state["embedding.position_embeddings.weight"].shape[0],
        n_embd=model.config.hidden_size,
        n_layer=model.config.num_layers,
        n_head=model.config.num_attention_heads,
        n_inner=model.config.ffn_hidden_size,
        activation_function=ACTIVATIONS[activation],
        layer_norm_epsilon=model.config.layernorm_epsilon,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        tie_word_embeddings="output_layer.weight" not in state,
    )
    exported = GPT2LMHeadModel(config)
    weights = gpt2_weights(state, model.config.num_attention_heads, vocab_size)
    exported.load_state_dict({"lm_head.weight": weights["transformer.wte.weight"]} | weights)
    exported.eval()
    return exported


def largest_difference(model: Any, exported: GPT2LMHeadModel) -> float:
    """Largest absolute difference of the two models' logits on three random full-length token sequences."""
    import torch

    length, vocab = exported.config.n_positions, exported.config.vocab_size
    tokens = torch.randint(0, vocab, (3, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand(3, -1)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), 1)
    model.eval()
    with torch.no_grad():
        ours = model(tokens, positions, mask)[..., :vocab].float()
        theirs = exported(tokens).logits
    return float((ours - theirs).abs().max())
