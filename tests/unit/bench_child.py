"""A worker without torch, for the tests of :mod:`experiments.bench.workers`."""

from __future__ import annotations

import os
import sys
import time


class Child:
    def echo(self, value: object) -> object:
        print("printed, not answered")
        return value

    def fail(self, message: str) -> None:
        raise ValueError(message)

    def die(self, message: str) -> None:
        sys.stderr.write(f"first line\n{message}\n\n")
        sys.stderr.flush()
        os._exit(3)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
