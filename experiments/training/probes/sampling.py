"""What the sampling study records: the entropy of every matrix by every sampling rule, beside that of all its entries.

All rules are applied to the same local gradients of one uncompressed run, so that they differ in nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.entropy.estimators import estimate, moments
from edgc.entropy.sampler import Sampler
from edgc.runtime.channel import mark, seconds_between
from edgc.sections import SAMPLINGS
from experiments.spec.settings import ProbeConfig
from experiments.training.probes.recorder import Recorder

ESTIMATORS = ("histogram", "gaussian")
SQUARES = "square_sum"


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
        about = {
            "iteration": iteration,
            "stage": self.stage,
            "parameter": name,
            "rows": gradient.shape[0],
            "columns": gradient.shape[1],
            "log_sigma": math.log(shape.sigma) if shape.sigma > 0 else math.nan,
            "excess_kurtosis": shape.excess_kurtosis,
        }

        def add(rule: str, rate: float, estimator: str, measure: Callable[[], float]) -> None:
            begun = mark(flat.device)
            value = measure()
            taken = seconds_between(begun, mark(flat.device))
            place = {"rule": rule, "rate": rate, "estimator": estimator}
            self.rows.append(about | place | {"entropy": value, "seconds": taken})

        add("all", 1.0, SQUARES, lambda: _of_squares(flat))
        for estimator in ESTIMATORS:
            add("all", 1.0, estimator, lambda kind=estimator: estimate(flat, kind))  # type: ignore[misc]
            for (rule, rate), sampler in self._samplers.items():
                add(
                    rule,
                    rate,
                    estimator,
                    lambda kind=estimator, taker=sampler: estimate(taker.take(gradient, iteration, name), kind),  # type: ignore[misc]
                )

    def end_iteration(self, iteration: int, skipped: bool) -> None:
        """Rows of a skipped iteration are dropped: a gradient in it was not finite."""
        if skipped:
            self.rows = [row for row in self.rows if row["iteration"] != iteration]


def _of_squares(flat: Tensor) -> float:
    """The entropy of a normal distribution with the mean square of ``flat`` as its variance."""
    mean = float(flat.dot(flat)) / max(1, flat.numel())
    return 0.5 * math.log(2 * math.pi * math.e * mean) if mean > 0 else math.nan
