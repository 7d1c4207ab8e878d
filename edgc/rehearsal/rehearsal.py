"""W replicas of one model in one process: the same engines, strategies and bytes as between W processes."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgc.checks import integer
from edgc.compressors.base import Gradient
from edgc.config import EDGCConfig
from edgc.engine import Engine
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.runtime.channel import after_sum, all_reduce_bytes, before_sum
from edgc.runtime.device import own_modes
from edgc.runtime.local import Room
from edgc.strategies.base import Replica, Strategy, StrategyConfig, as_matrix, finished

T = TypeVar("T")
Loss = Callable[[nn.Module, Any], Tensor]


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Loss of a model that computes it itself, as those of Hugging Face do: ``model(**batch).loss``, or what a model
    returns that is a tensor."""
    output = (
        model(**batch)
        if isinstance(batch, Mapping)
        else model(*batch)
        if isinstance(batch, (tuple, list))
        else model(batch)
    )
    loss = getattr(output, "loss", output)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        fix = "give Rehearsal(loss=...), a function of the model and a batch"
        raise UserError(f"the model returned {type(output).__name__}, which is no loss", fix=fix)
    return loss


@dataclass(frozen=True)
class Report:
    """Measurements of the steps so far, of one replica where it is not said otherwise.

    Attributes:
        replicas, steps, skipped: how many there were; a step or round with a gradient that is not finite is skipped.
        bytes: sent a step, by kind of collective.
        dense_bytes: of a step without compression: fp32 (or the parameters' type), all-reduced.
        rank: of the last step; None where nothing is of low rank.
        entropy: of the last window, in nats; nan where it was not measured.
        mean_error: what the mean of the replicas' gradients lacked in the last window, relative to it; nan if unknown.
        gap: largest distance of a replica's weights from the first one's, relative to them; 0 where they are equal.
        memory: bytes that all replicas' weights, optimizers and states take here, and those of a replica by itself.
    """

    replicas: int
    steps: int
    skipped: int
    bytes: Mapping[str, float]
    dense_bytes: float
    rank: int | None
    entropy: float
    mean_error: float
    gap: float
    memory: tuple[int, int]

    @property
    def share(self) -> float:
        """Bytes sent, as a share of a dense all-reduce at every step."""
        return sum(self.bytes.values()) / self.dense_bytes if self.dense_bytes else math.nan

    def __str__(self) -> str:
        lines = [f"{self.replicas} replicas, {self.steps} steps, {self.skipped} skipped"]
        lines.append(f"sent a step: {sum(self.bytes.values()):,.0f} bytes, {self.share:.2%} of a dense all-reduce")
        lines += [f"  {kind}: {count:,.0f}" for kind, count in sorted(self.bytes.items())]
        if self.rank is not None:
            lines.append(f"rank {self.rank}")
        for name, value, unit in (("entropy", self.entropy, " nats"), ("error of the mean", self.mean_error, "")):
            if math.isfinite(value):
                lines.append(f"{name} {value:.3f}{unit}")
        lines.append(f"gap between replicas {self.gap:.2e}")
        lines.append(
            f"memory: {self.memory[0] / 1e6:,.1f} MB here, {self.memory[1] / 1e6:,.1f} MB on each of the replicas"
        )
        return "\n".join(lines)


class Rehearsal:
    """Training of ``replicas`` replicas of ``model``, one after another on its device.

    Replicas that stay equal after every step share one set of weights and one optimizer; others have their own. Losses,
    bytes and states are those of as many processes over gloo: bit for bit with two, up to the order of sums with more.

    Args:
        model: on its device; trained in place. Its replicas start from its weights.
        optimizer: of the model's parameters; copied where replicas have their own.
        config: how what is exchanged is compressed; by default not at all.
        strategy: what is exchanged, and when; by default the gradients of every step.
        replicas: W, at least 2.
        iterations: length of the run in steps, which warm-up is a share of.
        loss: of a model and a batch; by default :func:`model_loss`.
        clip: norm to which each replica's gradient is clipped, after it was averaged if it is, and before the strategy
            sees it, as where a loop clips between backward and the optimizer's step; None does not clip.
        observer: called with replica, iteration and its gradients before they are averaged.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: torch.optim.Optimizer,
        config: EDGCConfig | None = None,
        strategy: StrategyConfig | None = None,
        replicas: int = 8,
        iterations: int = 1000,
        loss: Loss = model_loss,
        clip: float | None = None,
        observer: Callable[[int, int, Sequence[Gradient]], None] | None = None,
    ) -> None:
        self.replicas = integer("replicas", replicas, 2)
        self.config = config or EDGCConfig()
        self.loss, self.clip = loss, clip
        self.room = Room(replicas)
        self.taken = self.skipped = 0
        settings = strategy or StrategyConfig.from_dict("every_step")
        self._shared = settings.equal == "step"
        self.models, self.optimizers = [model], [optimizer]
        if not self._shared:
            copies = [copy.deepcopy((model, optimizer)) for _ in range(replicas - 1)]
            self.models += [each for each, _ in copies]
            self.optimizers += [each for _, each in copies]
        self._parameters = [{name: p for name, p in each.named_parameters() if p.requires_grad} for each in self.models]
        tables = embeddings(model)
        looked_up = {name for name, p in self._parameters[0].items() if p in tables}
        members = [
            Replica(
                self._parameters[self._copy(rank)],
                self.config,
                iterations,
                self.optimizers[self._copy(rank)],
                open_channel=self.room.opener(rank),
                embeddings=looked_up,
            )
            for rank in range(replicas)
        ]
        self.strategies: list[Strategy] = self.room.run(lambda rank: settings.build(members[rank]))
        self.engines: list[Engine] = []
        if any(self.strategies[0].reduces(step) for step in range(1, iterations + 1)):
            plain = self.config if self._shared else EDGCConfig()
            self.engines = self.room.run(
                lambda rank: members[rank].engine(iterations, config=plain, embeddings=looked_up)
            )
        self._buckets = self._cut(list(self._parameters[0]))[::-1]
        self._random = [
            torch.Generator().manual_seed(torch.initial_seed() + rank).get_state() for rank in range(replicas)
        ]

    def _copy(self, rank: int) -> int:
        """Index of the model of a replica."""
        return 0 if self._shared else rank

    def step(self, batches: Sequence[Any]) -> float:
        """Train one step on one batch a replica; returns the mean of their losses.

        Raises:
            UserError: there are not as many batches as replicas.
        """
        if len(batches) != self.replicas:
            fix = f"give {self.replicas}, one a replica"
            raise UserError(f"step was given {len(batches)} batches", where="edgc.rehearsal", fix=fix)
        step = self.taken + 1
        came: list[str] = []  # names in the order in which backward comes by them, in which DDP cuts its buckets anew
        with self._noting(came) if self.taken == 0 else contextlib.nullcontext():
            pairs = [self._backward(rank, batch) for rank, batch in enumerate(batches)]
        gradients = [gradient for _, gradient in pairs]
        skipped = False
        if self.engines and self.strategies[0].reduces(step):
            skipped = any(self.room.run(lambda rank: self._reduce(rank, gradients[rank])))
        if came:
            self._buckets = self._cut([*dict.fromkeys(came), *(name for name in gradients[0] if name not in came)])
        if self.clip is not None:
            for rank, own in enumerate(gradients):
                self._clip(rank, own, self.clip)
        asked = self.room.run(lambda rank: self._run(self.strategies[rank].before_step(gradients[rank])))
        skipped = skipped or not asked[0]
        for index, (parameters, optimizer) in enumerate(zip(self._parameters, self.optimizers, strict=True)):
            for name, p in parameters.items():
                p.grad = gradients[index].get(name)
            if not skipped:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.room.run(lambda rank: self._run(self.strategies[rank].after_step()))
        self.taken, self.skipped = step, self.skipped + skipped
        return sum(loss for loss, _ in pairs) / self.replicas

    def _cut(self, names: Sequence[str]) -> list[list[str]]:
        """Buckets of DDP's usual sizes: what is compressed together decides about rounding."""
        parameters: list[Tensor] = [self._parameters[0][name] for name in names]
        indices, _ = dist._compute_bucket_assignment_by_size(parameters, [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20])
        return [[names[index] for index in bucket] for bucket in indices]

    def _backward(self, rank: int, batch: Any) -> tuple[float, dict[str, Tensor]]:
        index = self._copy(rank)
        with self._own_random(rank):
            loss = self.loss(self.models[index], batch)
            loss.backward()
        gradients = {}
        for name, p in self._parameters[index].items():
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
        return float(loss.detach()), gradients

    def _clip(self, rank: int, gradients: Mapping[str, Tensor], norm: float) -> None:
        parameters = self._parameters[self._copy(rank)]
        for name, p in parameters.items():
            p.grad = gradients[name]
        nn.utils.clip_grad_norm_(parameters.values(), norm)
        for p in parameters.values():
            p.grad = None

    @contextlib.contextmanager
    def _noting(self, came: list[str]) -> Iterator[None]:
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: came.append(name))
            for name, p in self._parameters[0].items()
        ]
        try:
            yield
        finally:
            for each in hooks:
                each.remove()

    @contextlib.contextmanager
    def _own_random(self, rank: int) -> Iterator[None]:
        """Each replica draws its own random numbers, as processes with seeds of their own do."""
        before = torch.get_rng_state()
        torch.set_rng_state(self._random[rank])
        try:
            yield
        finally:
            self._random[rank] = torch.get_rng_state()
            torch.set_rng_state(before)

    def _reduce(self, rank: int, gradients: Mapping[str, Tensor]) -> bool:
        """Average a step's gradients; returns whether it is given up."""
        engine = self.engines[rank]
        for bucket in self._buckets:
            engine.reduce([Gradient(name, as_matrix(gradients[name])) for name in bucket], None)
        given_up = engine.given_up or not all(bool(tensor.isfinite().all()) for tensor in gradients.values())
        engine.end_iteration(skipped=given_up)
        return given_up

    @staticmethod
    @own_modes()
    def _run(steps: Generator[None, None, T]) -> T:
        return finished(steps)

    def mean_weights(self) -> dict[str, Tensor]:
        """Means of the replicas' parameters by name, which are evaluated where replicas are never equal."""
        means = {}
        for name in self._parameters[0]:
            shares = [each[name].detach().clone() for each in self._parameters]
            for share in shares:
                before_sum(share, len(shares))
            mean = shares[0]
            for share in shares[1:]:
                mean += share
            after_sum(mean, len(shares))
            means[name] = mean
        return means

    def state_dict(self) -> dict[str, Any]:
        """State of all replicas, to go on exactly with :meth:`load_state_dict` of a rehearsal that was made alike."""
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "engines": [engine.state_dict() for engine in self.engines],
            "shared": self.strategies[0].shared_state(),
            "own": [strategy.own_state() for strategy in self.strategies],
            "random": self._random,
            "buckets": self._buckets,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, also of another number of replicas where they were equal: what was each one's
        own, error feedback among it, then begins anew."""
        state = copy.deepcopy(dict(state))
        self.taken, self.skipped, self._buckets = state["taken"], state["skipped"], state["buckets"]
        same = len(state["own"]) == self.replicas
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.load_state_dict(state["models"][index % len(state["models"])])
            optimizer.load_state_dict(state["optimizers"][index % len(state["optimizers"])])
        for rank, strategy in enumerate(self.strategies):
            strategy.load_state(copy.deepcopy(state["shared"]), state["own"][rank] if same else None)
        if same:
            self._random = state["random"]
            for engine, saved in zip(self.engines, state["engines"], strict=True):
                engine.load_state_dict(saved)

    def report(self) -> Report:
        """Measurements of the steps so far."""
        sent: Counter[str] = sum(self.room.sent, Counter())
        dense = sum(all_reduce_bytes(p.nbytes, self.replicas) for p in self._parameters[0].values())
        engine = self.engines[0] if self.engines else getattr(self.strategies[0], "engine", None)
        last = None if engine is None else engine.last
        return Report(
            replicas=self.replicas,
            steps=self.taken,
            skipped=self.skipped,
            bytes={kind: count / self.replicas / max(1, self.taken) for kind, count in sent.items()},
            dense_bytes=dense,
            rank=None if last is None else last.rank,
            entropy=math.nan if last is None else last.entropy,
            mean_error=math.nan if last is None else last.mean_error,
            gap=self._gap(),
            memory=(0, 0),
        )

    def _gap(self) -> float:
        first, *others = self._parameters
        norm = math.sqrt(sum(float(p.detach().double().square().sum()) for p in first.values()))
        gaps = [
            math.sqrt(
                sum(float((p.detach() - other[name].detach()).double().square().sum()) for name, p in first.items())
            )
            for other in others
        ]
        return max(gaps, default=0.0) / norm if norm else 0.0
