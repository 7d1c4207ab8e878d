"""The gradients that every engine gets: a few layers of a GPT in one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Shape = tuple[int, int]
DIRECTIONS = 96  # of the part of a gradient that is not noise


def layer_shapes(layers: int, hidden: int, embeddings: Sequence[int] = ()) -> list[Shape]:
    """Matrices of ``layers`` transformer layers as torch stores them: qkv, attention output and the two of the MLP.

    ``embeddings``: rows of each embedding; they come last, as their gradients do.
    """
    layer = [(hidden, 3 * hidden), (hidden, hidden), (hidden, 4 * hidden), (4 * hidden, hidden)]
    return layer * layers + [(rows, hidden) for rows in embeddings]


def entries(shapes: Sequence[Shape]) -> int:
    return sum(rows * columns for rows, columns in shapes)


def views(buffer: Tensor, shapes: Sequence[Shape]) -> list[Tensor]:
    """Matrices one after another in a flat buffer."""
    parts = buffer.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def name(index: int) -> str:
    return f"matrix.{index}"


def make(shapes: Sequence[Shape], count: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """``count`` flat gradients that follow each other: the same directions with other weights, and fresh noise.

    A decaying spectrum (exponent 0.7) plus noise, so that a rank that is too small leaves a large error and the
    warm start of an engine has something to follow.
    """
    generator = torch.Generator().manual_seed(seed)
    buffers = [torch.empty(entries(shapes)) for _ in range(count)]
    matrices = [views(buffer, shapes) for buffer in buffers]
    for index, (rows, columns) in enumerate(shapes):
        kept = min(DIRECTIONS, rows, columns)
        decay = torch.arange(1, kept + 1, dtype=torch.float32) ** -0.7
        left = torch.randn(rows, kept, generator=generator) * decay
        right = torch.randn(kept, columns, generator=generator)
        for matrix in (of_one[index] for of_one in matrices):
            weights = 1 + 0.3 * torch.randn(1, kept, generator=generator)
            torch.randn(matrix.shape, generator=generator, out=matrix)
            matrix.mul_(0.2).addmm_(left * weights, right)
    return [buffer.to(device, dtype) for buffer in buffers]
