"""The settings of one training run, validated before anything is started.

A run is resolved from three layers, later ones winning: the scale's ``defaults``, the study's ``base`` and the
study's variant (each also as overridden for that scale). Of the compression settings in the first two, a run takes
those that its method can use (:func:`lay`). Unknown keys and bad values become one-line errors that name the key, the
file and the fix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from edgc import presets
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.strategies.base import StrategyConfig
from experiments.common.yaml_settings import Settings, validate

VOCAB_MULTIPLE = 128  # Megatron-LM: --make-vocab-size-divisible-by 128, times the tensor-parallel size
EVERY_STEP = "every_step"  # the strategy of who names none
Rate = Field(ge=0.0, le=1.0)


def _divisible(key: str, value: int, divisor_key: str, divisor: int, fix: str = "change one of them") -> None:
    if value % divisor:
        raise ValueError(f"{key} = {value} is not divisible by {divisor_key} = {divisor}; {fix}")


class Recorded(Settings):
    """Settings of which those in ``LATER`` are on record only where they are not the default: runs were before them."""

    LATER: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _record(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = type(self).model_fields
        unset = {key for key in self.LATER if getattr(self, key) == fields[key].default}
        return {key: value for key, value in handler(self).items() if key not in unset}


def _strategy(value: Any) -> Any:
    """Settings of a strategy with its name among them; empty for the default."""
    value = {"name": value} if isinstance(value, str) else value
    return {} if value == {"name": EVERY_STEP} else value


class DataConfig(Settings):
    """Source of the text; ``path`` is the folder of prepared data, below ``results/<scale>/data``."""

    source: Literal["stdlib", "debian", "openwebtext", "folder"] = "stdlib"
    tokenizer: Literal["bpe", "gpt2"] = "bpe"
    vocab_size: PositiveInt | None = 4096
    path: str = "stdlib"
    dataset: str | None = None
    revision: str | None = None
    max_documents: PositiveInt | None = None


class ModelConfig(Settings):
    """A GPT or BERT transformer; sizes in units (hidden) and tokens (sequence_length).

    With ``experts`` every layer's MLP is a mixture of that many, of which each token goes through
    ``experts_per_token``; they have no biases.
    """

    architecture: Literal["gpt", "bert"] = "gpt"
    layers: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    ffn_hidden: PositiveInt | None = None
    sequence_length: PositiveInt
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    tie_embeddings: bool = True
    activation: Literal["gelu", "gelu_tanh"] = "gelu"
    init_std: float = Field(0.02, gt=0.0)
    experts: PositiveInt | None = None
    experts_per_token: PositiveInt = 2

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.experts is not None and self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token = {self.experts_per_token} is above experts = {self.experts}; change one of them"
            )
        _divisible("hidden", self.hidden, "heads", self.heads)
        return self


class ParallelConfig(Settings):
    """Degrees of parallelism; ``world``, their product, follows from them.

    The ``expert`` degree divides ``data``; ``sequence`` shards activations over the tensor-parallel ranks.
    """

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    data: PositiveInt = 1
    virtual_pipeline: PositiveInt | None = None
    expert: PositiveInt = 1
    sequence: bool = False
    world: PositiveInt = 1

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Fill in ``world``; values of a wrong type are left to the fields."""
        degrees = (
            [values.get(key, 1) for key in ("tensor", "pipeline", "data")] if isinstance(values, Mapping) else [""]
        )
        if not all(isinstance(degree, int) for degree in degrees):
            return values
        world = math.prod(degrees)
        if values.get("world", world) != world:
            raise ValueError(f"world = {values['world']} is not tensor * pipeline * data = {world}; leave it out")
        return {**values, "world": world}


class FinalConfig(Settings):
    """Estimates of the loss at the end of a run, beside that of ``eval_interval``, for studies of their spread.

    ``evaluations`` times, ``every`` iterations apart and last at the end, the loss over ``batches`` global batches of
    validation text is recorded beside that over ``eval_batches``; at the end also both of the mean of these weights.
    """

    evaluations: PositiveInt
    every: PositiveInt
    batches: PositiveInt

    def due(self, iteration: int, iterations: int) -> bool:
        """True if an estimate is due after ``iteration`` of a run of ``iterations``."""
        left = iterations - iteration
        return left % self.every == 0 and left // self.every < self.evaluations


class TrainConfig(Recorded):
    """Optimisation and bookkeeping of one run; intervals in iterations, batches in sequences.

    ``bucket_elements`` is the size at which the first stage's gradients are cut into buckets under
    ``overlap_grad_reduce``; None is Megatron's default. ``optimizer``: ``muon`` is that of the matrices of layers, with
    AdamW for the rest (:mod:`edgc.optimizers`); ``sgd`` has no momentum, and is for strategies that make the direction
    of a step themselves. ``matrix_lr`` is the highest learning rate of the matrices of layers under these two, default
    ``lr``; it rises and falls as ``lr`` does.
    """

    LATER = ("optimizer", "matrix_lr", "final")

    iterations: PositiveInt
    micro_batch: PositiveInt
    global_batch: PositiveInt
    lr: float = Field(gt=0.0)
    min_lr: float = Field(0.0, ge=0.0)
    lr_warmup_fraction: float = Rate
    lr_decay_iterations: PositiveInt | None = None
    weight_decay: float = Field(0.01, ge=0.0)
    adam_beta1: float = Field(0.9, ge=0.0, lt=1.0)
    adam_beta2: float = Field(0.95, ge=0.0, lt=1.0)
    clip_grad: float = Field(1.0, ge=0.0)
    eval_interval: PositiveInt
    eval_batches: PositiveInt
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    overlap_grad_reduce: bool = False
    bucket_elements: PositiveInt | None = None
    distributed_optimizer: bool = False
    checkpoint: bool = False  # the weights at the end, for export
    checkpoint_interval: int = Field(0, ge=0)  # whole states that a killed run goes on from; 0 = none
    keep_warm_up: bool = False  # the whole state at the end of warm-up, for runs that branch from it
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    matrix_lr: float | None = Field(None, gt=0.0)
    final: FinalConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.final and self.final.evaluations * self.final.every > self.iterations:
            what = f"final: {self.final.evaluations} evaluations, {self.final.every} iterations apart,"
            raise ValueError(f"{what} are longer than iterations = {self.iterations}; use fewer")
        return self


class ProbeConfig(Settings):
    """Records of studies of gradients, beside the loss: every ``every`` iterations (0 = never).

    ``spectra`` adds singular values, ``entry_rates`` entropies by every rule that samples these shares of the entries
    (:mod:`experiments.training.probes`).
    """

    every: int = Field(0, ge=0)
    estimators: tuple[Literal["histogram", "gaussian", "vasicek", "released"], ...] = ()
    correlation: bool = False
    max_entries: PositiveInt = 1_000_000
    spectra: bool = False
    entry_rates: tuple[Annotated[float, Field(gt=0.0, le=1.0)], ...] = ()

    @model_validator(mode="after")
    def _check(self) -> ProbeConfig:
        for key in ("spectra", "entry_rates"):
            if getattr(self, key) and not self.every:
                raise ValueError(f"{key} without probed iterations; give every")
        return self

    def due(self, iteration: int) -> bool:
        """True for the first iteration and every ``every``-th, if any is probed."""
        return self.every > 0 and (iteration == 1 or iteration % self.every == 0)


class FollowsConfig(Settings):
    """The ranks of the run of ``variant`` with the same seed, window by window after warm-up, in another order.

    Its placebos send its bytes at other times: ``reversed``; ``shuffled`` (``shuffle`` tells several shuffles apart);
    ``falling``, from the highest to the lowest. At its bytes, too: ``even``, two neighbouring ranks in turn, as near to
    one fixed rank as that goes; ``line``, from 4/3 of their mean straight down to 2/3. Where stages are aligned, these
    are the ranks of the first one.
    """

    variant: str
    order: Literal["reversed", "shuffled", "falling", "even", "line"]
    shuffle: int = Field(0, ge=0)


class RunConfig(Recorded):
    """One training run.

    ``strategy`` is validated by :class:`edgc.strategies.base.StrategyConfig`: what replicas exchange, and when; a name,
    or a mapping with ``name`` among its keys. ``driver`` is ``processes``, one for each rank, or ``rehearsal``: all
    replicas in one process (:mod:`experiments.training.rehearse`), which computes the same.

    ``compression`` is validated by :class:`edgc.config.EDGCConfig` itself; what a ``preset`` in it stands for is
    written out, so that ``run.yaml`` does not depend on what the preset will be later. With ``follows`` its policy
    becomes ``schedule`` when the run starts (:mod:`experiments.training.lineage`). With ``branch`` the run goes on
    from the state that the run of that variant, with the same seed, had at the end of its uncompressed warm-up.
    """

    LATER = ("strategy", "driver", "setting")

    scale: str
    study: str
    variant: str
    label: str
    seed: int = Field(ge=0)
    data: DataConfig = DataConfig()
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    train: TrainConfig
    compression: dict[str, Any] = {}
    strategy: Annotated[dict[str, Any], BeforeValidator(_strategy)] = {}
    driver: Literal["processes", "rehearsal"] = "processes"
    probe: ProbeConfig = ProbeConfig()
    follows: FollowsConfig | None = None
    branch: str | None = None
    setting: str = ""  # of several that its study has

    @property
    def needs(self) -> list[str]:
        """Names of the runs of the study that have to end before this one starts."""
        variants = {self.branch, self.follows.variant if self.follows else None}
        return sorted(f"{variant}-s{self.seed}" for variant in variants if variant is not None)

    @property
    def name(self) -> str:
        """Name of the run in its study, and of its folder."""
        return f"{self.variant}-s{self.seed}"

    @property
    def edgc(self) -> EDGCConfig:
        """Compression settings, defaults filled in."""
        return EDGCConfig.from_dict(self.compression, prefix="compression.")

    @property
    def exchange(self) -> StrategyConfig:
        """Settings of the strategy, defaults filled in."""
        return StrategyConfig.from_dict(self.strategy or EVERY_STEP, prefix="strategy.")

    @property
    def processes(self) -> int:
        """Number of processes that the run is made of."""
        return 1 if self.driver == "rehearsal" else self.parallel.world

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one data-parallel replica works through in an iteration."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        model, parallel, train = self.model, self.parallel, self.train
        chunk, stages = train.micro_batch * parallel.data, parallel.pipeline * (parallel.virtual_pipeline or 1)
        _divisible("train.global_batch", train.global_batch, "micro_batch * data", chunk, "choose a multiple")
        fix = "change parallel.pipeline or model.layers"
        _divisible("model.layers", model.layers, "pipeline * virtual_pipeline", stages, fix)
        _divisible("model.heads", model.heads, "parallel.tensor", parallel.tensor)
        experts, degree = model.experts, parallel.expert
        if degree > 1 and (experts is None or experts % degree or parallel.data % degree):
            raise ValueError(
                f"parallel.expert = {degree} must divide model.experts = {experts} and parallel.data = "
                f"{parallel.data}; change one of them"
            )
        if parallel.sequence:
            if parallel.tensor == 1:
                raise ValueError("parallel.sequence needs parallel.tensor above 1; set it to false")
            _divisible("model.sequence_length", model.sequence_length, "parallel.tensor", parallel.tensor)
        if parallel.virtual_pipeline and parallel.pipeline == 1:
            raise ValueError("parallel.virtual_pipeline needs parallel.pipeline above 1; leave it out")
        momentum, moment = self.compression.get("momentum", 0), ""
        if train.optimizer == "adamw" and train.adam_beta1 > 0:
            moment, fix = f"train.adam_beta1 = {train.adam_beta1}", "set train.adam_beta1: 0"
        elif train.optimizer == "muon":
            moment, fix = "train.optimizer = muon", "set train.optimizer: sgd"
        if isinstance(momentum, (int, float)) and momentum > 0 and moment:
            raise ValueError(f"{moment} with compression.momentum = {momentum} applies momentum twice; {fix}")
        if (self.follows or self.branch) and self.compression.get("method") != "edgc":
            raise ValueError("follows and branch need compression.method = edgc; leave them out")
        if model.architecture == "bert" and (parallel.pipeline > 1 or parallel.tensor > 1):
            raise ValueError("bert runs with parallel.pipeline = 1 and parallel.tensor = 1; set both to 1")
        if train.optimizer == "adamw" and train.matrix_lr is not None:
            raise ValueError("train.matrix_lr is not used with train.optimizer = adamw; leave it out")
        if train.optimizer == "muon" and parallel.tensor > 1:
            raise ValueError("train.optimizer = muon steps whole matrices; set parallel.tensor: 1")
        if train.optimizer == "muon" and parallel.expert > 1:
            # Ranks would clip by different norms, each of its own experts, and their copies of the rest drift apart.
            raise ValueError("train.optimizer = muon knows no expert parallelism; set parallel.expert: 1")
        if train.optimizer == "muon" and (train.precision != "fp32" or train.distributed_optimizer):
            fix = "set train.precision: fp32 and train.distributed_optimizer: false"
            raise ValueError(f"train.optimizer = muon steps whole matrices in fp32; {fix}")
        if self.driver == "rehearsal":
            self._check_rehearsal()
        elif self.strategy:
            # edgc.megatron drives strategies, train.py does not ask it to.
            name = self.strategy.get("name", EVERY_STEP)
            raise ValueError(f"strategy.name = {name!r} needs one process so far; set driver: rehearsal")
        return self

    def _check_rehearsal(self) -> None:
        """Refuse what one process does not compute as several do."""
        parallel, train = self.parallel, self.train
        if parallel.data < 2:
            raise ValueError("driver = rehearsal needs replicas; set parallel.data to at least 2")
        for key, value, needed in (
            ("parallel.pipeline", parallel.pipeline, 1),
            ("parallel.tensor", parallel.tensor, 1),
            ("parallel.expert", parallel.expert, 1),
            ("model.dropout", self.model.dropout, 0.0),  # whose random numbers replicas share, as processes
            ("model.experts", self.model.experts, None),  # whose own loss Megatron's schedule scales
            ("train.precision", train.precision, "fp32"),
            ("train.distributed_optimizer", train.distributed_optimizer, False),
            ("train.overlap_grad_reduce", train.overlap_grad_reduce, False),
            ("train.checkpoint", train.checkpoint, False),
            ("probe.every", self.probe.every, 0),
            ("branch", self.branch, None),
        ):
            if value != needed:
                fix = "leave it out" if needed is None else f"set it to {str(needed).lower()}"
                raise ValueError(f"{key} = {value} is not rehearsed; {fix}, or set driver: processes")


class LayerMatrices(NamedTuple):
    """(rows, columns) of the weight matrices of a transformer layer, outputs by inputs, as Megatron has them."""

    qkv: tuple[int, int]
    projection: tuple[int, int]
    fc1: tuple[int, int]
    fc2: tuple[int, int]


def layer_matrices(hidden: int, ffn_hidden: int | None = None) -> LayerMatrices:
    """Matrices of a layer of width ``hidden``; its feed-forward part is ``ffn_hidden`` wide (default: fourfold)."""
    inner = ffn_hidden or 4 * hidden
    return LayerMatrices((3 * hidden, hidden), (hidden, hidden), (inner, hidden), (hidden, inner))


def padded_vocabulary(vocab_size: int, tensor: int) -> int:
    """Vocabulary rounded up to a multiple of 128 times the tensor-parallel size, as Megatron-LM pads its embedding."""
    block = VOCAB_MULTIPLE * tensor
    return -(-vocab_size // block) * block


def lay(base: Mapping[str, Any], overrides: Mapping[str, Any], where: object = None) -> dict[str, Any]:
    """The settings of a variant, ``overrides``, laid over those that all variants of a study have in common.

    Of the common compression settings those are left out that the variant's method cannot use; what the variant itself
    says stays, and is refused if its method cannot use it.
    """
    common, special = base.get("compression"), overrides.get("compression", {})
    if not (isinstance(common, Mapping) and isinstance(special, Mapping)):
        return presets.deep_merge(base, overrides)
    common, special = (presets.resolved(v, where=where, prefix="compression.") for v in (common, special))
    usable = EDGCConfig.usable(presets.deep_merge(common, special))
    common = {key: value for key, value in common.items() if key in usable}
    return presets.deep_merge({**base, "compression": common}, {**overrides, "compression": special})


def resolve(values: Mapping[str, Any], where: object) -> RunConfig:
    """Validate one merged run, the compression section included."""
    if isinstance(compression := values.get("compression"), Mapping):
        compression = presets.resolved(compression, where=where, prefix="compression.")
        values = {**values, "compression": compression}
    run: RunConfig = validate(RunConfig, values, where)
    EDGCConfig.from_dict(run.compression, where=where, prefix="compression.")
    strategy = StrategyConfig.from_dict(run.strategy, where=where, prefix="strategy.")
    if strategy.period > run.train.iterations:
        what = f"strategy.every = {strategy.period} is longer than the run, train.iterations = {run.train.iterations}"
        raise UserError(what, where=where, fix="shorten the round")
    if strategy.directs and run.train.optimizer != "sgd":
        what = f"strategy.name = {strategy.name!r} makes the direction of a step itself"
        raise UserError(what, where=where, fix="set train.optimizer: sgd")
    return run


def recorded(values: Mapping[str, Any], where: object) -> RunConfig:
    """The run that ``values``, a ``run.yaml``, is the record of; its ``provenance`` is left out."""
    return resolve({key: value for key, value in values.items() if key != "provenance"}, where)
