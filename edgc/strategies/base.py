"""The contract that every strategy keeps.

A compressor averages the gradients of one step; a strategy decides what replicas exchange (gradients, momenta, updates,
parameters), and when. A driver (:mod:`edgc.ddp`, :mod:`edgc.rehearsal`) calls, at every step of training and on every
replica in the same order:

1. :meth:`Strategy.reduces`: whether the gradients of this step are averaged before the optimizer, by an
   :class:`~edgc.engine.Engine` of the driver's; if not, they stay each replica's own.
2. :meth:`Strategy.before_step`, before the optimizer's step, with those gradients.
3. :meth:`Strategy.after_step`, after it.

The last two are generators that yield where collectives have been started; a driver runs them to their end before the
next thing happens to the parameters. What they send goes through :attr:`Replica.open_channel`, where its bytes are
counted, or through an engine of their own (:meth:`Replica.engine`), so that any compressor serves, with error feedback
of that use alone. What overlaps with steps may stay under way when a generator has ended.

When replicas are equal, bit for bit, is :attr:`StrategyConfig.equal`. What is not finite on one replica makes the step
or the round void on all of them: the strategy's state is as it was, and nothing is half applied.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from edgc.checks import Settings, mapping, need, subclasses, unknown
from edgc.compressors.base import Channel, Gradient, Steps, compressible, finite
from edgc.config import EDGCConfig
from edgc.errors import UserError, choices
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import all_reduce_bytes

if TYPE_CHECKING:
    from edgc.engine import Engine

Equality = Literal["step", "round", "never"]
T = TypeVar("T")
Asked = Generator[None, None, bool]


@dataclass(frozen=True)
class StrategyExample:
    """Settings of a strategy that the tests of all strategies run.

    Attributes:
        sent: bytes that each of ``world`` replicas sends a step, on average, for fp32 parameters of these shapes.
        settings: of the strategy.
        compression: of what it sends.
        embeddings_in_full: whether embeddings are averaged as they are: ``sent`` takes each as one row of entries.
    """

    sent: Callable[[Sequence[Sequence[int]], int], float]
    settings: Mapping[str, Any] = field(default_factory=dict)
    compression: Mapping[str, Any] = field(default_factory=dict)
    embeddings_in_full: bool = False


@dataclass(frozen=True, kw_only=True)
class StrategyConfig(Settings):
    """Settings of a strategy; each strategy has a type of its own beside its rule, which is the choice.

    Attributes:
        name: of the strategy; a type without one is a base of others.
        equal: when all replicas hold the same bits: after every ``step``, after every ``round``, or ``never``; then the
            mean of their weights is what is evaluated and saved.
        directs: whether it makes the direction of a step itself; then the optimizer is SGD without momentum.
        examples: settings that the tests run, by a name that no other strategy has.
    """

    name: ClassVar[str] = ""
    equal: ClassVar[Equality] = "step"
    directs: ClassVar[bool] = False
    examples: ClassVar[Mapping[str, StrategyExample]] = {}

    @property
    def period(self) -> int:
        """Steps of a round."""
        return 1

    def build(self, replica: Replica) -> Strategy:
        """A new strategy for one replica."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | str, *, where: object = None, prefix: str = "") -> Self:
        """Build from a mapping with the strategy's ``name`` among its keys, or from the name alone; a mapping without
        one is of this type, and an empty one of ``every_step`` where this is a base.

        Args:
            where: file of the settings, for errors.
            prefix: of their names there.

        Raises:
            UserError: there is no such strategy or key, or a value is not valid.
        """
        values = {"name": values} if isinstance(values, str) else values
        mapping(values, where, 'write {"name": ...}')
        values = dict(values)
        kinds = {kind.name: kind for kind in strategies() if issubclass(kind, cls)}
        name = values.pop("name", cls.name or (None if values else "every_step"))
        if not isinstance(name, str) or name not in kinds:
            raise UserError(f"{prefix}name = {name!r} is not valid", where=where, fix=choices(name, kinds))
        kind = kinds[name]
        for key in values:
            if key not in {f.name for f in fields(kind)}:
                raise unknown(key, [f.name for f in fields(kind)], where, prefix)
        return super(StrategyConfig, kind).from_dict(values, where=where, prefix=prefix)

    def to_dict(self) -> dict[str, Any]:
        """All settings, with the strategy's ``name`` among them: what :meth:`from_dict` builds from."""
        return {"name": self.name, **super().to_dict()}


@dataclass
class Replica:
    """One replica of a model, as its strategy sees it.

    Attributes:
        parameters: the trainable ones by name, the same on every replica.
        config: settings of the compressor that what the strategy sends goes through.
        iterations: length of the run in optimizer steps.
        optimizer: the one that steps ``parameters``.
        group: process group of the replicas; None is the world.
        open_channel: opens what is sent through.
        embeddings: names of the parameters that are embeddings (:func:`edgc.entropy.meter.embeddings`).
        owners: what ``optimizer`` steps, by name, where ``parameters`` are parts of that.
        engines: those that :meth:`engine` has made.
    """

    parameters: Mapping[str, Tensor]
    config: EDGCConfig
    iterations: int
    optimizer: torch.optim.Optimizer | None = None
    group: Any = None
    open_channel: Callable[..., Channel] = Channel
    embeddings: Collection[str] = ()
    owners: Mapping[str, Tensor] | None = None
    engines: list[Engine] = field(default_factory=list)

    def rates(self) -> dict[str, float]:
        """Learning rate of every parameter in this step; 1 without an optimizer."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        rates = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        return {name: rates.get(id(p), 1.0) for name, p in (self.owners or self.parameters).items()}

    def mend_optimizer(self) -> None:
        """Drop the optimizer's state of parameters where it is not finite, as after a step with such a gradient."""
        if self.optimizer is None:
            return
        for p in (self.owners or self.parameters).values():
            # Of a part of a parameter what this rank has of its state: the others may not be here.
            state = self.optimizer.state.get(p, {})
            tensors = [getattr(each, "_local_tensor", each) for each in state.values()]
            if not all(bool(each.isfinite().all()) for each in tensors if isinstance(each, torch.Tensor)):
                del self.optimizer.state[p]

    def refuse_compression(self, name: str) -> None:
        """Refuse a method of compression, for a strategy of this name that sends in a format of its own.

        Raises:
            UserError: there is one.
        """
        if self.config.method != "none":
            what = f"strategy {name} sends in a format of its own, not by compression.method = {self.config.method!r}"
            raise UserError(what, fix="set compression.method: none")

    def channel(self) -> Channel:
        """A new channel to the other replicas."""
        return self.open_channel(self.group)

    def engine(self, iterations: int, *, config: EDGCConfig | None = None, embeddings: Collection[str] = ()) -> Engine:
        """An engine for tensors of the parameters' shapes, with error feedback of its own.

        Args:
            iterations: number of its iterations in the run.
            config: other settings than the replica's.
            embeddings: names of the parameters that are embeddings.

        Raises:
            UserError: the replica's own settings follow the training loss, which no engine of a strategy is told.
        """
        if config is None and getattr(self.config, "policy", None) == "loss":
            raise UserError("policy loss is told no loss under a strategy", fix="use policy cqm, or no strategy")
        # Not an import statement: settings, and the tables that read them, are not made again for another engine.
        library: Any = importlib.import_module("edgc.engine")
        config = config or self.config
        matrices = []
        for name, parameter in self.parameters.items():
            shape, bits = as_matrix(parameter).shape, 8 * parameter.element_size()
            if compressible(shape, config.min_compression_elements, bits):
                matrices.append(library.Matrix(shape[0], shape[1], bits, name in embeddings))
        engine: Engine = library.Engine(
            config,
            stage=0,
            stages=[matrices],
            iterations=iterations,
            exchange_group=self.group,
            open_channel=self.open_channel,
            embeddings=embeddings,
        )
        self.engines.append(engine)
        return engine


class Strategy:
    """What replicas exchange, and when.

    Attributes:
        step: optimizer steps that have been taken.
    """

    step: int = 0

    def reduces(self, step: int) -> bool:
        """True if the gradients of this step, counted from 1, are averaged before the optimizer."""
        return False

    def before_step(self, gradients: Mapping[str, Tensor]) -> Asked:
        """Prepare the gradients that the optimizer steps with.

        Args:
            gradients: by parameter name, in the parameters' shapes; overwritten by what the optimizer is to see.

        Returns:
            False if the optimizer is not to step: the same answer on every replica.
        """
        yield from ()
        return True

    def after_step(self) -> Steps:
        """Finish a step that the optimizer has taken, or should have; counts it."""
        self.step += 1
        yield from ()

    def shared_state(self) -> dict[str, Any]:
        """State that is the same on every replica; it is saved once."""
        return {"step": self.step}

    def own_state(self) -> dict[str, Any]:
        """State that is this replica's own; a run of another number of replicas begins without, or with another's."""
        return {}

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Go on from a saved state; ``own`` is None on a replica that had none."""
        need(shared, ("step",), "shared")
        self.step = int(shared["step"])


def restore(tensors: Mapping[str, Tensor], state: Mapping[str, Any], where: str, key: str) -> None:
    """Overwrite ``tensors`` by those that ``state``, which is called ``where`` in the whole, has under ``key``.

    Raises:
        UserError: it does not have them all, or in other shapes; nothing was overwritten.
    """
    need(state, (key,), where)
    need(state[key], tensors, f"{where}.{key}")
    for name, tensor in tensors.items():
        shape = getattr(state[key][name], "shape", None)
        if shape != tensor.shape:
            found = "no tensor" if shape is None else tuple(shape)
            what = f"the saved state's {where}.{key}.{name} is {found}, and here it is {tuple(tensor.shape)}"
            raise UserError(what, fix="load the state of this very model")
    for name, tensor in tensors.items():
        tensor.copy_(state[key][name])


def finished(steps: Generator[None, None, T]) -> T:
    """Run a generator of the contract to its end; returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            answer: T = end.value
            return answer


def as_matrix(tensor: Tensor) -> Tensor:
    """A view in which a parameter is compressed: of more than two dimensions the first one by the rest."""
    return tensor.flatten(1) if tensor.dim() > 2 else tensor


def gradients_of(tensors: Mapping[str, Tensor]) -> list[Gradient]:
    """Named tensors as an engine takes them, which writes into them; those of more than two dimensions leave no gaps in
    memory, in whose order they are compressed, as in DDP's buckets."""
    return [Gradient(name, as_matrix(_in_order(tensor))) for name, tensor in tensors.items()]


def _in_order(tensor: Tensor) -> Tensor:
    if tensor.dim() <= 2 or tensor.is_contiguous():
        return tensor
    return tensor.as_strided(tensor.shape, torch.empty(tensor.shape, device="meta").stride())


def dense_bytes(shapes: Sequence[Sequence[int]], world: int) -> float:
    """Bytes that each of ``world`` replicas sends to average fp32 tensors of these shapes."""
    return float(sum(all_reduce_bytes(4 * math.prod(shape), world) for shape in shapes))


def all_finite(tensors: Mapping[str, Tensor]) -> bool:
    """True if every entry is finite; the same on all replicas for what was averaged. On a GPU the host waits."""
    first = next(iter(tensors.values()), None)
    return first is None or bool(finite(tensors.values(), first.device))


def refuse_other_types(config: object, strategy: object, where: str) -> None:
    """Refuse what is no settings, as a name or a mapping: the error at its first use would not say what to give."""
    for key, value, kind, fix in (
        ("config", config, EDGCConfig, "give EDGCConfig(method=...) or EDGCConfig.from_dict({...})"),
        ("strategy", strategy, StrategyConfig, 'give StrategyConfig.from_dict({"name": ...}), or None'),
    ):
        if not isinstance(value, kind) and not (value is None and key == "strategy"):
            raise UserError(f"{key} is of type {type(value).__name__}, not {kind.__name__}", where=where, fix=fix)


def strategies() -> tuple[type[StrategyConfig], ...]:
    """The type of every strategy, in the order of their names: those of the files in ``edgc/strategies``."""
    _import_all()
    kinds = [kind for kind in subclasses(StrategyConfig) if kind.name]
    return tuple(sorted(kinds, key=lambda kind: kind.name))


@cache
def _import_all() -> None:
    package = importlib.import_module("edgc.strategies")
    for info in pkgutil.iter_modules(package.__path__, "edgc.strategies."):
        importlib.import_module(info.name)
