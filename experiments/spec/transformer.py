"""The weight matrices of a transformer layer, as Megatron's GPT and BERT have them: what is compressed, by formula."""

from __future__ import annotations

from typing import NamedTuple


class LayerMatrices(NamedTuple):
    """(rows, columns) of each matrix, of the whole layer: outputs by inputs, in the order of the forward pass."""

    qkv: tuple[int, int]
    projection: tuple[int, int]
    fc1: tuple[int, int]
    fc2: tuple[int, int]


def layer_matrices(hidden: int, ffn_hidden: int | None = None) -> LayerMatrices:
    """Of a layer of width ``hidden``; its feed-forward part is ``ffn_hidden`` wide, four times that where not given."""
    inner = ffn_hidden or 4 * hidden
    return LayerMatrices((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))
