"""Activations that a GPT layer keeps for its backward pass, by formula. Source: Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, arXiv 2205.05198, section 4, there for 2-byte activations.

An independent check of what :mod:`experiments.simulation.virtual_rank` counts, and an answer where Megatron is not
installed. Per layer, with s tokens, b sequences, h hidden size, a heads, t tensor-parallel ranks and w bytes an
activation::

    kept whole      both layernorms' inputs, the inputs of QKV and of the first MLP product     4 w s b h
    dropout masks   after attention and MLP, 1 byte each                                        2 s b h
    divided by t    Q and K, V, input of the projection (4 w); GeLU's input and output (8 w)    12 w s b h / t
    scores          softmax, its dropout mask and result                                  (2 w + 1) a s s b / t

With w = 2 that is equation (2), s b h (10 + 24/t + 5 a s / (h t)). Without dropout there are no masks, and the result
of the scores' dropout is the softmax itself; with sequence parallelism everything is divided by t (equation 4).
"""

from __future__ import annotations

from experiments.spec.settings import RunConfig

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def layer_bytes(run: RunConfig, *, keeps_scores: bool = True) -> float:
    """Bytes that one layer holds for one micro-batch on one GPU.

    Args:
        keeps_scores: False for attention that recomputes them (FlashAttention); Megatron's own keeps them.
    """
    model, t = run.model, run.parallel.tensor
    width, length = BYTES[run.train.precision], model.sequence_length
    tokens, masks = length * run.train.micro_batch, int(model.dropout > 0)
    feed_forward = (model.ffn_hidden or 4 * model.hidden) / model.hidden
    whole: float = 4 * width + 2 * masks
    divided = (4 + 2 * feed_forward) * width
    scores = (width * (1 + masks) + masks) * model.heads * length / model.hidden if keeps_scores else 0.0
    if run.parallel.sequence:
        whole /= t
    return tokens * model.hidden * (whole + (divided + scores) / t)


def stage_bytes(run: RunConfig, stage: int, padded_vocab: int, *, keeps_scores: bool = True) -> float:
    """Bytes that pipeline stage ``stage`` holds for one micro-batch on one GPU.

    The first stage adds the mask of the embedding's dropout; the last one the final layernorm's input, the input of the
    output layer, and fp32 probabilities of its share of the vocabulary.
    """
    model, parallel = run.model, run.parallel
    tokens, width = model.sequence_length * run.train.micro_batch, BYTES[run.train.precision]
    whole = tokens * model.hidden / (parallel.tensor if parallel.sequence else 1)
    held = model.layers / parallel.pipeline * layer_bytes(run, keeps_scores=keeps_scores)
    if stage == 0 and model.dropout > 0:
        held += whole
    if stage == parallel.pipeline - 1:
        held += 2 * width * whole + 4 * tokens * padded_vocab / parallel.tensor
    return held
