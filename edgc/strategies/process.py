"""Strategies of replicas that are processes: what their drivers share (:mod:`edgc.ddp`, :mod:`edgc.megatron`).

What a strategy does before and after a step hangs on the hooks of torch's optimizer, after whatever the training loop
does to gradients and before whatever it does with new parameters. A closure is called before that, once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from edgc.checks import differences, need
from edgc.compressors.base import Steps, finite
from edgc.config import EDGCConfig
from edgc.errors import UserError
from edgc.lazy import Tensor, torch
from edgc.runtime.channel import Channel
from edgc.runtime.device import own_modes
from edgc.strategies.base import Asked, Replica, StrategyConfig, finished
from edgc.training_loop import scaler_steps


class ProcessStrategy:
    """Strategy of one rank of a job.

    Args:
        where: how messages call the driver.
        group: of the replicas of this rank's parameters.
        embeddings: names of the parameters that are embeddings.
        owners: what the optimizer steps, by name, where ``parameters`` are parts of that.

    Attributes:
        strategy: to be read only.
        parameters: those of this rank, by name.
        bytes: sent so far by this rank.
    """

    def __init__(
        self,
        where: str,
        parameters: Mapping[str, Tensor],
        config: EDGCConfig,
        settings: StrategyConfig,
        optimizer: torch.optim.Optimizer,
        iterations: int,
        group: torch.distributed.ProcessGroup,
        embeddings: Collection[str],
        owners: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.parameters, self.group, self.bytes, self._where = parameters, group, 0, where
        self._optimizer = optimizer
        self.strategy = settings.build(
            Replica(parameters, config, iterations, optimizer, group, self._open, embeddings, owners)
        )
        self._leaves_out = settings.equal != "step"  # parameters without a gradient, as an optimizer does by itself
        self._settings = {"strategy": settings.to_dict(), "compression": config.to_dict()}
        self._hooks: list[Any] = []
        self._looked = False  # for a GradScaler, at the first step
        self._within: Sequence[torch.distributed.ProcessGroup] = ()  # those of ranks that are this replica together
        self._device = torch.device("cpu")  # where they agree

    def _hang(self) -> None:
        """Let the strategy run around the optimizer's steps from now on."""
        self._hooks = [
            self._optimizer.register_step_pre_hook(self._begin),
            self._optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]

    def _open(self, *options: Any) -> Channel:
        return _Counted(self, *options)

    @property
    def reduces(self) -> bool:
        """True if the driver averages the gradients of the step under way."""
        return self.strategy.reduces(self.strategy.step + 1)

    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        loss = closure() if closure is not None else None
        if not self._looked and scaler_steps():
            raise _with_scaler(self._settings["strategy"]["name"], self._where)
        self._looked = True
        self._before_step()
        return None if closure is None else ((optimizer, lambda: loss), {})

    def _before_step(self) -> None:
        stepped, left_out = self._stepped(), []
        for p in stepped.values():
            if p.grad is None and self._leaves_out:
                left_out.append(p)
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        gradients = self._gradients(stepped)
        self._agree(list(gradients.values()))
        ready = self._run(self.strategy.before_step(gradients))
        for p in left_out if ready else stepped.values():
            p.grad = None

    @own_modes()
    def _agree(self, gradients: Sequence[Tensor]) -> None:
        """Make all gradients of this replica NaN if one of them, on any of its ranks, is not finite."""
        if self._within:
            good = finite(gradients, self._device).float()
            for group in self._within:
                torch.distributed.all_reduce(good, op=torch.distributed.ReduceOp.MIN, group=group)
            for gradient in gradients:
                gradient.masked_fill_(good == 0, torch.nan)

    # What differs where ``parameters`` are parts of what the optimizer steps (edgc.fsdp).

    def _stepped(self) -> Mapping[str, Tensor]:
        return self.parameters

    def _gradients(self, stepped: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: p.grad for name, p in stepped.items() if p.grad is not None}

    def _after_step(self) -> None:
        self._run(self.strategy.after_step())

    @own_modes()
    def _run(self, steps: Asked | Steps) -> bool | None:
        step = self.strategy.step + 1
        try:
            return finished(steps)
        except torch.OutOfMemoryError:  # which programs know by its type
            raise
        except RuntimeError as error:
            # What a backend says of a lost peer names neither the rank nor the step.
            rank, name = torch.distributed.get_rank(), self._settings["strategy"]["name"]
            what = f"edgc: strategy {name} stopped on rank {rank} in step {step}"
            raise RuntimeError(f"{what}: {type(error).__name__}: {' '.join(str(error).split())}") from error

    def mean_weights(self) -> dict[str, Tensor]:
        """Means of the replicas' parameters by name, which are evaluated where replicas are never equal. To be called
        on every rank; not counted."""
        means = {name: p.detach().clone() for name, p in self.parameters.items()}
        channel = Channel(self.group)
        for mean in means.values():
            channel.mean_(mean)
        channel.finish()
        return means

    def state_dict(self) -> dict[str, Any]:
        """State that this rank needs, besides model and optimizer, to go on exactly: save one per rank.

        ``shared`` is the same on every replica. Tensors are those in use, as in an optimizer's state: what is kept in
        memory and not saved is to be copied.
        """
        shared, own = self.strategy.shared_state(), self.strategy.own_state()
        place = {"world": self.group.size(), "rank": self.group.rank()}
        return {"settings": self._settings, **place, "shared": shared, "own": own, "norm": self._norm()}

    def _norm(self) -> float:
        """Norm of this rank's weights, by which they are known again."""
        norms = [torch.linalg.vector_norm(p.detach(), dtype=torch.float64) for p in self.parameters.values()]
        return float(torch.linalg.vector_norm(torch.stack([norm.cpu() for norm in norms]))) if norms else 0.0

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict` of this rank, or of that of any replica where the number of replicas has
        changed: what is a replica's own is then left out. The model has its weights by then.

        Warns:
            UserWarning: where it has others.
        """
        need(state, ("settings", "world", "rank", "shared", "own"), "state")
        if changes := differences(state["settings"], self._settings):
            what = f"the saved state is of other settings: {changes}"
            raise UserError(what, where=self._where, fix="register with the same")
        same = state["world"] == self.group.size()
        if same and state["rank"] != self.group.rank():
            what = f"the saved state is of rank {state['rank']}, but this is rank {self.group.rank()}"
            raise UserError(what, where=self._where, fix="save and load one state per rank")
        if same and "norm" in state and not math.isclose(state["norm"], self._norm(), rel_tol=1e-9, abs_tol=1e-30):
            what = f"{self._where}: replica {state['rank']} has other weights than the state was saved with"
            fix = "load its own first, and after DistributedDataParallel(...), which sends rank 0's to all"
            warnings.warn(f"{what}; {fix}", stacklevel=2)
        self.strategy.load_state(state["shared"], state["own"] if same else None)

    def _let_go(self) -> None:
        """Leave the optimizer's steps alone from now on."""
        while self._hooks:
            self._hooks.pop().remove()


def refuse_loop(settings: StrategyConfig, optimizer: object, scaler: object, *, where: str) -> None:
    """Refuse a training loop whose steps a strategy cannot follow."""
    if optimizer is None:
        raise UserError(f"strategy {settings.name} needs the optimizer", where=where, fix="give optimizer=...")
    refuse_no_optimizer(where, optimizer)
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # one around another, as Accelerate's
        what = f"optimizer is a {type(optimizer).__name__}, whose steps cannot be followed"
        raise UserError(what, where=where, fix="give the one inside it (optimizer.optimizer)")
    if scaler not in (None, False):
        raise _with_scaler(settings.name, where)


def _with_scaler(name: str, where: str) -> UserError:
    what = "cannot be used with a GradScaler, which leaves out steps of one replica alone"
    return UserError(f"strategy {name} {what}", where=where, fix="train in bf16 without one")


def refuse_no_optimizer(where: str, optimizer: object) -> None:
    """Refuse what is no optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(f"optimizer = {optimizer!r} is no optimizer", where=where, fix="give one of torch.optim's kind")


def refuse_other_optimizer(where: str, parameters: Mapping[str, Tensor], optimizer: Any) -> None:
    """Refuse what is no optimizer, and one that does not step all ``parameters``."""
    refuse_no_optimizer(where, optimizer)
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, p in parameters.items():
        if id(p) not in stepped:
            fix = "give the one that steps every parameter to be trained"
            raise UserError(f"the optimizer does not step {name}", where=where, fix=fix)


class _Counted(Channel):
    """Channel whose bytes its handle counts as they are sent: an exchange may go on from one step to the next."""

    def __init__(self, handle: ProcessStrategy, *options: Any) -> None:
        super().__init__(*options)
        self.handle = handle

    def _count(self, kind: str, sent: int) -> None:
        super()._count(kind, sent)
        self.handle.bytes += sent
