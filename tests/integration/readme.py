"""The Python blocks of the README, and what its DDP example has to print."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def block(holding: str) -> str:
    """The only Python block of the README that has ``holding`` in it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [text for text in blocks if holding in text]
    return str(found)


def check_ddp_example(printed: str) -> None:
    """The example reported four times, its loss fell, and it sent less than a quarter of the gradient's bytes."""
    lines = re.findall(r"step (\d+): loss ([\d.]+), (\d+) bytes sent", printed)
    assert [int(step) for step, _, _ in lines] == [50, 100, 150, 200], printed
    assert float(lines[-1][1]) < 0.9 * float(lines[0][1])
    dense = 4 * sum(64 * 256 * 2 + bias for bias in (256 + 64,))
    assert all(0 < int(sent) < 0.25 * dense for _, _, sent in lines)
