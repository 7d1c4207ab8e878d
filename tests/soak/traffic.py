"""What a rank sends, counted where torch takes it."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.contract_ranks import costs


class Traffic:
    """What this rank sends, counted where torch takes it.

    Attributes:
        bytes: by the best algorithm for each collective, from the tensors as they are passed.
        calls: name, bytes, and whether the thread that reduces buckets called it, in order.
    """

    def __init__(self) -> None:
        self.bytes, self.calls = Fraction(0), list[tuple[str, int, bool]]()
        self.dawdles = random.Random(dist.get_rank())

    def clear(self) -> None:
        self.bytes = Fraction(0)
        self.calls.clear()

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        def counting(name: str, cost: Callable[..., Any]) -> Callable[..., Any]:
            original = getattr(dist, name)

            def call(*arguments: Any, **options: Any) -> Any:
                sent = Fraction(cost(*arguments))
                self.bytes += sent
                self.calls.append((name, int(sent), threading.current_thread().name == "edgc-buckets"))
                if self.dawdles.random() < 0.02:
                    time.sleep(self.dawdles.random() * 2e-3)
                return original(*arguments, **options)

            return call

        with contextlib.ExitStack() as stack:
            for name, cost in costs().items():
                stack.enter_context(mock.patch.object(dist, name, counting(name, cost)))
            yield
