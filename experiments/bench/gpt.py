"""A small GPT in plain torch, for timing training steps: the shapes matter, not the text."""

from __future__ import annotations

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


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        hidden = size.hidden
        self.heads = size.heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, length, 3, self.heads, hidden // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    """Returns the loss of predicting each token from those before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.positions = nn.Embedding(size.sequence, size.hidden)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.hidden)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        x = self.tokens(text[:, :-1]) + self.positions.weight[: text.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        scores = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())


def batch(size: Size, generator: torch.Generator) -> Tensor:
    """Random tokens, one more than the sequence is long."""
    shape = (size.batch, size.sequence + 1)
    return torch.randint(size.vocabulary, shape, generator=generator)
