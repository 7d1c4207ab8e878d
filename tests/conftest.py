"""The order in which the files of the tests start, and what is left out where time is short."""

from __future__ import annotations

import math
import os
import time

import pytest

#: Unix time after which no test marked `costly` starts; `.ci/run` sets it, for it has to end in time on any machine.
END = float(os.environ.get("EDGC_COSTLY_TESTS_UNTIL", "inf"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: run side by side, short files fill up what the long ones leave over.

    Where time is short, files with costly tests come last.
    """
    slow, costly = ({item.path for item in items if item.get_closest_marker(name)} for name in ("slow", "costly"))
    last = costly if math.isfinite(END) else set()
    items.sort(key=lambda item: (item.path in last, item.path not in slow))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave a costly test out when it would start too late."""
    if item.get_closest_marker("costly") and time.time() > END:
        pytest.skip("costly, and too little time is left: this machine is slow (EDGC_COSTLY_TESTS_UNTIL)")
