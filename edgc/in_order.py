"""Several reductions in flight, in an order that depends on the sequence of calls alone.

Collectives match between ranks by their order. Backward makes buckets ready at different moments on every rank, but
in the same sequence; so what is started when must follow from that sequence and never from who is faster. (torch's
PowerSGD hook starts its second all-reduce in the callback of the first, in the order in which these finish: with
several buckets the ranks pair messages that do not belong together.) Plain Python: no threads, no process groups.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key")
Waits = Generator[None, None, object]


class InOrder(Generic[Key]):
    """A fixed software pipeline of generators, each of which yields where it must wait for what it has started.

    :meth:`start` takes the new generator to its first wait, then every older one a step further, oldest first, and
    then the new one past as many waits as it is told. With all but the last, the transfers of one overlap with the
    work of the next one and none waits for it to begin; with none, transfers of several overlap. A generator of n
    waits is finished by the n-th start after its own at the latest, and at most n + 1 are in flight. :meth:`drain`
    goes round the rest until nothing is left. What a generator raises is passed on; after that only :meth:`close`
    makes sense.
    """

    def __init__(self) -> None:
        self._running: list[tuple[Key, Waits]] = []  # oldest first

    def __len__(self) -> int:
        """Number of generators in flight."""
        return len(self._running)

    def start(self, key: Key, steps: Waits, ahead: int = 0) -> list[Key]:
        """Begin ``steps``, advance the older ones and go past ``ahead`` waits of the new one.

        Returns:
            The keys of what finished, in that order.
        """
        new = key, steps
        self._running.append(new)
        finished = self._advance([new, *self._running[:-1]])
        for _ in range(ahead):
            finished += self._advance([task for task in self._running if task is new])
        return finished

    def drain(self) -> list[Key]:
        """Advance everything in turn until all is finished; returns the keys in the order in which they finished."""
        finished = []
        while self._running:
            finished += self._advance(list(self._running))
        return finished

    def _advance(self, turn: Sequence[tuple[Key, Waits]]) -> list[Key]:
        finished = [task for task in turn if next(task[1], _END) is _END]
        self._running = [task for task in self._running if not any(task is done for done in finished)]
        return [key for key, _ in finished]

    def close(self) -> None:
        """Give up what is in flight."""
        while self._running:
            self._running.pop()[1].close()


_END = object()
