"""Results of a scale as small as the report allows: every kind of claim, two studies, curves, a simulated figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from PIL import Image

from experiments.verdicts.claims import COLUMNS

HOSTILE = "<script>alert(1)</script> & \"two\" 'quotes' <img src=x onerror=alert(2)>"
STEPS = 600
VARIANTS = [  # variant, label, method, policy, bytes, gap, low, high, verdict
    ("none", "no compression", "none", None, 1.0, 0.0, 0.0, 0.0, ""),
    ("bf16", "bf16", "bf16", None, 0.5, -0.0004871, -0.0014, 0.0005, "on par"),
    ("edgc_cqm", "EDGC (CQM)", "edgc", "cqm", 0.4563, 0.001171, 0.00034, 0.002, "not tested"),
    ("r16", "PowerSGD rank 16", "powersgd", None, 0.1492, 0.0228, -0.0214, 0.067, "not decided"),
    ("r4", HOSTILE, "powersgd", None, 0.0401, 0.1928, 0.1472, 0.2384, "worse"),
    ("topk", "top-k 1.5 %", "topk", None, 0.0336, 1.3485, 0.9934, 1.7035, "worse"),
    ("lost", "diverged", "sign", None, 0.03, None, None, None, ""),
]
SEEDS = (1, 2)


def claim(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    """A row of ``claims.csv``."""
    row = dict.fromkeys(COLUMNS) | {"id": name, "claim": f"Claim {name}", "paper_value": "-46.45"}
    row |= {"unit": "% against Megatron", "kind": "measured", "scale": "ci", "n": 0, "verdict": verdict}
    return row | more


CLAIMS = [
    claim("training_time_12p1b", "partly", kind="simulated", our_value="-27.62 to -1.486", bandwidths=6,
          evidence="results/ci/gpt2_12p1b_h100/traces.csv", note="holds for 6 of 42 values"),
    claim("accuracy_preserved", "not tested", n=2, runs=2, paper_value="on par", our_value="on par", unit="verdict",
          evidence="results/ci/methods/table.csv", note=HOSTILE),
    claim("entropy_cost", "supported", n=1, our_value="-94.918"),
    claim("zero_shot", "not supported", claim=HOSTILE),
    claim("window_correlation", "not testable here", note="no evidence: correlation.csv does not exist"),
]  # fmt: skip


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_csv(path, index=False)


def summary(variants: list[tuple[Any, ...]] = VARIANTS) -> list[dict[str, Any]]:
    """Rows as :mod:`experiments.analyse.methods` writes them, as far as the board reads them."""
    rows = []
    for variant, label, method, policy, share, gap, low, high, verdict in variants:
        row = {"variant": variant, "label": label, "method": method, "policy": policy}
        row |= {"n": len(SEEDS), "n_ok": 0 if gap is None else len(SEEDS), "bytes_ratio_mean": share}
        rows.append(row | {"gap_nats_mean": gap, "gap_nats_low": low, "gap_nats_high": high, "verdict": verdict})
    return rows


def results(folder: Path) -> Path:
    """Write the results; returns the folder of the scale."""
    root = folder / "ci"
    write(root / "claims.csv", CLAIMS)
    runs = [(variant, seed) for variant in VARIANTS for seed in SEEDS]
    write(
        root / "methods" / "table.csv",
        [
            {"variant": variant[0], "label": variant[1], "seed": seed, "method": variant[2], "policy": variant[3]}
            | {"status": "ok" if variant[5] is not None else "diverged"}
            for variant, seed in runs
        ],
    )
    write(root / "methods" / "summary.csv", summary())
    few = summary(VARIANTS[:3])
    few[1] |= {"n": 1, "n_ok": 1, "gap_nats_low": None, "gap_nats_high": None}
    write(root / "equal_bytes" / "summary.csv", few)
    write(root / "methods" / "curves.csv", [row for variant, seed in runs for row in curve(variant, seed)])
    write(root / "gpt2_12p1b_h100" / "traces.csv", [{"entropy": "gpt", "gbits_per_second": 1}])
    (root / "methods" / "none-s1").mkdir()
    record = {"runs": 14, "versions": {"torch": "2.13.0"}, "git": {"commit": "0123456789abcdef", "dirty": True}}
    record |= {"code": ["a", "a+b"], "hardware": {"cpu": "A processor", "cores": 2, "gpus": [], "system": "Linux"}}
    (root / "methods" / "provenance.yaml").write_text(yaml.safe_dump(record))
    for name in ("methods", "gpt2_12p1b_h100"):
        picture(root / "figures" / f"{name}.png", (600, 300))
    picture(root / "benchmarks" / "a-machine" / "bench.png", (60, 40))
    return root


def curve(variant: tuple[Any, ...], seed: int) -> list[dict[str, Any]]:
    """A run of ``STEPS`` iterations; a diverged one ends early."""
    name, label, share, gap = variant[0], variant[1], variant[4], variant[5]
    end = STEPS if gap is not None else STEPS // 3
    steps = np.arange(1, end + 1)
    losses = 4 + 4 * np.exp(-steps / 80) + 0.05 * np.sin(steps / 7 + seed) + (gap or 0.5) * steps / STEPS
    return [
        {"variant": name, "label": label, "seed": seed, "status": "ok" if gap is not None else "diverged"}
        | {"iteration": int(step), "train_loss": float(loss), "bytes": float(share * 4960512 * step)}
        | {"validation_perplexity": float(np.exp(loss)) if step % 200 == 0 else None}
        for step, loss in zip(steps, losses, strict=True)
    ]


def picture(path: Path, size: tuple[int, int]) -> None:
    """A PNG with a disc."""
    path.parent.mkdir(parents=True, exist_ok=True)
    y, x = np.mgrid[: size[1], : size[0]]
    disc = (x - size[0] / 2) ** 2 + (y - size[1] / 2) ** 2 < (size[1] / 3) ** 2
    Image.fromarray(np.where(disc[..., None], [10, 88, 166], [255, 255, 255]).astype(np.uint8)).save(path)
