"""A small GPT trained with torch's PowerSGD hook and with ours, from the same first Q."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import edgc.ddp
from edgc import EDGCConfig
from edgc.compressors.base import compressible
from edgc.compressors.powersgd import saves_bytes

VOCABULARY, WIDTH, LENGTH, RANK, SMALLEST = 64, 32, 16, 4, 256


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.blocks(self.tokens(tokens) + self.positions, mask, is_causal=True))
        return logits


def train(
    steps: int,
    hook: Callable[[DistributedDataParallel], edgc.ddp.Handle | None],
    bucket_megabytes: float = 100,
) -> tuple[list[float], int]:
    """Losses of this rank, and our number of buckets; the tokens count up by a step that a model can find out."""
    torch.manual_seed(0)
    # Buckets are not cut anew when parameters might be unused; torch's error feedback would not survive it.
    model = DistributedDataParallel(GPT(), find_unused_parameters=True, bucket_cap_mb=bucket_megabytes)
    handle = hook(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(steps):
        first = torch.randint(VOCABULARY, (8, 1), generator=generator)
        stride = torch.randint(1, 4, (8, 1), generator=generator)
        tokens = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, len(handle.state_dict()["layout"]) if handle else 0


def compressed(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {
        name: parameter
        for name, parameter in model.module.named_parameters()
        if compressible(parameter.shape, SMALLEST) and saves_bytes(parameter.shape, RANK)
    }


def first_factors(model: DistributedDataParallel) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return {
        name: torch.linalg.qr(torch.randn(p.shape[1], RANK, generator=generator)).Q
        for name, p in compressed(model).items()
    }


def torchs_hook(model: DistributedDataParallel) -> None:
    # A group of its own: DDP's all-reduce of unused parameters comes between its messages, which crashes gloo.
    state = torchs.PowerSGDState(
        dist.new_group(), RANK, start_powerSGD_iter=2, min_compression_rate=1.0, orthogonalization_epsilon=0
    )
    state.start_powerSGD_iter = 0  # refused by the constructor, because buckets may be cut anew
    factors, ours = first_factors(model), compressed(model)

    def hook(state: Any, bucket: Any) -> Any:
        names = {parameter: name for name, parameter in ours.items()}
        if state.iter == 0:
            order = [names[p] for p in bucket.parameters() if p in names]
            assert bucket.is_last() and len(order) == len(ours), "there must be one bucket"
            # Its memory holds matrices of equal shape together.
            seen = [ours[name].shape for name in order]
            order.sort(key=lambda name: seen.index(ours[name].shape))
            state.p_memory_dict[0] = torch.empty(sum(ours[name].shape[0] for name in order) * RANK)
            state.q_memory_dict[0] = torch.cat([factors[name].flatten() for name in order])
            state.error_dict.clear()
        return torchs.powerSGD_hook(state, bucket)

    hook.__annotations__.clear()  # DDP wants none or its own types, not their names
    model.register_comm_hook(state, hook)


def our_hook(model: DistributedDataParallel) -> edgc.ddp.Handle:
    config = EDGCConfig(method="powersgd", rank=RANK, min_compression_elements=SMALLEST)
    handle = edgc.ddp.register(model, config, iterations=1)
    compressor = handle.engine.compressor
    state = copy.deepcopy(compressor.state_dict())
    state["factors"] = first_factors(model)
    compressor.load_state_dict(state)
    return handle


def losses(steps: int) -> dict[str, tuple[list[float], int]]:
    return {
        "torch": train(steps, torchs_hook),
        "edgc": train(steps, our_hook),
        "edgc, many buckets": train(steps, our_hook, 0.01),
        "plain": train(steps, lambda model: None),
    }
