"""Settings that are sections of others: what GDS measures, and traffic between pipeline stages."""

from __future__ import annotations

from dataclasses import dataclass

from edgc.checks import Settings, number, one_of, require

ESTIMATORS = ("histogram", "gaussian", "vasicek", "released")
PARAMETERS = ("layers", "all")
SAMPLINGS = ("diagonal", "strided", "random")


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
        seed: of the random sampling and of the phase; the same on every rank.
    """

    estimator: str = "histogram"
    iteration_rate: float = 0.1
    entry_rate: float = 0.25
    sampling: str = "diagonal"
    source: str = "local"
    parameters: str = "layers"
    seed: int = 0

    def _check(self) -> None:
        one_of("estimator", self.estimator, ESTIMATORS)
        number("iteration_rate (alpha)", self.iteration_rate, 0, 1, open_low=True)
        number("entry_rate (beta)", self.entry_rate, 0, 1, open_low=True)
        one_of("sampling", self.sampling, SAMPLINGS)
        one_of("source", self.source, ("local", "reduced"))
        one_of("parameters", self.parameters, PARAMETERS)
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
    """

    rank: int | None = None
    epilogue_only: bool = False

    def _check(self) -> None:
        self._whole("rank", 1, optional=True)
        unused = self.rank is None and self.epilogue_only
        require(not unused, "epilogue_only", self.epilogue_only, "leave it out, or give the rank beside it")
