"""Writing figures: PDF, SVG and PNG, the same bytes at every drawing, whole or not at all."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from edgc.errors import UserError
from experiments.common.files import atomic_write

UNSTAMPED = {  # what would differ from one drawing to the next
    "pdf": ("CreationDate", "Producer", "Creator"),
    "svg": ("Date", "Creator"),
    "png": ("Software",),
}


def heading(fig: Figure) -> str:
    """The title over all panels in one line; empty where there is none."""
    titles = [fig.get_suptitle(), *(legend.get_title().get_text() for legend in fig.legends)]
    return " ".join(next(filter(None, titles), "").split())


def encoded(fig: Figure, kind: str, title: str = "", **options: Any) -> bytes:
    """The figure as ``pdf``, ``svg`` or ``png`` (200 dpi, or the style's), without a time stamp."""
    buffer = io.BytesIO()
    metadata = dict.fromkeys(UNSTAMPED[kind]) | ({"Title": title} if title else {})
    fig.savefig(buffer, format=kind, metadata=metadata, **options)
    content = buffer.getvalue()
    return re.sub(rb"\n +", b"\n", content) if kind == "svg" else content  # a tenth of the bytes is indentation


def save(fig: Figure, out_dir: Path, name: str) -> list[Path]:
    """Write ``name.pdf``, ``.svg`` and ``.png`` at the print size, each whole or not at all; closes the figure.

    The title over all panels is the files' own title, too; pages read it, for those who do not see the figure.
    """
    written = [out_dir / f"{name}.{kind}" for kind in UNSTAMPED]
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        for path in written:
            atomic_write(path, encoded(fig, path.suffix[1:], heading(fig)))
    except OSError as error:
        raise UserError(f"cannot write the figure: {error}", where=out_dir, fix="choose another --out") from None
    plt.close(fig)
    return written
