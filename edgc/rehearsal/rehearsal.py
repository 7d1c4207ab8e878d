"""W replicas of one model in one process: the same engines, strategies and bytes as between W processes."""

from __future__ import annotations

import contextlib
import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edgc.checkpoints.saved_state import merge
from edgc.checks import integer, need, number
from edgc.compressors.base import Gradient
from edgc.config import EDGCConfig, refuse_stages
from edgc.engine import Engine
from edgc.entropy.meter import embeddings
from edgc.errors import UserError
from edgc.rehearsal.checks import WHERE, checked, refuse_other_names, refuse_times
from edgc.rehearsal.copies import Buffers, copy_into, side_by_side
from edgc.rehearsal.report import Report, distance, size
from edgc.runtime.channel import after_sum, all_reduce_bytes, before_sum
from edgc.runtime.device import own_modes
from edgc.runtime.local import Room
from edgc.strategies.base import Replica, Strategy, StrategyConfig, finished, gradients_of, refuse_other_types

T = TypeVar("T")
Loss = Callable[[nn.Module, Any], Tensor]
Clip = Callable[[torch.optim.Optimizer], object]


def model_loss(model: nn.Module, batch: Any) -> Tensor:
    """Loss of a model that computes it itself, as those of Hugging Face do: ``model(**batch).loss``, or what a model
    returns that is one number."""
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, (tuple, list)) else model(batch)
    loss = getattr(output, "loss", output)
    if not _one_number(loss):
        fix = "give loss=..., a function of the model and a batch"
        raise UserError(f"the model returned {type(output).__name__}, which is no loss", where=WHERE, fix=fix)
    return loss


def _one_number(loss: object) -> bool:
    return isinstance(loss, Tensor) and loss.numel() == 1


class Rehearsal:
    """Training of ``replicas`` replicas of ``model``, one after another on its device.

    Replicas that stay equal after every step share one set of weights and one optimizer; others have their own. Losses,
    bytes and states are those of as many processes over gloo: bit for bit with two, up to the order of sums with more.
    As under DDP, a forward pass begins with the first replica's buffers. Replica w draws the random numbers that follow
    ``torch.manual_seed(torch.initial_seed() + w)``. A step with a gradient that is not finite is left out.

    Args:
        model: on its device, in training or evaluation mode; trained in place. Its replicas start from its weights.
        optimizer: of the model's parameters, and of no others; copied where replicas have their own, which follow what
            a scheduler does to this one.
        config: how what is exchanged is compressed; by default not at all.
        strategy: what is exchanged, and when; by default the gradients of every step.
        replicas: W, at least 2.
        iterations: length of the run in steps, which warm-up is a share of.
        loss: of a model and a batch; by default :func:`model_loss`.
        micro_batches: how many a batch is a list of, whose mean gradient counts; 1: a batch is no such list.
        clip: norm to which each replica's gradient is clipped, after it was averaged if it is, and before the strategy
            sees it, as where a loop clips between backward and the optimizer's step, or a function that clips the
            gradients of what an optimizer steps; None does not clip.
        buckets: names of the parameters that are averaged together, in the order of these; by default as DDP cuts them.
        observer: called with replica, iteration and its gradients before they are averaged.

    Raises:
        UserError: there is something that cannot be rehearsed.
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
        micro_batches: int = 1,
        clip: float | Clip | None = None,
        buckets: Sequence[Sequence[str]] | None = None,
        observer: Callable[[int, int, Sequence[Gradient]], None] | None = None,
    ) -> None:
        self.replicas = integer("replicas", replicas, 2)
        self.micro_batches = integer("micro_batches", micro_batches, 1)
        iterations = integer("iterations", iterations, 1)
        self.config = config or EDGCConfig()
        refuse_other_types(self.config, strategy, "edgc.rehearsal")
        if clip is not None and not callable(clip):
            number("clip", clip, 0, open_low=True)
        self.loss, self.clip = loss, clip
        self.device = checked(model, optimizer)
        refuse_times(self.config)
        refuse_stages(self.config, WHERE, "a rehearsal")
        self.room = Room(self.replicas, self.device)
        self.taken = self.skipped = 0
        self.entropy = self.mean_error = math.nan
        settings = strategy or StrategyConfig.from_dict("every_step")
        self._shared = settings.equal == "step"
        self.models, self.optimizers = [model], [optimizer]
        if not self._shared:
            copies = [copy.deepcopy((model, optimizer)) for _ in range(self.replicas - 1)]
            self.models += [each for each, _ in copies]
            self.optimizers += [each for _, each in copies]
        self._parameters = [{name: p for name, p in each.named_parameters() if p.requires_grad} for each in self.models]
        tables = embeddings(model)
        looked_up = {name for name, p in self._parameters[0].items() if p in tables}
        self._members = [
            Replica(
                self._parameters[self._copy(rank)],
                self.config,
                iterations,
                self.optimizers[self._copy(rank)],
                open_channel=self.room.opener(rank),
                embeddings=looked_up,
            )
            for rank in range(self.replicas)
        ]
        self.strategies: list[Strategy] = self._together(lambda rank: settings.build(self._members[rank]))
        self.engines: list[Engine] = []
        if any(self.strategies[0].reduces(step) for step in range(1, iterations + 1)):
            # What a strategy with replicas of their own averages before its rounds is not what it compresses.
            plain = self.config if self._shared else EDGCConfig()
            self.engines = self._together(
                lambda rank: self._members[rank].engine(iterations, config=plain, embeddings=looked_up)
            )
        if observer is not None:
            for rank, engine in enumerate(self.engines):
                engine.observer = lambda iteration, gradients, rank=rank: observer(rank, iteration, gradients)
        if buckets is not None:
            refuse_other_names(buckets, self._parameters[0])
        self._recuts = buckets is None  # after the first backward
        # As DDP has them until it knows how backward goes.
        self._buckets = [[*bucket] for bucket in buckets or [list(self._parameters[0])]]
        self._generators = [torch.device("cpu")]  # devices whose generators a model draws from
        if self.device.type == "cuda":
            self._generators.append(self.device)
        seeds = [(torch.initial_seed() + rank) % 2**64 for rank in range(self.replicas)]
        self._random = [[torch.Generator(d).manual_seed(seed).get_state() for d in self._generators] for seed in seeds]

    def _copy(self, rank: int) -> int:
        """Index of the model of a replica."""
        return 0 if self._shared else rank

    @own_modes()
    def _together(self, function: Callable[[int], T]) -> list[T]:
        """``function(rank)`` of every replica, which meet in collectives."""
        return self.room.run(own_modes()(function))

    @property
    def bytes(self) -> float:
        """Bytes that a replica has sent so far."""
        return sum(self._sent().values())

    @property
    def dense_bytes(self) -> int:
        """Bytes that a replica would send in a step without compression: gradients as they are, all-reduced."""
        return sum(all_reduce_bytes(p.nbytes, self.replicas) for p in self._parameters[0].values())

    def step(self, batches: Iterable[Any]) -> float:
        """Train one step on one batch a replica; returns the mean of their losses.

        Args:
            batches: one a replica, each what ``loss`` takes, or with several ``micro_batches`` a sequence of these.

        Raises:
            UserError: there are not as many batches as replicas, or micro-batches as were said, or ``loss`` returned
                something else.
        """
        batches = list(batches)
        self._check_batches(batches)
        step = self.taken + 1
        came: list[str] = []  # names in the order in which backward comes by them, in which DDP cuts its buckets anew
        buffers = Buffers(self.models)
        losses, gradients, used = [], [], set()
        with self._noting(came) if self.taken == 0 and self._recuts else contextlib.nullcontext():
            for rank, batch in enumerate(batches):
                with buffers.of(self._copy(rank), rank):
                    losses.append(self._backward(rank, batch))
                used |= {name for name, p in self._parameters[self._copy(rank)].items() if p.grad is not None}
                gradients.append(self._taken_gradients(rank))
        reduces = bool(self.engines) and self.strategies[0].reduces(step)
        skipped = reduces and any(self._together(lambda rank: self._reduce(rank, gradients[rank])))
        if came:
            self._buckets = self._cut([*dict.fromkeys(came), *(name for name in gradients[0] if name not in came)])
        if self.clip is not None:
            for rank, gradient in enumerate(gradients):
                self._clip(rank, gradient, self.clip)
        asked = self._together(lambda rank: finished(self.strategies[rank].before_step(gradients[rank])))
        skipped = skipped or not asked[0]
        # DDP leaves parameters alone that no replica has used, but a direction is all parameters'.
        unused = self._parameters[0].keys() - used if reduces or not self._shared else set()
        for index, (parameters, optimizer) in enumerate(zip(self._parameters, self.optimizers, strict=True)):
            for name, p in parameters.items():
                p.grad = None if name in unused else gradients[index].get(name)
            if not skipped:
                self._step_optimizer(optimizer)
            optimizer.zero_grad(set_to_none=True)
        self._together(lambda rank: finished(self.strategies[rank].after_step()))
        self.taken, self.skipped = step, self.skipped + skipped
        self._measure()
        told = [float(loss) for loss in losses]
        for engine, loss in zip(self.engines, told, strict=False):  # a strategy may have none
            engine.add_loss(loss)
        return sum(told) / self.replicas

    def _check_batches(self, batches: Sequence[Any]) -> None:
        if len(batches) != self.replicas:
            fix = f"give {self.replicas}, one a replica"
            raise UserError(f"step was given {len(batches)} batches", where=WHERE, fix=fix)
        if self.micro_batches > 1:
            for rank, batch in enumerate(batches):
                if not isinstance(batch, (list, tuple)) or len(batch) != self.micro_batches:
                    found = f"{len(batch)}" if isinstance(batch, (list, tuple)) else type(batch).__name__
                    what = f"the batch of replica {rank} is not a list of {self.micro_batches} micro-batches"
                    raise UserError(f"{what} but {found}", where=WHERE, fix="give as many as micro_batches says")

    def _step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group, first in zip(optimizer.param_groups, self.optimizers[0].param_groups, strict=True):
            group.update({key: value for key, value in first.items() if key != "params"})
        optimizer.step()

    def _cut(self, names: Sequence[str]) -> list[list[str]]:
        """Buckets of DDP's usual sizes: what is compressed together decides about rounding."""
        parameters: list[Tensor] = [self._parameters[0][name] for name in names]
        indices, _ = dist._compute_bucket_assignment_by_size(parameters, [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20])
        return [[names[index] for index in bucket] for bucket in indices]

    def _backward(self, rank: int, batch: Any) -> Tensor:
        """Gradients of a replica's batch, added up in its parameters; its loss, which stays on the device."""
        model, total = self.models[self._copy(rank)], torch.zeros((), device=self.device)
        with self._own_random(rank):
            for each in batch if self.micro_batches > 1 else [batch]:
                loss = self.loss(model, each)
                if not _one_number(loss):
                    fix = "return a tensor of one number"
                    raise UserError(f"loss returned {type(loss).__name__}, which is no loss", where=WHERE, fix=fix)
                loss = loss / self.micro_batches
                loss.backward()
                total += loss.detach().view(())
        return total

    def _taken_gradients(self, rank: int) -> dict[str, Tensor]:
        gradients = {}
        for name, p in self._parameters[self._copy(rank)].items():
            if p.grad is not None and p.grad.layout != torch.strided:
                fix = "make the embedding without sparse=True"
                raise UserError(f"the gradient of {name} is sparse", where=WHERE, fix=fix)
            gradients[name] = torch.zeros_like(p) if p.grad is None else p.grad
            p.grad = None
        return gradients

    def _clip(self, rank: int, gradients: Mapping[str, Tensor], clip: float | Clip) -> None:
        parameters = self._parameters[self._copy(rank)]
        for name, p in parameters.items():
            p.grad = gradients[name]
        if callable(clip):
            clip(self.optimizers[self._copy(rank)])
        else:
            nn.utils.clip_grad_norm_(parameters.values(), clip)
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
        before = self._random_states()
        self._set_random(self._random[rank])
        try:
            yield
        finally:
            self._random[rank] = self._random_states()
            self._set_random(before)

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._generators[1:])]

    def _set_random(self, states: Sequence[Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], self._generators[1:], strict=True):
            torch.cuda.set_rng_state(state, device)

    def _reduce(self, rank: int, gradients: Mapping[str, Tensor]) -> bool:
        """Average a step's gradients; returns whether it is given up."""
        engine = self.engines[rank]
        for bucket in self._buckets:
            copies = side_by_side({name: gradients[name] for name in bucket})
            engine.reduce(gradients_of(copies), None)
            copy_into(gradients, copies)
        given_up = engine.given_up or not all(bool(tensor.isfinite().all()) for tensor in gradients.values())
        engine.end_iteration(skipped=given_up)
        return given_up

    def _measure(self) -> None:
        """Remember the last measurements, which most steps have none of."""
        for last in (engine.last for engine in self._members[0].engines if engine.last is not None):
            self.entropy = _known(last.entropy, _known(last.entropy_full, self.entropy))
            self.mean_error = _known(last.mean_error, self.mean_error)

    @torch.no_grad()
    def averaged(self) -> nn.Module:
        """A copy of the model with the mean of the replicas' weights, and the first one's buffers: what is evaluated
        and saved."""
        model, means = copy.deepcopy(self.models[0]), self.mean_weights()
        for name, p in model.named_parameters():
            if name in means:
                p.copy_(means[name])
        return model

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
        """Copy of the state of all replicas, to go on exactly with :meth:`load_state_dict` of a rehearsal that was made
        alike."""
        in_use = {
            "models": [model.state_dict() for model in self.models],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "shared": self.strategies[0].shared_state(),
            "own": [strategy.own_state() for strategy in self.strategies],
            "random": self._random,
            "buckets": self._buckets,
        }
        return {
            "taken": self.taken,
            "skipped": self.skipped,
            "measured": {"sent": self._sent(), "entropy": self.entropy, "mean_error": self.mean_error},
            "engines": [engine.state_dict() for engine in self.engines],  # copies
            **copy.deepcopy(in_use),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`, also of another number of replicas: error feedback of averaged gradients is
        then redistributed, as under DDP, and what else was each one's own begins anew."""
        keys = ("taken", "skipped", "measured", "models", "optimizers", "engines", "shared", "own", "random", "buckets")
        need(state, keys, "state")
        if bool(state["engines"]) != bool(self.engines):
            averages = "averages gradients" if self.engines else "averages no gradients"
            what = f"the saved state is of another strategy, and this one {averages}"
            raise UserError(what, where=WHERE, fix="make the rehearsal with the same")
        state = copy.deepcopy(dict(state))
        self.entropy, self.mean_error = state["measured"]["entropy"], state["measured"]["mean_error"]
        for sent in self.room.sent:
            sent.clear()
            sent.update(state["measured"]["sent"])
        self.taken, self.skipped, self._buckets = state["taken"], state["skipped"], state["buckets"]
        same = len(state["own"]) == self.replicas
        for index, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            model.load_state_dict(state["models"][index % len(state["models"])])
            optimizer.load_state_dict(copy.deepcopy(state["optimizers"][index % len(state["optimizers"])]))
        for rank, strategy in enumerate(self.strategies):
            strategy.load_state(copy.deepcopy(state["shared"]), state["own"][rank] if same else None)
        engines = state["engines"]
        if same:
            self._random = state["random"]
        elif engines:
            engines = [merge([{"engine": each} for each in engines])["engine"]] * self.replicas
        for engine, saved in zip(self.engines, engines, strict=True):
            engine.load_state_dict(copy.deepcopy(saved))

    def _sent(self) -> dict[str, float]:
        """Bytes that a replica has sent so far, by kind of collective, in the mean of all."""
        sent: Counter[str] = sum(self.room.sent, Counter())
        return {kind: count / self.replicas for kind, count in sent.items()}

    def report(self) -> Report:
        """Measurements of the steps so far."""
        measured = [engine.last for engine in self._members[0].engines if engine.last is not None]
        return Report(
            replicas=self.replicas,
            steps=self.taken,
            skipped=self.skipped,
            bytes={kind: count / max(1, self.taken) for kind, count in self._sent().items()},
            dense_bytes=self.dense_bytes,
            rank=next((last.rank for last in measured if last.rank is not None), None),
            entropy=self.entropy,
            mean_error=self.mean_error,
            gap=distance(self._parameters[0], self._parameters[1:]),
            memory=self._memory(),
        )

    def _memory(self) -> dict[str, tuple[int, int]]:
        weights = [[*model.parameters(), *model.buffers()] for model in self.models]
        gradients = sum(p.nbytes for p in self._parameters[0].values())
        states = [list(optimizer.state.values()) for optimizer in self.optimizers]
        engines = [engine.state_dict() for engine in self.engines]
        strategies = [[each.shared_state(), each.own_state()] for each in self.strategies]
        found: dict[str, list[Any]] = {
            "weights": weights,
            "optimizer": states,
            "compression": engines,
            "strategy": strategies,
        }
        sizes = {what: (size(each), size(each[:1])) for what, each in found.items()}
        return {**sizes, "gradients": (self.replicas * gradients, gradients)}


def _known(value: float, other: float) -> float:
    """``value`` where it was measured, else the ``other``."""
    return value if math.isfinite(value) else other
