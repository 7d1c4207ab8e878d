"""A worker of :mod:`experiments.bench.children` without torch, for its tests."""

from __future__ import annotations

import os
import sys
import time

from experiments.bench.children import serve


def echo(value: object) -> object:
    print("printed, not answered")
    return value


def fail(message: str) -> None:
    raise ValueError(message)


def die(message: str) -> None:
    sys.stderr.write(f"first line\n{message}\n\n")
    sys.stderr.flush()
    os._exit(3)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


if __name__ == "__main__":
    serve(sys.modules[__name__])
