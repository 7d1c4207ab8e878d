"""Exit codes and error lines shared by every program."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from edgc.errors import UserError
from experiments.common import interrupts
from experiments.common.files import FULL

P = ParamSpec("P")
R = TypeVar("R")

EXIT_BAD_INPUT = 2


def main_guard(function: Callable[P, R]) -> Callable[P, R]:
    """Turn a :class:`UserError` or a full disk into one line on stderr and exit code 2, Ctrl-C into one and 130;
    anything else keeps its traceback."""

    @functools.wraps(function)
    def guarded(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(EXIT_BAD_INPUT) from None
        except (OSError, RuntimeError) as error:
            if not FULL.search(str(error)):
                raise
            path = getattr(error, "filename", None)
            full = UserError("no space left on the disk", where=path, fix="free space and start it again")
            print(f"error: {full}", file=sys.stderr)
            raise SystemExit(EXIT_BAD_INPUT) from None
        except KeyboardInterrupt:
            print("interrupted: what was finished before is kept", file=sys.stderr)
            raise SystemExit(interrupts.EXIT) from None

    return guarded
