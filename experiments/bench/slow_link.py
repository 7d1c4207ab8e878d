"""Injected delay: a link that takes as long as one of a chosen bandwidth would, on top of what the real one takes.

Nothing is emulated below the collectives: whoever waits for them sleeps for bytes / bandwidth more, bytes counted as
:class:`edgc.compressors.channel.Channel` counts them. That is enough to give the stages of one machine links of
different speeds, and costs no processor time. On a CPU only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel


class SlowLink:
    """Opens channels that are slowed down; to be given to an engine as ``open_channel``.

    Attributes:
        bandwidth: bytes per second that a rank sends; None injects nothing. It may be changed between iterations.
        note: called with the start and the end of every wait, delay included.
        messages: bytes that a rank sent before each wait, until :meth:`take`.
    """

    def __init__(
        self, bandwidth: float | None, note: Callable[[float, float], None] = lambda start, end: None
    ) -> None:
        self.bandwidth, self.note = bandwidth, note
        self.messages: list[int] = []

    def take(self) -> list[int]:
        """The messages since the last call."""
        taken, self.messages = self.messages, []
        return taken

    def __call__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor] = ()) -> Channel:
        return _SlowChannel(group, shards, self)


class _SlowChannel(Channel):
    def __init__(self, group: dist.ProcessGroup | None, shards: Sequence[Tensor], link: SlowLink) -> None:
        super().__init__(group, shards)
        self._link, self._delayed = link, 0

    def finish(self) -> None:
        began = time.perf_counter()
        super().finish()
        sent, self._delayed = self.bytes - self._delayed, self.bytes
        if not sent:
            return
        self._link.messages.append(sent)
        if self._link.bandwidth is not None:
            started = time.perf_counter()
            time.sleep(sent / self._link.bandwidth)
            self.waited.add(started, time.perf_counter())
        self._link.note(began, time.perf_counter())
