"""One rank's reductions on copies: timed for the search of r_max, compared for the cost gate."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
import torch.distributed as dist

from edgc.compressors import Channel, Compressor, Gradient, Statistics
from edgc.runtime.groups import gather_objects
from edgc.timing import trial
from edgc.timing.cost_gate import CostGate, GateVerdict, GroupTimes, label, verdicts

Sent = Generator[None, None, int]


class Trials:
    """Trials of the current iteration, and the verdicts that follow from them.

    Args:
        make: a new compressor of the run's kind.
        stage: pipeline stage of this rank.
        gated: whether there is a cost gate.
        open_channel: what reductions are sent through.

    Attributes:
        gate: the verdicts in force; None without a cost gate.
    """

    def __init__(
        self, make: Callable[[], Compressor], stage: int, gated: bool, open_channel: Callable[..., Channel]
    ) -> None:
        self.make, self.stage, self.open_channel = make, stage, open_channel
        self.gate = CostGate() if gated else None
        self._tried: Compressor | None = None
        self.start_iteration()

    def start_iteration(self) -> None:
        self._probes: list[Statistics] = []
        self._compared: list[tuple[tuple[str, ...], trial.Comparison]] = []

    def end_search(self) -> None:
        """Give back the memory of the compressor that was timed."""
        self._tried = None

    def probe(
        self,
        gradients: Sequence[Gradient],
        group: dist.ProcessGroup | None,
        rank: int,
        shards: Sequence[torch.Tensor],
    ) -> Sent:
        """Time a reduction (rank 0: dense); the training step goes on as it is. Returns the bytes sent."""
        if self._tried is None:
            self._tried = self.make()
        channel = self._channel(group, shards)
        statistics = yield from trial.timed(self._tried, gradients, channel, rank or None)
        self._probes.append(statistics)
        return channel.bytes

    def compare(
        self,
        gradients: Sequence[Gradient],
        group: dist.ProcessGroup | None,
        rank: int,
        shards: Sequence[torch.Tensor],
    ) -> Sent:
        """Time a compressed and a dense reduction of this group, for the cost gate. Returns the bytes sent."""
        channel = self._channel(group, shards)
        comparison = yield from trial.compare(self.make, gradients, channel, rank)
        self._compared.append((tuple(gradient.name for gradient in gradients), comparison))
        return channel.bytes

    def _channel(self, group: dist.ProcessGroup | None, shards: Sequence[torch.Tensor]) -> Channel:
        return self.open_channel(group, [buffer.clone() for buffer in shards])

    @property
    def probe_seconds(self) -> float:
        """What the probes of this iteration took together."""
        return sum(trial.seconds(statistics) for statistics in self._probes)

    def judge(self, exchange_group: dist.ProcessGroup | None) -> tuple[GateVerdict, ...]:
        """Verdicts of all stages from the times of all ranks; this rank follows those of its stage from now on."""
        assert self.gate is not None
        groups = {label(names): names for names, _ in self._compared}
        times = [GroupTimes(label(names), *comparison.seconds) for names, comparison in self._compared]
        made = verdicts(gather_objects((self.stage, times), exchange_group))
        self.gate.follow([verdict for verdict in made if verdict.stage == self.stage], groups)
        return made
