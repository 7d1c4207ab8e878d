"""Copies of tensors that replicas in one process have of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from edgc.compressors.base import clones


class Buffers:
    """Buffers of models, such as running statistics: every forward pass begins with the first replica's, as in DDP."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._buffers = [dict(model.named_buffers()) for model in models]
        self._start = clones(self._buffers[0])
        self._first: dict[str, Tensor] = {}

    @contextlib.contextmanager
    def of(self, index: int, rank: int) -> Iterator[None]:
        """The forward pass of a replica with the model ``index``; what it leaves in its buffers stays its own, and in
        the first replica's model that one's."""
        buffers = self._buffers[index]
        if rank:
            copy_into(buffers, self._start)
        yield
        if rank == 0:
            self._first = clones(buffers)
        elif index == 0:
            copy_into(buffers, self._first)


def copy_into(tensors: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Give ``tensors`` the values of the ``others``, which may be fewer."""
    for name, other in others.items():
        tensors[name].copy_(other)


def side_by_side(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies that follow each other in memory, as in DDP's buckets: where a matrix begins decides about rounding."""
    copies = {}
    for kind in {tensor.dtype: None for tensor in tensors.values()}:
        alike = {name: tensor for name, tensor in tensors.items() if tensor.dtype == kind}
        flat = torch.cat([tensor.as_strided((tensor.numel(),), (1,)) for tensor in alike.values()])
        for (name, tensor), part in zip(alike.items(), flat.split([t.numel() for t in alike.values()]), strict=True):
            copies[name] = part.as_strided(tensor.shape, tensor.stride())
    return copies
