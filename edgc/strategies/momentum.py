"""Base of strategies that exchange momenta: gradients stay local, and replicas agree on the direction of every step.

The direction takes the gradients' place, so that the base optimizer is plain SGD: it applies its rate and its weight
decay, which for directions that do not depend on the rate is AdamW's. A limit on the norm of gradients is each
replica's own, of its local gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from edgc.compressors.base import Channel, Steps, finite
from edgc.compressors.dense import dense_steps
from edgc.errors import UserError
from edgc.lazy import Tensor, torch
from edgc.strategies.base import Replica, Strategy, restore
from edgc.strategies.chunks import wide

Named = dict[str, Tensor]


class MomentumStrategy(Strategy):
    """State by its kind and name, and what every such strategy refuses.

    State changes only once a step is known to be finite on all replicas; what is made before lies in the gradients.

    Attributes:
        shared: state that is the same on every replica.
        own: state of this replica; a run of another number of replicas begins with zeros.
    """

    def __init__(self, name: str, replica: Replica) -> None:
        replica.refuse_compression(name)
        _refuse_momentum(name, replica.optimizer)
        self.replica, self.parameters = replica, replica.parameters
        self.shared: dict[str, Named] = {}
        self.own: dict[str, Named] = {}

    def zeros(self, names: Iterable[str] | None = None) -> Named:
        """Zeros of the parameters' shapes, of at least fp32."""
        chosen = self.parameters if names is None else {name: self.parameters[name] for name in names}
        return {name: p.detach().new_zeros(p.shape, dtype=wide(p)) for name, p in chosen.items()}

    def averaged(self, tensors: Iterable[Tensor], channel: Channel | None = None) -> Steps:
        """Average tensors in place; wait for it, and for what else was started in ``channel``."""
        channel = channel or self.replica.channel()
        messages = dense_steps(list(tensors), channel)
        next(messages)
        yield
        channel.finish()
        next(messages, None)

    def shared_state(self) -> dict[str, Any]:
        return {**super().shared_state(), **self.shared}

    def own_state(self) -> dict[str, Any]:
        return dict(self.own)

    def load_state(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        super().load_state(shared, own)
        for kind, tensors in self.shared.items():
            restore(tensors, shared, "shared", kind)
        for kind, tensors in self.own.items():
            if own is not None:
                restore(tensors, own, "own", kind)
            else:
                for tensor in tensors.values():
                    tensor.zero_()


def poison(message: Tensor, gradients: Mapping[str, Tensor]) -> None:
    """Make a message NaN unless this replica's gradients are finite, so that the step is void on all of them."""
    message.masked_fill_(~finite(gradients.values(), message.device), torch.nan)


def _refuse_momentum(name: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Refuse what would make a momentum, or a second moment, of directions that come from one."""
    if optimizer is None:
        return
    plain = isinstance(optimizer, torch.optim.SGD) and not any(group["momentum"] for group in optimizer.param_groups)
    if not plain:
        what = f"strategy {name} makes the direction itself, and {type(optimizer).__name__} would make another of it"
        raise UserError(what, fix="step with torch.optim.SGD(..., momentum=0)")
