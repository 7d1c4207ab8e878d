"""A small GPT in plain torch that trains under DDP, for timing training steps: the shapes matter, not the text."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from edgc.config import EDGCConfig
from edgc.ddp import Handle, register
from edgc.runtime.channel import Mark, all_reduce_bytes, mark, seconds_between
from experiments.common.yaml_settings import Settings

ITERATIONS = 1_000_000  # of the run that our hook is told of; no warm-up ends within what is timed
Options = dict[str, Any]  # of a trainer: its hook, and what that takes


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


def has_bf16(device: torch.device) -> bool:
    """True of a GPU that computes in bf16."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported()


def autocast(bf16: bool) -> contextlib.AbstractContextManager[Any]:
    """Context of a forward pass, in bf16 on a GPU or as it is."""
    return torch.autocast("cuda", torch.bfloat16) if bf16 else contextlib.nullcontext()


class Trainer:
    """A model with one way of averaging its gradients.

    Args:
        options: ``hook`` is ``compute`` (sends nothing, and notes when buckets are complete), ``dense``, ``bf16``,
            ``torch`` (its ``powerSGD_hook`` of ``rank``) or ``edgc``, with settings of :class:`EDGCConfig`;
            ``bucket_mb`` where buckets have not DDP's own size.
        autocast: whether forward runs in bf16 where a GPU has it.

    Attributes:
        complete: of the last step of hook ``compute``: per bucket, the seconds since the step's start and its entries.
        bytes: that the last step has sent by the method's own count or the formula of the ring, if that is known.
        handle: of our hook.
    """

    def __init__(
        self,
        size: Size,
        options: Options,
        device: str = "cpu",
        *,
        autocast: bool = False,
        optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
    ) -> None:
        torch.manual_seed(0)
        settings = {"bucket_mb": None, **options}
        self.hook, self.device = settings.pop("hook"), torch.device(device)
        self.autocast = autocast and has_bf16(self.device)
        # DDP's own size is left to DDP, which makes the first bucket smaller than the others.
        cap = settings.pop("bucket_mb")
        model = GPT(size).to(self.device)
        self.model = DistributedDataParallel(model, bucket_cap_mb=cap, gradient_as_bucket_view=True)
        self.optimizer = optimizer(self.model.parameters(), lr=1e-4)  # type: ignore[call-arg]
        self.entries = sum(parameter.numel() for parameter in model.parameters())
        self.complete: list[tuple[float, int]] = []
        self.bytes: int | None = None
        self.handle: Handle | None = None
        self.state: powerSGD_hook.PowerSGDState | None = None
        if self.hook == "compute":
            # DDP reads a hook's annotations, and wants them as objects.
            self.model.register_comm_hook(self, lambda trainer, bucket: _ready(trainer, bucket))
        elif self.hook == "bf16":
            # Under its own name DDP takes the hook for NCCL alone.
            compress = default_hooks.bf16_compress_hook
            self.model.register_comm_hook(dist.group.WORLD, lambda group, bucket: compress(group, bucket))
        elif self.hook == "torch":
            options = {"matrix_approximation_rank": settings["rank"], "start_powerSGD_iter": 2}
            self.state = powerSGD_hook.PowerSGDState(None, **options)
            self.model.register_comm_hook(self.state, powerSGD_hook.powerSGD_hook)
        elif self.hook == "edgc":
            config = EDGCConfig.from_dict({"method": "powersgd", **settings})
            self.handle = register(self.model, config, iterations=ITERATIONS)

    def step(self, text: Tensor) -> list[Mark]:
        """One training step; marks of its start, of the ends of forward and backward, and of its end."""
        compressed = self.state.total_numel_after_compression if self.state else 0
        self.complete.clear()
        self.marks = [mark(self.device)]
        self.optimizer.zero_grad()
        with autocast(self.autocast):
            loss = self.model(text)
        self.marks.append(mark(self.device))
        loss.backward()
        self.marks.append(mark(self.device))
        self.optimizer.step()
        self.marks.append(mark(self.device))
        self.loss = loss.detach()
        if self.handle is not None:
            self.bytes = self.handle.last.statistics.bytes if self.handle.last is not None else None
        else:
            sent = self.state.total_numel_after_compression - compressed if self.state else self.entries
            width = {"dense": 4, "bf16": 2, "torch": 4}.get(self.hook, 0)
            self.bytes = all_reduce_bytes(width * sent, dist.get_world_size())
        return self.marks


def _ready(trainer: Trainer, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Sends nothing, and notes that a bucket is complete."""
    started, device = trainer.marks[0], trainer.device
    trainer.complete.append((seconds_between(started, mark(device)), bucket.buffer().numel()))
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
