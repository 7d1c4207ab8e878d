"""Writing figures: PDF, SVG and PNG, the same bytes at every drawing, whole or not at all."""

from __future__ import annotations

import io
import os
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from edgc.errors import UserError


def svg(fig: Figure) -> bytes:
    """The figure as SVG, the same bytes at every drawing; closes it."""
    buffer = io.BytesIO()
    fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None}, facecolor=fig.get_facecolor())
    plt.close(fig)
    return buffer.getvalue()


def seen(fig: Figure) -> str:
    """What the title over all panels says, in one line; empty where there is none."""
    titles = [fig.get_suptitle(), *(legend.get_title().get_text() for legend in fig.legends)]
    return " ".join(next(filter(None, titles), "").split())


def save(fig: Figure, out_dir: Path, name: str) -> list[Path]:
    """Write ``name.pdf``, ``.svg`` and ``.png`` (200 dpi, or the style's) at the print size, atomically.

    The bytes hold no time stamp. What the title over all panels says is in the file's own title too; pages read it,
    for those who do not see the figure.
    """
    out_dir = Path(out_dir)
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the figure folder: {error}", where=out_dir, fix="choose another --out") from None
    written = []
    title = {"Title": said} if (said := seen(fig)) else {}
    metadata: dict[str, dict[str, str | None]] = {
        "pdf": {"CreationDate": None, "Producer": None, "Creator": None, **title},
        "svg": {"Date": None, "Creator": None, **title},
        "png": {"Software": None, **title},
    }
    for kind, data in metadata.items():
        path = out_dir / f"{name}.{kind}"
        temporary = out_dir / f".{name}.{os.getpid()}.{kind}"
        try:
            fig.savefig(temporary, format=kind, metadata=data)
            temporary.replace(path)
        except OSError as error:
            raise UserError(f"cannot write the figure: {error}", where=path, fix="choose another --out") from None
        finally:
            temporary.unlink(missing_ok=True)
        written.append(path)
    plt.close(fig)
    return written
