"""Settings of the library: what every method has, and the way from a mapping to the type of its method.

All settings are frozen, keyword-only dataclasses that validate themselves on construction and raise
:class:`edgc.errors.UserError` naming the key, the value and the fix. A method has a type of its own beside its
algorithm (``edgc/compressors``), a policy of method ``edgc`` one beside its rule (``edgc/control/policies``); each has
only the settings that it uses. Sources: "paper" is arXiv 2511.10333, "code" the authors' public scripts, "ours" a
choice of this project.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

from edgc import presets
from edgc.checks import Settings, dotted, mapping, number, subclasses, unknown
from edgc.errors import UserError, choices
from edgc.sections import EntropyConfig, PipelineConfig

if TYPE_CHECKING:
    from edgc.compressors.base import Compressor, KeepsErrors


class Look(NamedTuple):
    """Look of a method in every figure: its legend, and in matplotlib's words for colour, marker and line."""

    label: str
    colour: str
    marker: str
    line: str = "-"


@dataclass(frozen=True)
class Example:
    """Settings of a method that the tests of all methods run.

    Attributes:
        settings: beside ``method`` (and ``policy``).
        sent: bytes that a rank sends in a group of two for one fp32 gradient of so many rows and columns.
        exact: within 1e-6 of its norm, what is sent plus what is kept is what came in.
        bound: where the result is exact only on average, the largest error of an entry, as a share of the largest entry
            that any worker has; None elsewhere.
    """

    sent: Callable[[int, int], float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    bound: float | None = None


@dataclass(frozen=True, kw_only=True)
class EDGCConfig(Settings):
    """Settings of how gradients are reduced; of this class are those that every method has.

    ``EDGCConfig(method="powersgd", rank=32)`` and ``EDGCConfig.from_dict({"method": "powersgd", "rank": 32})`` are
    of the method's own type, as is ``PowerSGDConfig(rank=32)``. A setting of another method is refused, and so is one
    that differs from its default and has no effect beside the others.

    Defaults that are not the paper's (``EDGCConfig.from_dict({"preset": "paper"})`` is the paper to the letter):

    ===================  ========  ========  ==========================================================================
    key                  default   paper     why
    ===================  ========  ========  ==========================================================================
    method               none      edgc      nothing is compressed unless it is asked for
    alignment            off       measured  one stage needs none, and without times a run repeats bit for bit
    remeasure_above      0.2       None      the paper times once and leaves a network that changes open
    entropy.sampling     diagonal  random    the same share of every row and column, at less noise and cost
    ===================  ========  ========  ==========================================================================

    What the paper gives no value for ("ours" below) is the same under both.

    Attributes:
        method: the name of a method, ``none`` unless given: :func:`methods`.
        window: w, iterations per decision, and of what is judged window by window under any method. Paper: 1000.
        entropy: what GDS measures; under ``none`` only with ``record_full_entropy``.
        record_full_entropy: also measure all entries at every iteration, for studies of the sampler.
        min_compression_elements: 2-D tensors with fewer entries are sent dense (ours).
        fused_embedding: under Megatron's pipeline parallelism with tied embeddings, average the embedding's gradient
            over the replicas of both end stages in one all-reduce, dense (Optimus-CC; :mod:`edgc.megatron.embedding`).
        pipeline: compression of what pipeline stages send backwards; off unless it has a rank.
        seed: of all that a method draws; the same on every rank.
    """

    method: str = ""
    window: int = 1000
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    record_full_entropy: bool = False
    min_compression_elements: int = 1024
    fused_embedding: bool = False
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    seed: int = 0

    look: ClassVar[Look]
    examples: ClassVar[Mapping[str, Example]] = {}

    if TYPE_CHECKING:  # any settings: the result is of the method's type

        def __init__(self, **settings: Any) -> None: ...

    def __new__(cls, **settings: Any) -> Self:
        if "preset" in settings:
            raise UserError("preset is no setting", fix=f"write EDGCConfig.from_dict({settings!r})")
        kind = cls._type_for(settings)
        if settings:  # a copy is made without
            kind._check_keys(settings)
        return object.__new__(kind)

    def __post_init__(self) -> None:
        super().__post_init__()
        defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(self)}
        for key, fix in self.idle(vars(self)).items():
            value, default = self.to_dict()[key], defaults[key]
            before = dotted({key: vars(default) if is_dataclass(default) else default})
            for name, given in dotted({key: value}).items():
                if given != before[name]:
                    raise self._unused(name, given, fix)

    def _check(self) -> None:
        self._whole("window", 1)
        self._whole("min_compression_elements", 1)
        self._whole("seed", 0)

    def build(self) -> Compressor:
        """A new compressor of this method."""
        raise NotImplementedError

    def build_warm_up(self) -> KeepsErrors | None:
        """A new compressor for the warm-up of method ``edgc`` if that is compressed; what it keeps is handed over."""
        return None

    def build_to_time(self) -> Compressor:
        """A new compressor as it is after any warm-up of its own: for measuring what a reduction takes."""
        return self.build()

    @property
    def fixed_rank(self) -> int | None:
        """The one rank of a run; None where there is none, or a controller decides it."""
        return None

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        """Settings of this type that have no effect beside ``values``, each with what would give it one."""
        return {}

    @classmethod
    def title(cls) -> str:
        """Method, and policy if it has one, as in a file of settings."""
        policy = getattr(cls, "policy", None)
        return f"method: {cls.method}" + (f", policy: {policy}" if policy else "")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> Self:
        """Build from a mapping; a ``preset`` (:mod:`edgc.presets`) among its keys is laid under the others."""
        mapping(values, where, 'write {"preset": ...} or {"method": ...}')
        values = presets.resolved(values, where=where, prefix=prefix)
        kind = cls._type_for(values, where=where, prefix=prefix)
        kind._check_keys(values, where=where, prefix=prefix)
        return super(EDGCConfig, kind).from_dict(values, where=where, prefix=prefix)

    @classmethod
    def from_record(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> Self:
        """Build from the settings that a run was recorded with; those that its method could not use are left out.

        Earlier versions let such settings pass, without an effect.
        """
        return cls.from_dict(cls.usable(values), where=where, prefix=prefix)

    @classmethod
    def usable(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """``values``, without ``preset``, less those that have no effect with the method among them.

        For settings that were not written for this method: those that a study lays under all its variants, and those
        in the records of runs. Of an unknown method, and unknown keys, all stay: for others to refuse.
        """
        try:
            kind = cls._type_for(values)
        except UserError:
            return dict(values)
        own = {f.name: f.default for f in fields(kind)}
        idle = kind.idle({**own, **values})
        return {key: v for key, v in values.items() if (key in own or not users(key)) and key not in idle}

    @classmethod
    def _type_for(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> type[Self]:
        """The type of the method, and of the policy, that ``values`` name.

        Raises:
            UserError: there is no such method or policy.
        """
        kinds = [kind for kind in methods() if issubclass(kind, cls)]
        for key, usual in (("method", "none"), ("policy", "cqm")):
            names = dict.fromkeys(getattr(kind, key, "") for kind in kinds)
            if list(names) == [""]:
                break  # a method without policies
            name = values.get(key, getattr(cls, key, "") or usual)
            if not isinstance(name, str) or name not in names:
                what = f"{prefix}{key} = {name!r} is not valid"
                raise UserError(what, where=where, fix=choices(name, names))
            kinds = [kind for kind in kinds if getattr(kind, key) == name]
        [kind] = kinds
        return kind

    @classmethod
    def _check_keys(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> None:
        """Refuse an unknown key, one of another method, and the lack of one that has no default."""
        own = {f.name: f for f in fields(cls)}
        for key in (key for key in values if key not in own):
            kinds = users(key)
            if not kinds:
                raise unknown(key, own, where, prefix)
            name, value = next(iter(dotted({key: values[key]}).items()))
            titles = dict.fromkeys(k.title() if k.method == cls.method else f"method: {k.method}" for k in kinds)
            raise cls._unused(prefix + name, value, f"set {' or '.join(titles)}", where)
        for f in own.values():
            if f.name not in values and f.default is f.default_factory is MISSING:
                what = f"{prefix}{f.name} is missing: {cls.title()} has no default for it"
                raise UserError(what, where=where, fix=f"give the {f.name}")

    @classmethod
    def _unused(cls, name: str, value: object, fix: str, where: object = None) -> UserError:
        return UserError(
            f"{name} = {value!r} is not used with {cls.title()}", where=where, fix=f"leave it out, or {fix}"
        )


@dataclass(frozen=True, kw_only=True)
class CompressingConfig(EDGCConfig):
    """Settings of every method but ``none``.

    Attributes:
        compress_experts: under Megatron's expert parallelism, whether the experts' gradients are compressed too (ours).
        cost_gate: compress a group of gradients only where that measures faster than sending it dense (ours).
        gate_interval: iterations between two measurements of the cost gate (ours).
    """

    compress_experts: bool = True
    cost_gate: bool = False
    gate_interval: int = 1000

    def _check(self) -> None:
        super()._check()
        self._whole("gate_interval", 1)

    @classmethod
    def idle(cls, values: Mapping[str, Any]) -> dict[str, str]:
        fix = {} if values["cost_gate"] else {"gate_interval": "set cost_gate: true"}
        return super().idle(values) | fix


@dataclass(frozen=True, kw_only=True)
class ConstantConfig(CompressingConfig):
    """Settings of the methods that compress alike from the first iteration to the last: all but ``none`` and ``edgc``.

    Attributes:
        compressed_stages: share of the pipeline stages, from stage 0 on, that compress their gradients, in whole stages
            rounded down but at least one; the others send theirs dense. Under 1F1B the first stages end last
            (Optimus-CC's selective stage compression; its authors' scripts: 3 of 4 stages).
    """

    compressed_stages: float = 1.0

    def _check(self) -> None:
        super()._check()
        number("compressed_stages", self.compressed_stages, 0, 1, open_low=True)

    def stages_compressed(self, stages: int) -> int:
        """Number of pipeline stages, of ``stages``, that are compressed under ``compressed_stages``."""
        # 0.7 * 10 is to be 7 whatever its last bit.
        return max(1, math.floor(self.compressed_stages * stages + 1e-9))


def methods() -> tuple[type[EDGCConfig], ...]:
    """The type of every method, and of every policy of method ``edgc``, in the order of their names.

    They are those of the files in ``edgc/compressors`` and ``edgc/control/policies``, and those of whatever else has
    been imported: a type with a ``method`` is a method.
    """
    _import_all("edgc.compressors")
    _import_all("edgc.control.policies")
    kinds = [kind for kind in dict.fromkeys(subclasses(EDGCConfig)) if kind.method and getattr(kind, "policy", "-")]
    return tuple(sorted(kinds, key=lambda kind: (kind.method != "none", kind.title())))


def users(key: str) -> list[type[EDGCConfig]]:
    """The types that have a setting."""
    return [kind for kind in methods() if any(f.name == key for f in fields(kind))]


@cache
def _import_all(package: str) -> None:
    for info in pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}."):
        module = importlib.import_module(info.name)
        # A package that is a method itself imports the rest of it when it is built.
        if info.ispkg and not any(kind.__module__ == module.__name__ for kind in subclasses(EDGCConfig)):
            _import_all(info.name)


def refuse_stages(config: EDGCConfig, where: str, job: str) -> None:
    """Refuse what only pipeline stages, or Megatron's other parallelism, have a use for in a ``job`` without; but not
    ``alignment``, which the paper's settings have: one stage is always aligned."""
    values = dotted(config.to_dict())
    for key, unused, word in (
        ("pipeline.rank", None, "null"),
        ("fused_embedding", False, "false"),
        ("compressed_stages", 1, "1"),
        ("compress_experts", True, "true"),
    ):
        if (value := values.get(key, unused)) != unused:
            fix = f"{job} has one stage and no expert parallelism; set {key}: {word}"
            raise UserError(f"{key} = {value!r} cannot be used", where=where, fix=fix)
