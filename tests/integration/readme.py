"""The Python blocks of README and docs, and what the DDP example has to print."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DDP_PAGE = ROOT / "docs" / "library" / "ddp.md"
MEGATRON_PAGE = ROOT / "docs" / "megatron.md"
REHEARSAL_PAGE = ROOT / "docs" / "library" / "rehearsal.md"


def block(holding: str, page: Path = DDP_PAGE) -> str:
    """The only Python block of a page that has ``holding`` in it."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (found,) = [text for text in blocks if holding in text]
    return str(found)


def check_ddp_example(printed: str, share: float = 0.25) -> None:
    """The example reported four times, its loss fell, and it sent less than this share of the gradient's bytes."""
    lines = re.findall(r"step (\d+): loss ([\d.]+), (\d+) bytes sent", printed)
    assert [int(step) for step, _, _ in lines] == [50, 100, 150, 200], printed
    assert float(lines[-1][1]) < 0.9 * float(lines[0][1])
    dense = 4 * sum(64 * 256 * 2 + bias for bias in (256 + 64,))
    assert all(0 < int(sent) < share * dense for _, _, sent in lines)


def launched(program: Path, *arguments: str, path: tuple[Path, ...] = (), ranks: int = 2) -> str:
    """What a program prints that torchrun starts in its folder, with modules of those in ``path``."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*launch, str(program), *arguments],
        cwd=program.parent,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(map(str, (ROOT, *path))),
            "OMP_NUM_THREADS": "1",
            "HOME": str(program.parent),
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
