"""Injected delay: a link that takes as long as one of a chosen bandwidth would, on top of what the real one takes.

Nothing is emulated below the collectives: whoever waits for them sleeps for bytes / bandwidth more, bytes counted as
:class:`edgc.runtime.channel.Channel` counts them. That is enough to give the stages of one machine links of
different speeds, and costs no processor time. On a CPU only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel
from experiments.bench.collectives import Recording, Sent, total


class SlowLink:
    """Opens channels that are slowed down; to be given to an engine as ``open_channel``.

    Attributes:
        bandwidth: bytes per second that a rank sends; None injects nothing. It may be changed between iterations.
        note: called with the start and the end of every wait, delay included.
        messages: what a rank has sent since :meth:`take`, collective by collective.
    """

    def __init__(self, bandwidth: float | None, note: Callable[[float, float], None] = lambda start, end: None) -> None:
        self.bandwidth, self.note = bandwidth, note
        self.messages: list[Sent] = []

    def take(self) -> list[Sent]:
        """The messages since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def __call__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> Channel:
        return _SlowChannel(group, shards, self)


class _SlowChannel(Recording):
    def __init__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor], link: SlowLink) -> None:
        super().__init__(group, shards)
        self._link = link

    def finish(self) -> None:
        began, before = time.perf_counter(), len(self.messages)
        super().finish()
        new = self.messages[before:]
        if not new:
            return
        self._link.messages += new
        if self._link.bandwidth is not None:
            started = time.perf_counter()
            time.sleep(total(new) / self._link.bandwidth)
            self.waited.add(started, time.perf_counter())
        self._link.note(began, time.perf_counter())
