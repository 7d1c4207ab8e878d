"""A small GPT in plain torch, for timing training steps: the shapes matter, not the text."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.common.yaml_settings import Settings


class Size(Settings):
    """Sizes of the model and of a batch; the defaults have 12.3 million parameters."""

    layers: int = 6
    hidden: int = 384
    heads: int = 6
    vocabulary: int = 4096
    sequence: int = 256
    batch: int = 4


class GPT(nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(size.hidden, size.heads, 4 * size.hidden, **options) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.hidden)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Loss of ``text``, tokens of the shape (batch, sequence + 1)."""
        x = self.tokens(text[:, :-1]) + self.positions.weight[: text.shape[1] - 1]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        scores = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def batch(size: Size, generator: torch.Generator) -> Tensor:
    """Random tokens, one more than the sequence is long."""
    shape = (size.batch, size.sequence + 1)
    return torch.randint(size.vocabulary, shape, generator=generator)
