"""Probes of local gradients, for the studies of them: each watches one rank and leaves a table of rows.

They see the gradients before clipping and before any reduction.

- :class:`GradientProbe`, entropy trend: statistics through training. The whole model is described from all stages'
  gradients gathered on the first rank (at most ``max_entries`` entries).
- :class:`SamplingProbe`, sampling study: the entropy of every matrix by every sampling rule, beside that of all its
  entries. All rules are applied to the same gradients of one uncompressed run, so that they differ in nothing else.
- :class:`SpectraProbe`, rank-model study: singular values, beside those that PowerSGD has anyway. A matrix is described
  twice: as the local gradient G of one replica, and as the mean of M = G + E over the replicas, which is what PowerSGD
  approximates. G and E are taken before the reduction; PowerSGD's own numbers (its singular values and the error that
  it made) after it. The mean of M is all-reduced for the study alone.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Compressor, Gradient
from edgc.compressors.base import compressible
from edgc.compressors.powersgd.algorithm import PowerSGD
from edgc.config import EDGCConfig
from edgc.control.settings import PolicyConfig
from edgc.engine import Observer
from edgc.entropy.estimators import estimate, moments
from edgc.entropy.sampler import Sampler
from edgc.runtime.channel import mark, seconds_between
from edgc.runtime.groups import gather_objects
from edgc.sections import SAMPLINGS
from experiments.spec.settings import ProbeConfig

WHOLE_MODEL = "<model>"
NEAR_ZERO = 1e-3  # of the parameter's sigma at its first probe
ESTIMATORS = ("histogram", "gaussian")
SQUARES = "square_sum"
GRADIENT = "gradient"
MEAN = "mean"  # runs from before it was measured have "compressed" in its place: M of one replica


class Recorder(ABC):
    """Watches the local gradients of one rank.

    Args:
        config: at which iterations, and what.
        edgc: settings of the run.
        stage: pipeline stage of this rank.
        reports: whether this rank describes its replica.

    Attributes:
        file: name of the table in the run folder.
        keys: columns that the table is sorted by.
        rows: what this rank has recorded.
    """

    file: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    def __init__(self, config: ProbeConfig, edgc: EDGCConfig, stage: int, *, reports: bool) -> None:
        self.config, self.edgc, self.stage, self.reports = config, edgc, stage, reports
        self.rows: list[dict[str, Any]] = []

    def matrices(self, gradients: Sequence[Gradient]) -> Iterator[tuple[str, Tensor]]:
        """Gradients that compression is meant for, by name."""
        for gradient in gradients:
            if compressible(gradient.tensor.shape, self.edgc.min_compression_elements):
                yield gradient.name, gradient.tensor.detach()

    @abstractmethod
    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        """Called with each bucket group's gradients, before they are reduced."""

    @abstractmethod
    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Called on every rank after the reductions of an iteration, before the next one."""

    def state_dict(self) -> dict[str, Any]:
        """State of this rank after a whole iteration."""
        return {"rows": self.rows}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state_dict` of the same rank."""
        self.rows = list(state["rows"])


def observe_with(recorders: Sequence[Recorder]) -> Observer | None:
    """One observer for all; None where there is nothing to record."""

    def observe(iteration: int, gradients: Sequence[Gradient]) -> None:
        for recorder in recorders:
            recorder.observe(iteration, gradients)

    return observe if recorders else None


class GradientProbe(Recorder):
    """Collects rows for ``tensors.parquet`` on every ``every``-th iteration.

    Args:
        config, edgc, stage: see :class:`Recorder`; ``edgc`` has the sampler under study.
        reports: whether this rank's replica is the one described (data-parallel rank 0).
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
        leaders: Sequence[int] = (0,),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, edgc, stage, reports=reports)
        self.leaders, self.group = list(leaders), group
        self.sampler = Sampler(edgc.entropy)
        self._first_sigma: dict[str, float] = {}
        self._previous: dict[str, Tensor] = {}
        self._pieces: list[Tensor] = []

    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        if not (self.reports and self.config.due(iteration)):
            return
        copies = [(name, tensor.to(torch.float32, copy=True)) for name, tensor in self.matrices(gradients)]
        correlations = _layer_correlations(copies) if self.config.correlation else {}
        for name, gradient in copies:
            row = self._describe(iteration, name, gradient)
            row["correlation_layers"] = correlations.get(name)
            if self.config.correlation:
                previous = self._previous.get(name)
                row["correlation_previous"] = None if previous is None else _pearson(gradient, previous)
                self._previous[name] = gradient.reshape(-1)
            self.rows.append(row)
        self._pieces += [gradient.reshape(-1) for _, gradient in copies]

    def _describe(self, iteration: int, name: str, gradient: Tensor) -> dict[str, Any]:
        flat = gradient.reshape(-1)
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
        if not (self.reports and self.config.due(iteration)):
            return
        quota = self.config.max_entries // len(leaders)
        flat = torch.cat(self._pieces)
        flat = flat[:: max(1, -(-flat.numel() // quota))].contiguous()
        self._pieces = []
        if len(leaders) > 1:
            flat = torch.cat([piece.to(flat.device) for piece in gather_objects(flat.cpu(), group)])
        if dist.get_rank() == leaders[0]:
            self.rows.append(self._describe(iteration, WHOLE_MODEL, flat))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"first_sigma": self._first_sigma, "previous": self._previous}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._first_sigma, self._previous = dict(state["first_sigma"]), dict(state["previous"])


def _pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of two equally large tensors; nan if one is constant."""
    a, b = a.reshape(-1).double(), b.reshape(-1).double()
    a, b = a - a.mean(), b - b.mean()
    return float((a @ b) / (a.norm() * b.norm()))


def _layer_correlations(matrices: Sequence[tuple[str, Tensor]]) -> dict[str, float]:
    """For each matrix, the mean |Pearson| with the same-shaped matrices of the same role in other layers."""
    values: dict[str, list[float]] = {}
    for (name, a), (other, b) in itertools.combinations(matrices, 2):
        if a.shape == b.shape and name.rsplit(".", 3)[-3:] == other.rsplit(".", 3)[-3:]:
            value = abs(_pearson(a, b))
            values.setdefault(name, []).append(value)
            values.setdefault(other, []).append(value)
    return {name: sum(row) / len(row) for name, row in values.items()}


class SamplingProbe(Recorder):
    """Collects rows for ``sampling.parquet`` at the iterations at which gradients are probed.

    A row is of one iteration, stage, parameter, ``rule`` (of ``edgc.config.SAMPLINGS``, or ``all`` entries), entry
    ``rate`` and ``estimator``: ``rows``, ``columns``, ``entropy`` (nats), ``seconds`` that reading and estimating
    took, and of all entries ``log_sigma`` and ``excess_kurtosis``. Estimator ``square_sum`` is log of the root mean
    square of all entries plus the constant of a normal distribution: one pass, no sample.

    Of the run's settings the seed of the sampler is taken.
    """

    file = "sampling.parquet"
    keys = ("iteration", "stage", "parameter", "rule", "rate", "estimator")

    def __init__(self, config: ProbeConfig, edgc: EDGCConfig, stage: int, *, reports: bool) -> None:
        super().__init__(config, edgc, stage, reports=reports)
        self._samplers = {
            (rule, rate): Sampler(replace(edgc.entropy, sampling=rule, entry_rate=rate, iteration_rate=1.0))
            for rule in SAMPLINGS
            for rate in config.entry_rates
        }

    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        if not (self.reports and self.config.due(iteration)):
            return
        for name, gradient in self.matrices(gradients):
            self._measure(iteration, name, gradient)

    def _measure(self, iteration: int, name: str, gradient: Tensor) -> None:
        flat = gradient.reshape(-1)
        shape = moments(flat)
        common = {
            "iteration": iteration,
            "stage": self.stage,
            "parameter": name,
            "rows": gradient.shape[0],
            "columns": gradient.shape[1],
            "log_sigma": math.log(shape.sigma) if shape.sigma > 0 else math.nan,
            "excess_kurtosis": shape.excess_kurtosis,
        }
        measures: list[tuple[str, float, str, Callable[[], float]]] = [
            ("all", 1.0, SQUARES, partial(_of_squares, flat))
        ]
        for kind in ESTIMATORS:
            measures.append(("all", 1.0, kind, partial(estimate, flat, kind)))
            for (rule, rate), sampler in self._samplers.items():
                measures.append((rule, rate, kind, partial(_sampled, sampler, gradient, iteration, name, kind)))
        for rule, rate, kind, measure in measures:
            start = mark(flat.device)
            value = measure()
            seconds = seconds_between(start, mark(flat.device))
            self.rows.append(
                {**common, "rule": rule, "rate": rate, "estimator": kind, "entropy": value, "seconds": seconds}
            )

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Rows of a skipped iteration are dropped: a gradient in it was not finite."""
        if skipped:
            self.rows = [row for row in self.rows if row["iteration"] != iteration]


def _sampled(sampler: Sampler, gradient: Tensor, iteration: int, name: str, kind: str) -> float:
    return estimate(sampler.take(gradient, iteration, name), kind)


def _of_squares(flat: Tensor) -> float:
    """The entropy of a normal distribution with the mean square of ``flat`` as its variance."""
    mean = float(flat.dot(flat)) / max(1, flat.numel())
    return 0.5 * math.log(2 * math.pi * math.e * mean) if mean > 0 else math.nan


class SpectraProbe(Recorder):
    """Collects rows for ``spectra.parquet`` at the iterations at which gradients are probed.

    A row is of one iteration, stage, parameter and ``of``, which is ``gradient`` (G) or, where PowerSGD factored the
    matrix, ``mean`` (of M = G + E over the replicas):

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
        config, edgc, stage, reports: see :class:`Recorder`.
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
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(config, edgc, stage, reports=reports)
        self.group = group
        self.compressor = compressor if isinstance(compressor, PowerSGD) else None
        self._rows: list[dict[str, Any]] = []
        self._pending: dict[str, Tensor] = {}  # M of this replica
        self._iteration = 0

    def observe(self, iteration: int, gradients: Sequence[Gradient]) -> None:
        if not self.config.due(iteration):
            return
        self._iteration = iteration
        if self.compressor is not None:
            for name, gradient in self.matrices(gradients):
                local, error = gradient.float(), self.compressor.errors.get(name)
                self._pending[name] = local.clone() if error is None else local + error
        if self.reports:
            for name, gradient in self.matrices(gradients):
                row = self._describe(gradient.float())
                if row is not None:
                    self._rows.append(self._about(iteration, name, GRADIENT) | row | {"best_sq": None})

    def _about(self, iteration: int, name: str, matrix: str) -> dict[str, Any]:
        return {"iteration": iteration, "stage": self.stage, "parameter": name, "of": matrix}

    def _describe(self, x: Tensor) -> dict[str, Any] | None:
        norm = float(x.double().norm())
        if not (math.isfinite(norm) and norm > 0):
            return None
        shape = moments(x)
        squares = torch.linalg.svdvals(x.double()).square().cpu()
        # tail[r]: sum of all but the r largest, from below so that nothing cancels.
        tail = [*squares.flip(0).cumsum(0).flip(0).tolist(), 0.0]
        multiple = (self.edgc if isinstance(self.edgc, PolicyConfig) else PolicyConfig).rank_multiple
        ranks = list(range(multiple, len(squares) + 1, multiple))
        return {
            "rows": x.shape[0],
            "columns": x.shape[1],
            "norm": norm,
            "sigma": shape.sigma,
            "zero_fraction": shape.zero_fraction,
            "entropy": estimate(x, self.edgc.entropy.estimator),
            "ranks": ranks,
            "errors": [math.sqrt(tail[r] / tail[0]) for r in ranks],
            "rank": None,
            "powersgd_error": None,
            "singular_sq": None,
            "input_sq": None,
            "best_sq": squares.tolist(),
        }

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Take in PowerSGD's numbers; to be called after the reductions of an iteration, before the next one.

        Collective over the replicas.
        """
        rows, pending = self._rows, self._pending
        self._rows, self._pending = [], {}
        if skipped:
            return
        self.rows += rows
        if self.compressor is None or not pending:
            return
        for name in sorted(pending):
            if self.group is not None:
                dist.all_reduce(pending[name], group=self.group)
                pending[name] /= dist.get_world_size(self.group)
        if not self.reports:
            return
        for name, spectrum in self.compressor.spectra(pending).items():
            row = self._describe(pending[name])
            if row is None:
                continue
            singular_sq, input_sq = list(spectrum.singular_sq), row["norm"] ** 2
            row |= {
                "rank": len(singular_sq),
                "powersgd_error": math.sqrt(max(0.0, 1 - math.fsum(singular_sq) / input_sq)),
                "singular_sq": singular_sq,
                "input_sq": input_sq,
                "best_sq": row["best_sq"][: len(singular_sq)],
            }
            self.rows.append(self._about(self._iteration, name, MEAN) | row)
