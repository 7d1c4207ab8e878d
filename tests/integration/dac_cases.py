"""What the ranks of ``test_dac.py`` do: DP2 x PP2 over links with injected delays, one launch for all cases."""

from __future__ import annotations

from typing import Any

from edgc.megatron import cpu_shims
from experiments.bench import stages
from experiments.spec.settings import RunConfig

PLAN = stages.Plan(pipeline=2, data=2, megabytes=2.0, slowdown=4.0, steps=8, micro_batches=2, sequence=16)
DROP = 29  # iteration, the first of a window
FACTOR = 3.0


def all_cases() -> dict[str, dict[str, Any]]:
    cpu_shims.install()
    found = {}
    for variant in stages.VARIANTS:
        run = RunConfig(**stages.settings(PLAN, variant))
        found[variant] = stages.train(run, PLAN.bandwidths)
    # On a busy machine times seem to change before they do; then nothing is judged for eight windows of four.
    longer = stages.settings(PLAN.model_copy(update={"steps": 76}), "dac")
    longer["compression"] |= {"search_repeats": 1, "remeasure_above": 0.2}
    found["drop"] = stages.train(RunConfig(**longer), PLAN.bandwidths, slower={DROP: FACTOR})
    return found
