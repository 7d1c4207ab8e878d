"""Muon for the matrices of a model's layers and AdamW for the rest, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from edgc.entropy.meter import embeddings
from edgc.errors import UserError


class MuonAndAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` of matrices and ``torch.optim.AdamW`` of other parameters.

    A matrix of m x n, outputs by inputs, moves by lr sqrt(m / n) times an orthonormal matrix, as in MuLoCo's code;
    torch's own scale is never below 1. Defaults for matrices are those of its config/diloco/2x_4gpu_muloco.py
    (facebookresearch/MuLoCo, 475bbf4), for the rest OpenDiLoCo's (train_diloco_torch.py, a5b7236). Of one difference
    nothing is left once a matrix is orthonormal: torch's momentum is a mean.

    Args:
        matrices: of two dimensions.
        others: of any.
        lr, momentum, nesterov, weight_decay: of matrices.
        others_lr, others_betas, others_decay: of the rest.

    Raises:
        UserError: this torch has no Muon.
    """

    def __init__(
        self,
        matrices: Iterable[Tensor],
        others: Iterable[Tensor],
        *,
        lr: float = 0.044,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.00125,
        others_lr: float = 4e-4,
        others_betas: tuple[float, float] = (0.9, 0.95),
        others_decay: float = 0.1,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError("this torch has no Muon", where="edgc.optimizers", fix="use torch 2.9 or later")
        by_scale: dict[float, list[Tensor]] = {}
        for matrix in matrices:
            by_scale.setdefault(min(1.0, (matrix.shape[0] / matrix.shape[1]) ** 0.5), []).append(matrix)
        self._parts: list[torch.optim.Optimizer] = []
        for scale, alike in by_scale.items():
            # Decay comes times the rate.
            options: dict[str, Any] = {"lr": lr * scale, "weight_decay": weight_decay / scale}
            self._parts.append(torch.optim.Muon(alike, momentum=momentum, nesterov=nesterov, **options))
        if others := list(others):
            options = {"lr": others_lr, "weight_decay": others_decay, "betas": others_betas}
            self._parts.append(torch.optim.AdamW(others, **options))
        super().__init__([group for part in self._parts for group in part.param_groups], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(self.param_groups) == len(self._parts):  # those of the constructor
            raise UserError("MuonAndAdamW takes no more parameters", where="edgc.optimizers", fix="give it all at once")
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters. Groups and state are this optimizer's own, so that schedulers and saved states see one;
        loading a state replaces them, so the two parts are shown them anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self._parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_parts": self._parts}


def muon(model: nn.Module, **options: Any) -> MuonAndAdamW:
    """:class:`MuonAndAdamW` of a model: matrices are those of its layers, not embeddings nor the output head as far as
    :func:`~edgc.entropy.meter.embeddings` knows them.

    Args:
        model: its ``nn.Linear`` are outputs by inputs; ``Conv1D`` of Hugging Face's GPT-2 is the other way round, and
            so is then its scale.
        options: of :class:`MuonAndAdamW`.
    """
    tables = embeddings(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    hidden = {id(p) for p in trained if p.dim() == 2 and p not in tables}
    return MuonAndAdamW([p for p in trained if id(p) in hidden], [p for p in trained if id(p) not in hidden], **options)
