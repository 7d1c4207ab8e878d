"""Expert parallelism: which of a model's experts a rank holds, and what is sent for them.

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
        return LOCAL.sub(lambda found: f".local_experts.{self.rank * self.local + int(found[1])}.", name)

    def holds(self, name: str) -> bool:
        """Whether a parameter belongs to an expert."""
        return LOCAL.search(name) is not None

    def describes(self, name: str) -> bool:
        return self.speaks_for_rest or self.holds(name)


def share_of(run: RunConfig) -> ExpertShare | None:
    """What this rank holds; None without expert parallelism."""
    degree = run.parallel.expert
    if degree == 1 or run.model.experts is None:
        return None
    return ExpertShare(
        rank=int(parallel_state.get_expert_model_parallel_rank()),
        local=run.model.experts // degree,
        speaks_for_rest=int(parallel_state.get_data_parallel_rank()) == 0,
    )


def is_expert(parameter: Tensor) -> bool:
    """Whether Megatron averages the gradient over the ranks of an expert alone."""
    return not getattr(parameter, "allreduce", True)


def draw_experts(model: torch.nn.Module, share: ExpertShare, seed: int) -> None:
    """Give every expert weights of its own.

    On CPU Megatron draws weights from the generator that all ranks have in common, so that expert 0 of each rank would
    start as the same. Each weight is drawn anew here, with the standard deviation that it has.
    """
    for name, parameter in model.named_parameters():
        if is_expert(parameter) and parameter.dim() == 2:
            whole = share.in_model(name)
            generator = torch.Generator().manual_seed(seed * 1_000_003 + _number(whole))
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            with torch.no_grad():
                parameter.copy_(drawn * parameter.float().std())


def _number(name: str) -> int:
    """A number that tells names apart, the same in every process."""
    return int.from_bytes(name.encode(), "big") % 2_147_483_629


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
    found = LOCAL.search(name)
    return None if found is None else (name[: found.start()].removesuffix(".experts"), int(found[1]))


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
