"""What the rank-model study records: singular values of gradients, beside what PowerSGD knows of them for nothing.

A matrix is described twice: as the local gradient G of one replica, and as the mean of M = G + E over the replicas,
which is what PowerSGD approximates. G and E are taken before the reduction; PowerSGD's own numbers (its singular values
and the error that it made) after it. The mean of M is all-reduced for the study alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Compressor, Gradient
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.control.settings import PolicyConfig
from edgc.entropy.estimators import estimate, moments
from experiments.spec.settings import ProbeConfig
from experiments.training.probes.recorder import Recorder

if TYPE_CHECKING:
    from experiments.training.experts import ExpertShare

GRADIENT = "gradient"
MEAN = "mean"  # runs from before it was measured have "compressed" in its place: M of one replica


class SpectraProbe(Recorder):
    """Collects rows for ``spectra.parquet`` at the iterations at which gradients are probed.

    A row is of one iteration, stage, parameter and ``of``, which is ``gradient`` (G) or, where PowerSGD factored the
    matrix, ``mean`` (of M = G + E over the replicas; experts, which have other replicas, have no such row):

    * ``rows``, ``columns``; ``norm`` (Frobenius) and ``sigma`` (rms of the centred entries that are not exactly zero,
      as all entropies leave zeros out) in the gradient's unit; ``zero_fraction``; ``entropy`` of all entries with the
      run's estimator (nats);
    * ``ranks``: the multiples of ``rank_multiple`` up to the smaller side; ``errors``: the relative error
      ||X - X_r|| / ||X|| of the best approximation of each of these ranks, from singular values in float64;
    * for the mean of M alone ``rank``, the one in use; ``powersgd_error``, the relative error that PowerSGD made with
      it; ``singular_sq``, the squared singular values of its approximation, as PowerSGD has them, and ``input_sq``, the
      squared norm of the mean of M; ``best_sq``, as many of the largest squared singular values of the mean itself.

    A matrix that is zero or not finite has no row, and an iteration that was skipped has none.

    Args:
        config, edgc, stage, reports, experts: see :class:`Recorder`.
        compressor: of this rank's engine.
        group: the replicas, all of which have such a probe; None where there are no others.
    """

    file = "spectra.parquet"
    keys = ("iteration", "stage", "parameter", "of")

    def __init__(
        self,
        config: ProbeConfig,
        edgc: EDGCConfig,
        stage: int,
        compressor: Compressor,
        *,
        reports: bool,
        experts: ExpertShare | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, edgc, stage, reports=reports, experts=experts)
        self.group = group
        self.compressor = compressor if isinstance(compressor, PowerSGD) else None
        self._found: list[dict[str, Any]] = []
        self._pending: dict[str, Tensor] = {}  # M of this replica
        self._iteration = 0

    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        if not self.config.due(iteration):
            return
        self._iteration = iteration
        if self.compressor is not None:
            for name, gradient in self.matrices(gradients):
                if self.experts is None or not self.experts.holds(name):
                    local, kept = gradient.float(), self.compressor.errors.get(name)
                    self._pending[name] = local.clone() if kept is None else local + kept
        if self.reports:
            for name, gradient in self.described(gradients):
                row = self._describe(gradient.float())
                if row is not None:
                    self._found.append(self._about(iteration, name, GRADIENT) | row | {"best_sq": None})

    def _about(self, iteration: int, name: str, of: str) -> dict[str, Any]:
        return {"iteration": iteration, "stage": self.stage, "parameter": name, "of": of}

    def _mean(self, name: str, own: Tensor) -> Tensor:
        """``own``, M of this replica, averaged over the replicas."""
        if self.group is not None:
            dist.all_reduce(own, group=self.group)
            own /= dist.get_world_size(self.group)
        return own

    def _describe(self, x: Tensor) -> dict[str, Any] | None:
        norm = float(x.double().norm())
        if not (math.isfinite(norm) and norm > 0):
            return None
        of_entries = moments(x)
        squares = torch.linalg.svdvals(x.double()).square().cpu()
        # left[r]: sum of all but the r largest, from below so that nothing cancels.
        left = [*squares.flip(0).cumsum(0).flip(0).tolist(), 0.0]
        multiple = (self.edgc if isinstance(self.edgc, PolicyConfig) else PolicyConfig).rank_multiple
        ranks = list(range(multiple, len(squares) + 1, multiple))
        return {
            "rows": x.shape[0],
            "columns": x.shape[1],
            "norm": norm,
            "sigma": of_entries.sigma,
            "zero_fraction": of_entries.zero_fraction,
            "entropy": estimate(x, self.edgc.entropy.estimator),
            "ranks": ranks,
            "errors": [math.sqrt(left[r] / left[0]) for r in ranks],
            "rank": None,
            "powersgd_error": None,
            "singular_sq": None,
            "input_sq": None,
            "best_sq": squares.tolist(),
        }

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Take in what PowerSGD knows now; to be called after the reductions of an iteration, before the next one.

        Collective over the replicas.
        """
        found, pending = self._found, self._pending
        self._found, self._pending = [], {}
        if skipped:
            return
        self.rows += found
        if self.compressor is None or not pending:
            return
        means = {name: self._mean(name, pending[name]) for name in sorted(pending)}
        if not self.reports:
            return
        for name, known in self.compressor.spectra(pending).items():
            row = self._describe(means[name])
            if row is None:
                continue
            singular_sq, rank = list(known.singular_sq), len(known.singular_sq)
            input_sq = row["norm"] ** 2
            self.rows.append(
                self._about(self._iteration, self.in_model(name), MEAN)
                | row
                | {"rank": rank, "powersgd_error": math.sqrt(max(0.0, 1 - math.fsum(singular_sq) / input_sq))}
                | {"singular_sq": singular_sq, "input_sq": input_sq, "best_sq": row["best_sq"][:rank]}
            )
