"""From run folders to the tables of one study: ``python -m experiments.analyse --study S --scale ci``."""

# The studies whose runs are analysed, each by the module of its name here.
STUDIES = (
    "entropy_trend",
    "methods",
    "policies",
    "equal_bytes",
    "optimus_cc",
    "moe",
    "rank_sweep",
    "rank_model",
    "window_ablation",
    "sampling_ablation",
)
