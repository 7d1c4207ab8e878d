"""What the gloo ranks of ``unit/test_contract.py`` do: laws that need real collectives, for every variant.

Each law returns what is wrong; all ranks go through all of them, for a collective that one leaves out would hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.runtime.channel import collective
from edgc.runtime.device import masked_path
from tests import examples
from tests.contract import EXACT, IN_BF16, Setting, Traits, config_of, gradients, same, variants
from tests.workers import mean


def costs() -> dict[str, Callable[..., Fraction]]:
    """Bytes that this rank sends in a collective of all ranks, by its name: by the best algorithm, from the tensors as
    they are passed."""
    world = dist.get_world_size()
    share = Fraction(world - 1, world)
    scatter = collective("reduce_scatter_single", "reduce_scatter_tensor").__name__
    gather = collective("all_gather_single", "all_gather_into_tensor").__name__
    return {
        "all_reduce": lambda tensor, *_: 2 * share * tensor.nbytes,
        scatter: lambda output, source, *_: share * source.nbytes,
        "all_to_all_single": lambda output, source, *_: share * source.nbytes,
        gather: lambda output, source, *_: Fraction((world - 1) * source.nbytes),
        "batch_isend_irecv": lambda each: Fraction(sum(one.tensor.nbytes for one in each if one.op is dist.isend)),
    }


@contextmanager
def recorded() -> Iterator[list[Fraction]]:
    """Bytes that this rank sends in every collective, as :func:`costs` has it."""
    sent: list[Fraction] = []
    found = costs()
    originals = {name: getattr(dist, name) for name in found}

    def recording(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            sent.append(found[name](*arguments))
            return originals[name](*arguments, **options)

        return call

    for name in originals:
        setattr(dist, name, recording(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.double().reshape(-1) for tensor in tensors])


def brought(compressor: Compressor, own: Sequence[Gradient]) -> Tensor:
    """The mean over the ranks of what comes in, error feedback included."""
    errors = compressor.kept
    return mean(flat([examples.came_in(compressor, g) + errors.get(g.name, torch.zeros(())) for g in own]))


def kept(compressor: Compressor, own: Sequence[Gradient]) -> Tensor:
    return mean(flat([compressor.kept.get(g.name, torch.zeros_like(g.tensor)) for g in own]))


def counted_and_kept(name: str, setting: Setting) -> tuple[list[str], list[Tensor]]:
    """Bytes said and sent, equal replicas, and sent + kept = input while two buckets are in flight; and the results of
    the first step, which are those of workers in one process."""
    me, compressor, traits, wrong = dist.get_rank(), config_of(name).build(), Traits.of(name), []
    first: list[Tensor] = []
    for step, (rank, cut) in enumerate(((4, 0), (4, 4), (None, 0))):
        own = gradients(step, me, setting, torch.device("cpu"))
        owed = brought(compressor, own)
        buckets = [bucket for bucket in (own[cut:], own[:cut]) if bucket]
        statistics, channels = Statistics(), [Channel(None) for _ in buckets]
        with recorded() as sent:
            running = [
                compressor.exchange(bucket, channel, rank, statistics)
                for bucket, channel in zip(buckets, channels, strict=True)
            ]
            while running:
                running = [exchange for exchange in running if next(exchange, "end") != "end"]
            compressor.settle(True)
        results = flat([gradient.tensor for gradient in own])
        # Whole bytes are counted call by call, of which each may have had a part of one.
        if not 0 <= sum(sent) - statistics.bytes <= len(sent):
            wrong.append(f"step {step}: says {statistics.bytes} bytes, sends {float(sum(sent))}")
        if statistics.bytes != sum(channel.bytes for channel in channels):
            wrong.append(f"step {step}: other bytes in the statistics than in the channels")
        replicas = [torch.empty_like(results) for _ in range(dist.get_world_size())]
        dist.all_gather(replicas, results)
        if not all(torch.equal(replica, results) for replica in replicas):
            wrong.append(f"step {step}: replicas differ")
        left = kept(compressor, own)
        if rank is None or traits.keeps_all or not (traits.entrywise or traits.low_rank):
            gap = float((results + left - owed).norm() / owed.norm())
            if gap > (EXACT if traits.exact else IN_BF16):
                wrong.append(f"step {step}: sent + kept misses {gap:g} of the input")
        first = first or [gradient.tensor.clone() for gradient in own]
    return wrong, first


def scatters(name: str, setting: Setting) -> list[str]:
    """An exact mean into shards: all that is owed in this rank's part, for half the bytes, and nothing of it again."""
    me, runs, wrong = dist.get_rank(), [], []
    for shards in (True, False):
        compressor, sent = config_of(name).build(), []
        for step, rank in enumerate((4, None, 4)):
            own = gradients(step, me, setting, torch.device("cpu"))
            buffer = torch.cat([gradient.tensor.reshape(-1) for gradient in own])
            buffer = torch.nn.functional.pad(buffer, (0, -len(buffer) % 2))
            place, views = 0, []
            for gradient in own:
                size = gradient.tensor.numel()
                views.append(Gradient(gradient.name, buffer[place : place + size].view(gradient.tensor.shape)))
                place += size
            owed, channel = brought(compressor, views), Channel(None, [buffer] if shards else [])
            statistics = compressor.reduce(views, channel, rank)
            mine = channel.own_part(buffer).clone()
            if rank is None and shards:
                right = torch.nn.functional.pad(owed, (0, len(buffer) - len(owed))).chunk(2)[me]
                if not torch.allclose(mine.double(), right, atol=1e-5):
                    wrong.append("a part is not the mean of what was owed")
                if statistics.bytes != buffer.nbytes // 2:
                    wrong.append(f"{statistics.bytes} bytes for a buffer of {buffer.nbytes}")
            sent.append(mine)
        runs.append((sent, compressor.state_dict()))
    return wrong if same(*runs) else [*wrong, "goes on otherwise than after an all-reduced mean"]


def length(name: str) -> tuple[float, float | None]:
    """Bytes of a matrix of 512 x 512 at rank 8, and the share of its norm that is kept."""
    matrix = torch.randn(512, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    config = examples.config_of(name, min_compression_elements=64)
    statistics = config.build().reduce([Gradient("p", matrix)], Channel(None), 8)
    return statistics.bytes, statistics.worker_error


def everything() -> dict[str, Any]:
    world, wrong, lengths = dist.get_world_size(), {}, {}
    results: dict[tuple[str, bool], list[Tensor]] = {}
    for masked in (False, True)[: 2 if world == 2 else 1]:
        setting = Setting(masked, torch.float32, world, "flat")
        with masked_path(masked):
            for i, name in enumerate(variants()):
                found, results[name, masked] = counted_and_kept(name, setting)
                if world == 2 and i % 2 == masked:
                    found += scatters(name, setting)
                wrong[name, masked] = found
    if world == 2:
        lengths = {name: length(name) for name in examples.FOUND}
    return {"wrong": wrong, "results": results, "lengths": lengths}
