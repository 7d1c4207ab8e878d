"""Expert parallelism: the experts that a rank holds, and the bytes that are sent for them.

Megatron numbers the experts of a rank from 0; here they get their number in the whole model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from edgc.compressors import Channel
from experiments.spec.settings import RunConfig

LOCAL = re.compile(r"\.local_experts\.(\d+)\.")


@dataclass(frozen=True)
class ExpertShare:
    """The experts of one expert-parallel rank.

    Attributes:
        rank: expert-parallel rank.
        local: experts per rank, of every layer.
        speaks_for_rest: whether this rank also describes what all ranks hold.
    """

    rank: int
    local: int
    speaks_for_rest: bool

    def in_model(self, name: str) -> str:
        """A local parameter name with the expert's number in the whole model; other names as they are."""
        return LOCAL.sub(lambda match: f".local_experts.{self.rank * self.local + int(match[1])}.", name)

    def holds(self, name: str) -> bool:
        """True for a parameter of an expert."""
        return LOCAL.search(name) is not None

    def describes(self, name: str) -> bool:
        """True for a parameter that this rank describes, for its replica."""
        return self.speaks_for_rest or self.holds(name)


def share_of(run: RunConfig) -> ExpertShare | None:
    """Experts that this rank holds; None without expert parallelism."""
    if run.parallel.expert == 1 or run.model.experts is None:
        return None
    rank, replica = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    return ExpertShare(int(rank), run.model.experts // run.parallel.expert, speaks_for_rest=int(replica) == 0)


def is_expert(parameter: Tensor) -> bool:
    """True where Megatron averages the gradient over the ranks of an expert alone."""
    return not getattr(parameter, "allreduce", True)


def draw_experts(model: torch.nn.Module, share: ExpertShare, seed: int) -> None:
    """Give every expert weights of its own.

    On CPU Megatron draws weights from the generator that all ranks have in common, so that expert 0 of each rank would
    start as the same. Each weight is drawn anew here, with the standard deviation that it has.
    """
    for name, parameter in model.named_parameters():
        if is_expert(parameter) and parameter.dim() == 2:
            # A number that tells names apart, the same in every process.
            number = int.from_bytes(share.in_model(name).encode(), "big") % 2_147_483_629
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                parameter.copy_(drawn * parameter.float().std())


class TokenCounts:
    """Counts the tokens that this rank's routers send to each expert in training; each token goes to several."""

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._counts: dict[str, Tensor] = {}
        for index, chunk in enumerate(chunks):
            prefix = f"chunk{index}." if len(chunks) > 1 else ""
            for name, module in chunk.named_modules():
                if isinstance(module, Router):
                    module.register_forward_hook(partial(self._count, prefix + name.removesuffix(".router")))

    def _count(self, layer: str, _module: object, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():
            self._counts[layer] = self._counts.get(layer, torch.tensor(0)) + output[1].sum(dim=0).cpu()

    def take(self) -> dict[str, Tensor]:
        """For each layer (``decoder.layers.0.mlp``) a count per expert of the model, since the last call."""
        counts, self._counts = self._counts, {}
        return counts


def place_of(name: str) -> tuple[str, int] | None:
    """Layer and number of the expert that a parameter (under its name in the model) belongs to; None for others."""
    match = LOCAL.search(name)
    return None if match is None else (name[: match.start()].removesuffix(".experts"), int(match[1]))


class ExpertTraffic:
    """Counts the bytes that this rank sends for experts; install as ``Engine.open_channel``."""

    def __init__(self) -> None:
        self._ranks = dist.get_process_group_ranks(parallel_state.get_expert_data_parallel_group())
        self._opened: list[Channel] = []

    def __call__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> Channel:
        channel = Channel(group, shards)
        if group is not None and dist.get_process_group_ranks(group) == self._ranks:
            self._opened.append(channel)
        return channel

    def take(self) -> int:
        """Bytes since the last call."""
        total = sum(channel.bytes for channel in self._opened)
        self._opened.clear()
        return total
