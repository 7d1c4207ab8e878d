"""Figures and tables of the benchmark: one script each, drawn from the tables under ``results/<scale>/``.

This file is plain Python (no plotting library), so that the workflow can read the registry cheaply.
"""

from __future__ import annotations

# figure name -> studies whose tables it reads
FIGURES: dict[str, tuple[str, ...]] = {
    "entropy_trend": ("entropy_trend",),
    "entropy_moments": ("entropy_trend",),
    "entropy_conditions": ("entropy_trend",),
    "methods": ("methods",),
    "ranks_over_time": ("methods",),
    "time_to_target": ("methods",),
    "policies": ("policies",),
    "equal_bytes": ("equal_bytes",),
    "moe": ("moe",),
    "rank_sweep": ("rank_sweep",),
    "rank_model": ("rank_model",),
    "window_ablation": ("window_ablation",),
    "sampling_ablation": ("sampling_ablation",),
    "zero_shot": ("zero_shot",),
    "gpt2_2p5b_v100": ("gpt2_2p5b_v100",),
    "gpt2_12p1b_h100": ("gpt2_12p1b_h100",),
    "beyond": ("beyond",),
    "beyond_sensitivity": ("beyond",),
    "disturbances": ("beyond",),
}

# figures drawn by a script of another name, which takes the study as its second argument
SCRIPTS: dict[str, str] = {"gpt2_2p5b_v100": "cluster", "gpt2_12p1b_h100": "cluster"}

# figures of `make bench`, `bench-network`, `bench-steps`, `bench-race` and `bench-stages` -> files that these write and
# the figure reads, first the table that the figure shows
BENCHMARKS: dict[str, tuple[str, ...]] = {
    "bench": ("engine.csv",),
    "bench_network": ("network.csv",),
    "bench_steps": ("steps.csv",),
    "bench_race": ("race_summary.csv", "race.csv"),
    "stage_spread": ("stages.csv", "stages_iterations.csv"),
    "timeline": ("timeline.csv", "timeline_spans.csv", "stages.csv", "stages.json"),
}
