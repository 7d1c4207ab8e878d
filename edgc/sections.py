"""Settings that are sections of others: what GDS measures, given times, and traffic between pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.checks import Settings, number, one_of, require

ESTIMATORS = ("histogram", "gaussian", "vasicek", "released")
PARAMETERS = ("layers", "all")
SAMPLINGS = ("diagonal", "strided", "random")
PIPELINE_FACTOR_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class EntropyConfig(Settings):
    """Measurement of the entropy by GDS (paper, section on the gradient data sampler).

    Attributes:
        estimator: entropy in nats; differential except ``released`` (see :mod:`edgc.entropy`).
        iteration_rate: alpha, share of the iterations that are measured. Paper: 0.1.
        entry_rate: beta, share of the entries of a gradient that are read. Paper: 0.25.
        sampling: ``diagonal`` (ours, default: the same share of every row and column, without repeats),
            ``strided`` (cheapest, but in many matrices the same columns of every row) or ``random`` (seeded).
        source: ``local`` gradient before compression and error feedback (ours, default: the estimate does not
            depend on the rank in use) or the ``reduced`` gradient after averaging.
        parameters: what a stage's entropy is of: its ``layers`` (ours, default), without embeddings and the output
            layer, or ``all`` its matrices. The paper's models hardly tell them apart (the embedding is 6 % of the first
            stage at 12.1 billion parameters), but a small model does (56 % at 1.3 million), and there its gradients
            follow another course: those of single tokens, whose entropy may rise while that of the layers falls.
            Without embeddings a small model is what the paper's is. Both are recorded.
        warmup_rate: alpha as long as nothing is compressed; None: the same. The ranks of the whole run hang on what
            the last windows of warm-up have measured, and more measurements cost little there (ours).
        seed: of the random sampling and of the phase; the same on every rank.
    """

    estimator: str = "histogram"
    iteration_rate: float = 0.1
    entry_rate: float = 0.25
    sampling: str = "diagonal"
    source: str = "local"
    parameters: str = "layers"
    warmup_rate: float | None = None
    seed: int = 0

    def _check(self) -> None:
        one_of("estimator", self.estimator, ESTIMATORS)
        number("iteration_rate (alpha)", self.iteration_rate, 0, 1, open_low=True)
        number("entry_rate (beta)", self.entry_rate, 0, 1, open_low=True)
        one_of("sampling", self.sampling, SAMPLINGS)
        one_of("source", self.source, ("local", "reduced"))
        one_of("parameters", self.parameters, PARAMETERS)
        if self.warmup_rate is not None:
            number("warmup_rate", self.warmup_rate, 0, 1, open_low=True)
        self._whole("seed", 0)


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Settings):
    """Compression of the activation gradients that pipeline stages send backwards (see
    :mod:`edgc.megatron.pipeline_traffic`).

    It is apart from ``method``, and without effect where there is one stage. Optimus-CC's compressed backpropagation
    (Song et al., ASPLOS 2023) is ``epilogue_only=True`` with ``rank=16`` in its authors' scripts (12 in their README).

    Attributes:
        rank: of each micro-batch's gradient as a matrix (tokens x hidden size); None sends it as it is.
        epilogue_only: compress only what the receiving stage uses in its cool-down, which nothing hides.
        error_feedback: off only for ablations; what one micro-batch left out goes with the next.
        factor_dtype: what the factors are sent in: ``fp32`` or ``bf16`` (ours).
    """

    rank: int | None = None
    epilogue_only: bool = False
    error_feedback: bool = True
    factor_dtype: str = "fp32"

    def _check(self) -> None:
        self._whole("rank", 1, optional=True)
        one_of("factor_dtype", self.factor_dtype, PIPELINE_FACTOR_DTYPES)
        for key, default in (("epilogue_only", False), ("error_feedback", True), ("factor_dtype", "fp32")):
            unused = self.rank is None and getattr(self, key) != default
            require(not unused, key, getattr(self, key), "leave it out, or give the rank beside it")


@dataclass(frozen=True, kw_only=True)
class TimingConfig(Settings):
    """The times that DAC works with under ``alignment: given``, all in seconds.

    Given times make a run repeat bit for bit; ``alignment: measured`` times them while training instead.

    Attributes:
        backward_seconds: t_b, backward time of one micro-batch on one stage.
        seconds_per_rank, seconds_fixed: T(r) = seconds_per_rank * r + seconds_fixed.
        seconds_uncompressed: time of the uncompressed reduction of a stage.
    """

    backward_seconds: float = 0.0
    seconds_per_rank: float = 0.0
    seconds_fixed: float = 0.0
    seconds_uncompressed: float = 0.0

    def _check(self) -> None:
        for key, value in vars(self).items():
            number(key, value, 0)
