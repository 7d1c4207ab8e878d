"""Simulated communication and step time of GPT2-2.5B on 32 V100."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paper_figures import cluster

TABLES = (
    "gpt2_2p5b_v100/table.csv",
    "gpt2_2p5b_v100/steps.csv",
    "gpt2_2p5b_v100/traces.csv",
    "gpt2_2p5b_v100/summary.json",
)
CAPTION = """\
**GPT2-2.5B on 32 V100, simulated.** Nothing here was measured; every input and its source is in
``gpt2_2p5b_v100/summary.json``. (a) Time of one step's data-parallel gradient communication, compression
included, on the slowest stage, for a range of network bandwidths, because the paper does not give its
network. (b) What each method saves of it against uncompressed fp32. (c), (d) What it saves of a whole step:
1F1B with computation at an assumed share of the device's peak, reductions after backward or beside it. What the
paper saves with this model is not known; its largest savings are taken for those of the 12.1B model. Thin lines:
EDGC with the ranks that its controller takes when it is told the entropy of a recorded run (``traces.csv``)."""


def draw(results: Path) -> Figure:
    return cluster.draw(results, "gpt2_2p5b_v100", claimed=False)
