"""``python3 workflows/nearest.py NAME KNOWN ...``: one line about a target that `make` does not have.

Needs Python's standard library only, for it runs before anything is installed.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path


def line(name: str, known: list[str]) -> str:
    """What is wrong, and which target may have been meant."""
    if Path("experiments", "studies", f"{name}.yaml").is_file():
        return f"unknown target {name}; it is a study: .venv/bin/snakemake -c2 {name}"
    near = difflib.get_close_matches(name, known, n=3)
    return f"unknown target {name}; " + (f"did you mean {' or '.join(near)}?" if near else "`make` lists all")


if __name__ == "__main__":
    print(line(sys.argv[1], sys.argv[2:]))
