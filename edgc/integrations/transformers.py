"""Hugging Face's Trainer: ``trainer.add_callback(CompressionCallback(trainer, EDGCConfig(...)))`` before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import Trainer, TrainerCallback

from edgc.config import EDGCConfig
from edgc.integrations.common import Handle, load, metrics, register, save


class CompressionCallback(TrainerCallback):
    """Compresses the gradients of every run of ``trainer``, logs what it did whenever the trainer logs its loss, to
    wherever it logs, and keeps a state per rank in every checkpoint.

    Attributes:
        handle: of the last run; None before the first.

    Args:
        resume_from: the checkpoint that the trainer is to resume from, where that is not in ``output_dir`` under its
            usual name. Trainers do not tell it to callbacks.
    """

    def __init__(self, trainer: Trainer, config: EDGCConfig, *, resume_from: str | Path | None = None) -> None:
        self.trainer, self.config, self.resume_from = trainer, config, resume_from
        self.handle: Handle | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wrapped, scaler = self.trainer.model_wrapped, self.trainer.accelerator.scaler
        self.handle = register(wrapped, self.config, iterations=state.max_steps, scaler=scaler)
        if state.global_step > 0:
            load(self.handle, self.resume_from or _checkpoint(args, state))

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        # An entry of its own: what is added to `logs` does not reach the callbacks that came before, nor the history.
        if "loss" in logs and self.handle is not None:
            self.trainer.log(metrics(self.handle))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is not None and not args.save_only_model:
            save(self.handle, _checkpoint(args, state))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.handle is not None:
            self.handle.remove()


def _checkpoint(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"
