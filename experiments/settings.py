"""The settings of one training run, validated before anything is started.

A run is resolved from three layers, later ones winning: the scale's ``defaults``, the study's ``base`` and the
study's variant (each also as overridden for that scale). Of the compression settings in the first two, a run takes
those that its method can use (:func:`lay`). Unknown keys and bad values become one-line errors that name the key, the
file and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from edgc import presets
from edgc.config import EDGCConfig
from edgc.errors import UserError
from experiments import yaml_keys

Rate = Field(ge=0.0, le=1.0)


class Settings(BaseModel):
    """Base of all settings: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Settings):
    """Where the text comes from; ``path`` is the folder of prepared data, below ``results/<scale>/data``."""

    source: Literal["stdlib", "openwebtext", "folder"] = "stdlib"
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
        if self.hidden % self.heads:
            raise ValueError(
                f"hidden = {self.hidden} is not divisible by heads = {self.heads}; change one of them"
            )
        return self


class ParallelConfig(Settings):
    """Degrees of parallelism. Give ``data`` or the ``world`` size; world = tensor * pipeline * data.

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
        """Fill in whichever of ``data`` and ``world`` is missing; values of a wrong type are left to the fields."""
        if not isinstance(values, Mapping):
            return values
        model, data, world = (
            (values.get("tensor", 1), values.get("pipeline", 1)),
            values.get("data"),
            values.get("world"),
        )
        if not all(isinstance(value, int) and value > 0 for value in (*model, data or 1, world or 1)):
            return values
        ranks = model[0] * model[1]
        if world is None:
            return {**values, "world": ranks * (data or 1)}
        if world % ranks or (data is not None and world != ranks * data):
            given = (
                f"tensor * pipeline = {ranks}"
                if data is None
                else f"tensor * pipeline * data = {ranks * data}"
            )
            relation = "divisible by" if data is None else "equal to"
            raise ValueError(
                f"world = {world} is not {relation} {given}; change world or the degrees of parallelism"
            )
        return {**values, "data": world // ranks}


class TrainConfig(Settings):
    """Optimisation and bookkeeping of one run; intervals in iterations, batches in sequences.

    ``bucket_elements`` is the size at which the first stage's gradients are cut into buckets under
    ``overlap_grad_reduce``; None is Megatron's default.
    """

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


class ProbeConfig(Settings):
    """What studies of gradients record beside the loss: every ``every`` iterations (0 = never).

    ``spectra`` adds singular values (:mod:`experiments.spectra_probe`), ``entry_rates`` entropies by every rule that
    samples these shares of the entries (:mod:`experiments.sampling_probe`).
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
        """Whether ``iteration`` is probed: the first one and every ``every``-th."""
        return self.every > 0 and (iteration == 1 or iteration % self.every == 0)


class RunConfig(Settings):
    """One training run. ``compression`` is validated by :class:`edgc.config.EDGCConfig` itself; what a ``preset`` in it
    stands for is written out, so that ``run.yaml`` does not depend on what the preset will be later."""

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
    probe: ProbeConfig = ProbeConfig()

    @property
    def name(self) -> str:
        return f"{self.variant}-s{self.seed}"

    @property
    def edgc(self) -> EDGCConfig:
        return EDGCConfig.from_dict(self.compression, prefix="compression.")

    @property
    def micro_batches(self) -> int:
        """Micro-batches that one data-parallel replica works through in an iteration."""
        return self.train.global_batch // (self.train.micro_batch * self.parallel.data)

    @field_validator("compression")
    @classmethod
    def _write_out(cls, compression: dict[str, Any]) -> dict[str, Any]:
        return presets.resolved(compression, prefix="compression.")

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        chunk = self.train.micro_batch * self.parallel.data
        if self.train.global_batch % chunk:
            raise ValueError(
                f"train.global_batch = {self.train.global_batch} is not divisible by micro_batch * data = {chunk}; "
                "choose a multiple"
            )
        stages = self.parallel.pipeline * (self.parallel.virtual_pipeline or 1)
        if self.model.layers % stages:
            raise ValueError(
                f"model.layers = {self.model.layers} is not divisible by pipeline * virtual_pipeline = {stages}; "
                "change parallel.pipeline or model.layers"
            )
        if self.model.heads % self.parallel.tensor:
            raise ValueError(
                f"model.heads = {self.model.heads} is not divisible by parallel.tensor = {self.parallel.tensor}; "
                "change one of them"
            )
        experts, degree = self.model.experts, self.parallel.expert
        if degree > 1 and (experts is None or experts % degree or self.parallel.data % degree):
            raise ValueError(
                f"parallel.expert = {degree} must divide model.experts = {experts} and parallel.data = "
                f"{self.parallel.data}; change one of them"
            )
        if self.parallel.sequence and self.parallel.tensor == 1:
            raise ValueError("parallel.sequence needs parallel.tensor above 1; set it to false")
        if self.parallel.sequence and self.model.sequence_length % self.parallel.tensor:
            raise ValueError(
                f"model.sequence_length = {self.model.sequence_length} is not divisible by parallel.tensor = "
                f"{self.parallel.tensor}; change one of them"
            )
        if self.model.architecture == "bert" and (self.parallel.pipeline > 1 or self.parallel.tensor > 1):
            raise ValueError("bert runs with parallel.pipeline = 1 and parallel.tensor = 1; set both to 1")
        return self


def deep_merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """``high`` laid over ``low``; nested mappings are merged, everything else is replaced."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        merged[key] = (
            deep_merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
        )
    return merged


def lay(base: Mapping[str, Any], overrides: Mapping[str, Any], where: object = None) -> dict[str, Any]:
    """The settings of a variant, ``overrides``, laid over those that all variants of a study have in common.

    Of the common compression settings those are left out that the variant's method cannot use; what the variant itself
    says stays, and is refused if its method cannot use it.
    """
    common, own = base.get("compression"), overrides.get("compression", {})
    if not (isinstance(common, Mapping) and isinstance(own, Mapping)):
        return deep_merge(base, overrides)
    common, own = (presets.resolved(v, where=where, prefix="compression.") for v in (common, own))
    fit = EDGCConfig.usable(deep_merge(common, own))
    common = {key: value for key, value in common.items() if key in fit}
    return deep_merge({**base, "compression": common}, {**overrides, "compression": own})


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; missing, unreadable or malformed files are user errors."""
    try:
        value = yaml_keys.load(path.read_text(encoding="utf-8"))
    except yaml_keys.DuplicateKey as error:
        raise UserError(str(error), where=path, fix="keep one of them") from None
    except UnicodeDecodeError:
        raise UserError("not a text in UTF-8", where=path, fix="restore the file") from None
    except FileNotFoundError:
        raise UserError("file not found", where=path, fix="check the name") from None
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", where=path) from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"not valid YAML{line}", where=path, fix="correct the syntax") from None
    if not isinstance(value, dict):
        raise UserError("not a mapping of settings", where=path, fix="write `key: value` lines")
    return value


def validate(model: type[BaseModel], values: Mapping[str, Any], where: object) -> Any:
    """``model(**values)`` with pydantic's report turned into the first problem as one line."""
    try:
        return model(**values)
    except ValidationError as error:
        # A key that is misspelt is also missing under its name; the spelling is what helps.
        problems = error.errors()
        first = next((problem for problem in problems if problem["type"] == "extra_forbidden"), problems[0])
        key = ".".join(str(part) for part in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _known_keys(model, first["loc"][:-1])
            close = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
            raise UserError(f"unknown key {key}", where=where, fix=hint) from None
        if first["type"] == "missing":
            raise UserError(f"missing key {key}", where=where, fix="add it") from None
        message = first["msg"].removeprefix("Value error, ")
        if key:
            message = f"{key} = {first['input']!r}: {message}"
        what, _, fix = message.partition("; ")
        raise UserError(what, where=where, fix=fix or "correct the value") from None


def _known_keys(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    current: Any = model
    for part in path:
        field = current.model_fields.get(part)
        current = field.annotation if field is not None else None
        if current is None or not hasattr(current, "model_fields"):
            return []
    return list(current.model_fields)


def resolve(values: Mapping[str, Any], where: object) -> RunConfig:
    """Validate one merged run, the compression section included."""
    if isinstance(compression := values.get("compression"), Mapping):
        compression = presets.resolved(compression, where=where, prefix="compression.")
        values = {**values, "compression": compression}
    run: RunConfig = validate(RunConfig, values, where)
    EDGCConfig.from_dict(run.compression, where=where, prefix="compression.")
    return run


def recorded(values: Mapping[str, Any], where: object) -> RunConfig:
    """The run that ``values``, a ``run.yaml``, is the record of; its ``provenance`` is left out.

    Earlier versions recorded compression settings that the method could not use; they had no effect and are left out.
    """
    values = {key: value for key, value in values.items() if key != "provenance"}
    if isinstance(compression := values.get("compression"), Mapping):
        values["compression"] = EDGCConfig.usable(compression)
    return resolve(values, where)
