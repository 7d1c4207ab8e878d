"""A small GPT in plain torch, and the text of Python's standard library in bytes: a task that is there everywhere."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from edgc.errors import UserError

VOCABULARY = 256
HELD_OUT = 0.05  # share of the text, its end, that validation takes


class Block(nn.Module):
    """A layer: causal attention and a network for every token, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norms[0](x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(seen.transpose(1, 2).flatten(2))
        return x + self.network(self.norms[1](x))


class GPT(nn.Module):
    """Predicts the next byte; the input table is the output's, too.

    Args:
        width, layers, heads, context: by default 0.4 M parameters, and 64 bytes.
    """

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        """Loss in nats a byte of ``text``, sequences x (context + 1)."""
        given, wanted = text[:, :-1].long(), text[:, 1:].long()
        x = self.layers(self.bytes(given) + self.places.weight[: given.shape[1]])
        loss: Tensor = functional.cross_entropy(functional.linear(x, self.bytes.weight).flatten(0, 1), wanted.flatten())
        return loss


def library_text(limit: int = 16 << 20) -> Tensor:
    """The first bytes of the standard library's modules, in the order of their names, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text, left_out = bytearray(), {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
    for path in sorted(root.rglob("*.py")):
        if left_out.isdisjoint(path.relative_to(root).parts):
            text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise UserError("Python's standard library has no source here", where=root, fix="give FILE.py:FUNCTION")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(text: Tensor, sequences: int, context: int, seed: int) -> Iterator[Tensor]:
    """Random pieces of a text without end, sequences x (context + 1)."""
    numbers = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - context, (sequences, 1), generator=numbers)
        yield text[starts + torch.arange(context + 1)]
