"""Settings of the library: one place for every default, each with its source, and where it differs from the paper's.

All settings are frozen, keyword-only dataclasses that validate themselves on construction and raise
:class:`edgc.errors.UserError` naming the key, the value and the fix. ``from_dict`` also refuses unknown keys.
Sources: "paper" is arXiv 2511.10333, "code" the authors' public scripts, "ours" a choice of this project.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

from edgc import presets
from edgc.checks import Settings, integer, number, one_of, require
from edgc.usable import refuse_unusable, usable

ESTIMATORS = ("histogram", "gaussian", "vasicek", "released")
SAMPLINGS = ("diagonal", "strided", "random")
METHODS = ("none", "bf16", "powersgd", "topk", "randomk", "quantize", "sign", "edgc")
POLICIES = ("cqm", "released", "loss", "fixed", "schedule", "spectral")
_SWITCHES = (
    "record_full_entropy",
    "monotone",
    "per_layer",
    "cost_gate",
    "error_feedback",
    "warm_start",
    "one_sided",
    "compress_experts",
    "fused_embedding",
)
FACTOR_BITS = {"fp32": 32.0, "bf16": 16.0, "int8": 8.25, "int4": 4.25}
"""Of an entry of a factor as it is sent, scales included."""
FACTOR_DTYPES = tuple(FACTOR_BITS)
PIPELINE_FACTOR_DTYPES = ("fp32", "bf16")


def _schedule(rows: Any) -> tuple[tuple[float, int], ...]:
    fix = "use [[share of the run, rank], ...] with shares that rise from 0 to 1 and ranks of at least 1"
    require(isinstance(rows, Sequence) and not isinstance(rows, str), "schedule", rows, fix)
    for row in rows:
        ok = isinstance(row, Sequence) and not isinstance(row, str) and len(row) == 2
        require(ok, "schedule", rows, fix)
        number("schedule", row[0], 0, 1)
    ranks = [integer("schedule", row[1], 1) for row in rows]
    shares = [float(row[0]) for row in rows]
    require(all(a < b for a, b in pairwise(shares)), "schedule", rows, fix)
    return tuple(zip(shares, ranks, strict=True))


@dataclass(frozen=True, kw_only=True)
class EntropyConfig(Settings):
    """What GDS measures (paper, section on the gradient data sampler).

    Attributes:
        estimator: entropy in nats; differential except ``released`` (see :mod:`edgc.entropy`).
        iteration_rate: alpha, share of the iterations that are measured. Paper: 0.1.
        entry_rate: beta, share of the entries of a gradient that are read. Paper: 0.25.
        sampling: ``diagonal`` (ours, default: the same share of every row and column, without repeats),
            ``strided`` (cheapest, but in many matrices the same columns of every row) or ``random`` (seeded).
        source: ``local`` gradient before compression and error feedback (ours, default: the estimate does not
            depend on the rank in use) or the ``reduced`` gradient after averaging.
        seed: of the random sampling and of the phase; the same on every rank.
    """

    estimator: str = "histogram"
    iteration_rate: float = 0.1
    entry_rate: float = 0.25
    sampling: str = "diagonal"
    source: str = "local"
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("estimator", self.estimator, ESTIMATORS)
        number("iteration_rate (alpha)", self.iteration_rate, 0, 1, open_low=True)
        number("entry_rate (beta)", self.entry_rate, 0, 1, open_low=True)
        one_of("sampling", self.sampling, SAMPLINGS)
        one_of("source", self.source, ("local", "reduced"))
        self._whole("seed", 0)


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

    def __post_init__(self) -> None:
        for key in ("backward_seconds", "seconds_per_rank", "seconds_fixed", "seconds_uncompressed"):
            number(key, getattr(self, key), 0)


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

    def __post_init__(self) -> None:
        if self.rank is not None:
            self._whole("rank", 1)
        for key in ("epilogue_only", "error_feedback"):
            require(isinstance(getattr(self, key), bool), key, getattr(self, key), "use true or false")
        one_of("factor_dtype", self.factor_dtype, PIPELINE_FACTOR_DTYPES)
        for key, default in (("epilogue_only", False), ("error_feedback", True), ("factor_dtype", "fp32")):
            unused = self.rank is None and getattr(self, key) != default
            require(not unused, key, getattr(self, key), "leave it out, or give the rank beside it")


@dataclass(frozen=True, kw_only=True)
class EDGCConfig(Settings):
    """Everything that decides how gradients are reduced.

    A setting that differs from its default and that the method cannot use is refused (:mod:`edgc.usable`).

    Defaults that are not the paper's (``EDGCConfig.from_dict({"preset": "paper"})`` is the paper to the letter):

    ===================  ========  ========  ==========================================================================
    key                  default   paper     why
    ===================  ========  ========  ==========================================================================
    method               none      edgc      nothing is compressed unless it is asked for
    alignment            off       measured  one stage needs none, and with given or no times a run repeats bit for bit
    remeasure_above      0.2       None      the paper times once and leaves a network that changes open
    entropy.sampling     diagonal  random    the same share of every row and column, at less noise and cost
    ===================  ========  ========  ==========================================================================

    What the paper gives no value for ("ours" below) is the same under both.

    Attributes:
        method: ``none``, ``bf16``, ``powersgd`` (one rank, from the first step), ``topk``, ``randomk``, ``quantize``
            (elementwise), ``sign`` or ``edgc`` (PowerSGD under the controller).
        policy: of the controller: ``cqm`` (paper), ``released`` (the authors' public code), ``loss`` (the same rule on
            the training loss, as in HYGON's code; it must be told: ``add_loss``), ``fixed``, ``schedule`` or
            ``spectral`` (ours: the rank whose predicted relative error of the mean meets ``target_error``).
        rank: of ``powersgd`` and of policy ``fixed``.
        schedule: of policy ``schedule``: (share of the run, rank) in ascending order of the share: from there on that
            rank, from the next window on (ours). Warm-up comes first, as under every policy.
        r_max: upper rank; None searches it by timing during warm-up (paper, DAC).
        r_min: lower rank; None means r_max/4 (paper: between r_max/4 and r_max/6).
        rank_multiple: ranks are multiples of this. Paper: 4.
        step_limit: s, largest change of the rank per window. Paper: 8.
        window: w, iterations per decision, and of what is judged window by window under any method. Paper: 1000.
        warmup_fraction: share of the iterations without compression, at least. Paper: 0.1.
        warmup_bits: of an entry during warm-up, 8 or 4 with error feedback, which compression then takes over; None:
            uncompressed, as in the paper (ours: an uncompressed tenth of the run is most of what EDGC sends).
        warmup_limit_fraction: share after which compression starts even if the entropy is not stable (ours).
        stability_tolerance: entropy counts as stable when two consecutive window means differ by at most this
            many nats (ours; the paper gives no number).
        search_start, search_repeats: first iteration of the r_max search, timings per rank. Code: 10 and 2.
        alignment: DAC: ``off``, ``given`` or ``measured`` times.
        remeasure_above: where times were measured (``alignment: measured``, or r_max searched), measure them again
            while training goes on when reductions took another time than predicted over a window, by more than
            this share; None: never (ours; the paper leaves congestion open).
        record_full_entropy: also measure all entries at every iteration, for studies of the sampler.
        target_error: of ``spectral``: share of its norm that the mean over workers of M = G + E may lack (ours).
        smoothing: of ``spectral``: weight of the newest window in the running mean of the error curve (ours).
        monotone: of ``spectral``: the rank may fall and never rise again (ours; a gentle decrease measured better
            than an increase at equal bytes).
        per_layer: of ``spectral``: share out the bytes of a stage's rank among its matrices so that the predicted error
            is least (ours).
        cost_gate: compress a group of gradients only where that measures faster than sending it dense (ours).
        gate_interval: iterations between two measurements of the cost gate (ours).
        error_feedback, warm_start: off only for ablations; the warm start is PowerSGD's.
        factor_dtype: what PowerSGD sends P and Q in: ``fp32``, ``bf16``, ``int8`` or ``int4`` (ours).
        one_sided: PowerSGD sends only P or only Q, in turn: one reduction a step instead of two (ours: an option
            for latency-bound links; it measured worse at equal bytes).
        error_dtype: what error feedback is kept in: ``fp32`` or ``bf16`` (half the memory, ours).
        density: of ``topk`` and ``randomk``: share of the entries that a worker sends.
        bits: of ``quantize``: 8, 4 or 2.
        rounding: of ``quantize``: ``nearest`` with error feedback, or ``stochastic`` (QSGD: unbiased, without).
        compress_experts: under Megatron's expert parallelism, whether the experts' gradients are compressed too (ours).
        min_compression_elements: 2-D tensors with fewer entries are sent dense (ours).
        compressed_stages: of methods other than ``edgc``: share of the pipeline stages, from stage 0 on, that compress
            their gradients, in whole stages rounded down but at least one; the others send theirs dense. Under 1F1B
            the first stages end last (Optimus-CC's selective stage compression; its authors' scripts: 3 of 4 stages).
        fused_embedding: under Megatron's pipeline parallelism with tied embeddings, average the embedding's gradient
            over the replicas of both end stages in one all-reduce, dense (Optimus-CC; :mod:`edgc.megatron.embedding`).
        pipeline: compression of what pipeline stages send backwards; off unless it has a rank.
        seed: of the first Q and of appended columns; the same on every rank.
    """

    method: str = "none"
    policy: str = "cqm"
    rank: int | None = None
    schedule: tuple[tuple[float, int], ...] = ()
    r_max: int | None = None
    r_min: int | None = None
    rank_multiple: int = 4
    step_limit: int = 8
    window: int = 1000
    warmup_fraction: float = 0.1
    warmup_bits: int | None = None
    warmup_limit_fraction: float = 0.5
    stability_tolerance: float = 0.1
    search_start: int = 10
    search_repeats: int = 2
    alignment: str = "off"
    remeasure_above: float | None = 0.2
    timing: TimingConfig = field(default_factory=TimingConfig)
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    record_full_entropy: bool = False
    target_error: float = 0.3
    smoothing: float = 0.5
    monotone: bool = False
    per_layer: bool = False
    cost_gate: bool = False
    gate_interval: int = 1000
    error_feedback: bool = True
    warm_start: bool = True
    factor_dtype: str = "fp32"
    one_sided: bool = False
    error_dtype: str = "fp32"
    density: float = 0.01
    bits: int = 8
    rounding: str = "nearest"
    compress_experts: bool = True
    min_compression_elements: int = 1024
    compressed_stages: float = 1.0
    fused_embedding: bool = False
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("method", self.method, METHODS)
        one_of("policy", self.policy, POLICIES)
        for key, low in (
            ("rank_multiple", 1),
            ("step_limit", 1),
            ("window", 1),
            ("search_start", 1),
            ("search_repeats", 1),
            ("min_compression_elements", 1),
            ("gate_interval", 1),
            ("seed", 0),
        ):
            self._whole(key, low)
        for key in ("rank", "r_max", "r_min"):
            if getattr(self, key) is not None:
                self._whole(key, 1)
        for key, section in (
            ("timing", TimingConfig),
            ("entropy", EntropyConfig),
            ("pipeline", PipelineConfig),
        ):
            self._section(key, section)
        object.__setattr__(self, "schedule", _schedule(self.schedule))
        number("warmup_fraction", self.warmup_fraction, 0, 1)
        number("warmup_limit_fraction", self.warmup_limit_fraction, 0, 1)
        require(
            self.warmup_limit_fraction >= self.warmup_fraction,
            "warmup_limit_fraction",
            self.warmup_limit_fraction,
            f"use at least warmup_fraction = {self.warmup_fraction}",
        )
        if self.warmup_bits is not None:
            self._whole("warmup_bits", 1)
            require(self.warmup_bits in (8, 4), "warmup_bits", self.warmup_bits, "use 8, 4 or null")
        number("stability_tolerance", self.stability_tolerance, 0, open_low=True)
        one_of("alignment", self.alignment, ("off", "given", "measured"))
        if self.remeasure_above is not None:
            number("remeasure_above", self.remeasure_above, 0, open_low=True)
        one_of("factor_dtype", self.factor_dtype, FACTOR_DTYPES)
        one_of("error_dtype", self.error_dtype, ("fp32", "bf16"))
        one_of("rounding", self.rounding, ("nearest", "stochastic"))
        self._whole("bits", 1)
        require(self.bits in (2, 4, 8), "bits", self.bits, "use 8, 4 or 2")
        for key in ("target_error", "smoothing", "density", "compressed_stages"):
            number(key, getattr(self, key), 0, 1, open_low=True)
        for key in _SWITCHES:
            require(isinstance(getattr(self, key), bool), key, getattr(self, key), "use true or false")
        refuse_unusable(self)
        if self.method == "edgc" and self.policy == "schedule":
            require(bool(self.schedule), "schedule", self.schedule, "give [[share of the run, rank], ...]")
        if self.r_max is not None and self.r_min is not None:
            fix = f"choose r_min at most r_max = {self.r_max}"
            require(self.r_min <= self.r_max, "r_min", self.r_min, fix)
        for key in ("r_max", "r_min"):
            value = getattr(self, key)
            if value is not None and self.method == "edgc" and not self.ranks_given:
                require(
                    value % self.rank_multiple == 0, key, value, f"use a multiple of {self.rank_multiple}"
                )
        if self.method == "powersgd" or (self.method == "edgc" and self.policy == "fixed"):
            require(self.rank is not None, "rank", self.rank, "give the rank of the fixed-rank method")
        if self.alignment == "given":
            value = self.timing.seconds_per_rank
            require(value > 0, "timing.seconds_per_rank", value, "alignment: given needs a time above 0")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> Self:
        """As of all settings; a ``preset`` (:mod:`edgc.presets`) among them is laid under the other keys."""
        return super().from_dict(
            presets.resolved(values, where=where, prefix=prefix), where=where, prefix=prefix
        )

    @classmethod
    def from_record(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> Self:
        """From the settings that a run was recorded with: those that its method could not use are left out.

        Earlier versions let such settings pass, without an effect.
        """
        return cls.from_dict(cls.usable(values), where=where, prefix=prefix)

    @classmethod
    def usable(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values``, without ``preset``, less those that the method among them cannot use."""
        return usable(values, cls().to_dict())

    @property
    def ranks_given(self) -> tuple[int, ...]:
        """The ranks that policies ``fixed`` and ``schedule`` give to stage 0; empty under the others."""
        if self.policy == "schedule":
            return tuple(rank for _, rank in self.schedule)
        return (self.rank,) if self.policy == "fixed" and self.rank is not None else ()

    def stages_compressed(self, stages: int) -> int:
        """How many of ``stages`` pipeline stages are compressed under ``compressed_stages``."""
        # 0.7 * 10 is to be 7 whatever its last bit.
        return max(1, math.floor(self.compressed_stages * stages + 1e-9))

    def lower_rank(self, r_max: int) -> int:
        """r_min for an upper rank ``r_max``: the configured one, or r_max/4 in whole multiples, at least one."""
        if self.r_min is not None:
            return min(self.r_min, r_max)
        m = self.rank_multiple
        return min(r_max, max(m, r_max // 4 // m * m))
