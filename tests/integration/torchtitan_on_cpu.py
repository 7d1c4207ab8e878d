"""torchtitan on a CPU, for which it is not made: stand-ins for what it wants of GPUs, to be imported before it, and a
small run (``--module tests.integration.torchtitan_on_cpu --config small``)."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch

torch._utils._get_available_device_type = lambda: "cpu"
device = {"get_device_name": "CPU", "get_device_properties": types.SimpleNamespace(total_memory=1), "memory_stats": {}}
for name, value in (device | {"reset_peak_memory_stats": None, "empty_cache": None}).items():
    setattr(torch.cpu, name, MagicMock(return_value=value))
sys.modules["torchtitan.distributed.minimal_async_ep.kernels"] = MagicMock()  # in Triton

import torchtitan.distributed.utils  # noqa: E402
from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None  # by a barrier of GPUs


class Counting(BaseDataLoader):
    """Rows that count up, modulo 64."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self.rank, self.rows, self.length, self.step = dp_rank, local_batch_size, seq_len, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            self.step += 1
            starts = torch.arange(self.rows)[:, None] * 7 + 13 * self.step + 31 * self.rank
            ids = (starts + torch.arange(self.length + 1)) % 64
            yield {"input": ids[:, :-1]}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 64


def small() -> Any:
    """Two layers of torchtitan's smallest Llama; its attention has no backward on CPUs."""
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        dataloader=Counting.Config(),
        optimizer=default_adamw(lr=1e-3),
        training=TrainingConfig(local_batch_size=2, global_batch_size=8, seq_len=32, steps=6),
        checkpoint=CheckpointManager.Config(enable=True, interval=3, last_save_model_only=False),
        metrics=MetricsProcessor.Config(log_freq=3, enable_tensorboard=True),
        activation_checkpoint=None,
    )
