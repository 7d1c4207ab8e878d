"""Parameters that are embeddings, whose gradients are of another kind than those of layers."""

from __future__ import annotations

from torch import nn

# Megatron's own embedding is no nn.Embedding.
_PARALLEL = "VocabParallelEmbedding"


def embeddings(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of ``module`` that look tokens or positions up, or that turn hidden states into logits.

    They are the weights of ``nn.Embedding``, ``nn.EmbeddingBag`` and Megatron's embedding, whatever is tied to them,
    what Megatron marks as embedding or output, and what ``get_output_embeddings()`` gives (Hugging Face). An output
    layer that nothing of this names counts as a layer.
    """
    result: set[nn.Parameter] = set()
    for part in module.modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) or type(part).__name__ == _PARALLEL:
            result.update(part.parameters(recurse=False))
    result.update(part for part in module.parameters() if getattr(part, "is_embedding_or_output_parameter", False))
    output = getattr(module, "get_output_embeddings", lambda: None)()
    if isinstance(output, nn.Module):
        result.update(output.parameters(recurse=False))
    return result
