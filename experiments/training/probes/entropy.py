"""What the entropy-trend study records: statistics of local gradients through training.

The probe sees the local gradient of one data-parallel replica, before clipping and before any reduction. The whole
model is described from all stages' gradients gathered on the first rank (at most ``max_entries`` entries).

Under expert parallelism a replica's experts lie on several ranks, each of which describes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.entropy.estimators import estimate, moments
from edgc.entropy.sampler import Sampler
from edgc.runtime.groups import gather_objects
from experiments.spec.settings import ProbeConfig
from experiments.training.experts import ExpertShare, TokenCounts, place_of
from experiments.training.probes.recorder import Recorder

WHOLE_MODEL = "<model>"
NEAR_ZERO = 1e-3  # of the parameter's sigma at its first probe


class GradientProbe(Recorder):
    """Collects rows for ``tensors.parquet`` on every ``every``-th iteration.

    Args:
        config, edgc, stage, experts: see :class:`Recorder`; ``edgc`` has the sampler under study.
        reports: whether this rank's replica is the one described (data-parallel rank 0, and under expert parallelism
            the ranks that hold the other experts of its tokens).
        tokens: counts what the routers send to each expert.
        leaders: the ranks whose replica is described, those of stage 0 first; this rank alone by default.
        group: of the leaders, on these.
    """

    file = "tensors.parquet"
    keys = ("iteration", "stage", "parameter")

    def __init__(
        self,
        config: ProbeConfig,
        edgc: EDGCConfig,
        stage: int,
        *,
        reports: bool,
        experts: ExpertShare | None = None,
        tokens: TokenCounts | None = None,
        leaders: Sequence[int] = (0,),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, edgc, stage, reports=reports, experts=experts)
        self.tokens, self.leaders, self.group = tokens, list(leaders), group
        self.sampler = Sampler(edgc.entropy)
        self._first_sigma: dict[str, float] = {}
        self._previous: dict[str, Tensor] = {}
        self._pieces: list[Tensor] = []

    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        if not (self.reports and self.config.due(iteration)):
            return
        matrices = [
            (name, gradient.reshape(-1).to(torch.float32, copy=True), tuple(gradient.shape))
            for name, gradient in self.described(gradients)
        ]
        correlations = _layer_correlations(matrices) if self.config.correlation else {}
        for name, flat, shape in matrices:
            row = self._describe(iteration, name, flat.view(shape))
            row["correlation_layers"] = correlations.get(name)
            if self.config.correlation:
                previous = self._previous.get(name)
                row["correlation_previous"] = None if previous is None else _pearson(flat, previous)
                self._previous[name] = flat
            self.rows.append(row)
        self._pieces += [flat for _, flat, _ in matrices]

    def _describe(self, iteration: int, name: str, gradient: Tensor) -> dict[str, Any]:
        flat = gradient.view(-1)
        shape = moments(flat)
        first = self._first_sigma.setdefault(name, shape.sigma)
        sample = self.sampler.take(gradient, iteration, name)
        row: dict[str, Any] = {
            "iteration": iteration,
            "stage": self.stage if name != WHOLE_MODEL else -1,
            "parameter": name,
            "numel": flat.numel(),
            "zero_fraction": shape.zero_fraction,
            "sigma": shape.sigma,
            "log_sigma": float(torch.tensor(shape.sigma, dtype=torch.float64).log()),
            "skewness": shape.skewness,
            "excess_kurtosis": shape.excess_kurtosis,
            "near_zero": float((flat.abs() < NEAR_ZERO * first).double().mean()),
            "gradient_norm": float(flat.double().norm()),
        }
        for estimator in self.config.estimators:
            row[f"entropy_{estimator}"] = estimate(flat, estimator)
            row[f"sampled_{estimator}"] = estimate(sample, estimator)
        return row

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Describe the whole model on the first stage leader. Collective over the leaders."""
        leaders, group = self.leaders, self.group
        counts = self.tokens.take() if self.tokens is not None else {}
        if not (self.reports and self.config.due(iteration)):
            return
        if self.tokens is not None and len(leaders) > 1:
            self._add_tokens(iteration, counts, group)
        quota = self.config.max_entries // len(leaders)
        flat = torch.cat(self._pieces)
        flat = flat[:: max(1, -(-flat.numel() // quota))].contiguous()
        self._pieces = []
        if len(leaders) > 1:
            pieces = [flat.new_empty(size) for size in gather_objects(flat.numel(), group)]
            pieces[leaders.index(dist.get_rank())] = flat
            for piece, leader in zip(pieces, leaders, strict=True):
                dist.broadcast(piece, leader, group=group)
            flat = torch.cat(pieces)
        if dist.get_rank() == leaders[0]:
            self.rows.append(self._describe(iteration, WHOLE_MODEL, flat))

    def _add_tokens(self, iteration: int, counts: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
        """Put beside each expert's gradient the number of tokens, from all leaders of the stage, that it is of."""
        gathered = gather_objects((self.stage, counts), group)
        of_stage = [found for stage, found in gathered if stage == self.stage]
        for row in self.rows:
            place = place_of(row["parameter"])
            if row["iteration"] == iteration and place is not None:
                layer, expert = place
                row["tokens"] = sum(int(found[layer][expert]) for found in of_stage)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"first_sigma": self._first_sigma, "previous": self._previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._first_sigma, self._previous = dict(state["first_sigma"]), dict(state["previous"])


def _pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of two equally long vectors; nan if one is constant."""
    a, b = a.double() - a.double().mean(), b.double() - b.double().mean()
    return float((a @ b) / (a.norm() * b.norm()))


def _layer_correlations(matrices: Sequence[tuple[str, Tensor, tuple[int, ...]]]) -> dict[str, float]:
    """For each matrix, the mean |Pearson| with the same-shaped matrices of the same role in other layers."""
    found: dict[str, list[float]] = {}
    for i, (name, flat, shape) in enumerate(matrices):
        for other, other_flat, other_shape in matrices[i + 1 :]:
            if shape == other_shape and name.rsplit(".", 3)[-3:] == other.rsplit(".", 3)[-3:]:
                value = abs(_pearson(flat, other_flat))
                found.setdefault(name, []).append(value)
                found.setdefault(other, []).append(value)
    return {name: sum(values) / len(values) for name, values in found.items()}
