"""When warm-up ends: after a share of the run, once entropy is stable, and at a later share in any case."""

from __future__ import annotations

import math

from edgc.control.settings import PolicyConfig


def ends(
    config: PolicyConfig,
    iterations: int,
    iteration: int,
    previous: float | None,
    entropy: float | None,
    *,
    measuring: bool,
) -> tuple[bool, str]:
    """Whether warm-up ends with the window that ``iteration`` closes, and why or why not.

    Args:
        iterations: length of the run.
        previous, entropy: stage 0's in the window before and in this one, nats; None if it was not measured.
        measuring: whether times are still being measured, which warm-up waits for.
    """

    def over(fraction: float) -> bool:  # rounded: 0.1 * 30 is above 3 in floating point
        return iteration + 1 > round(fraction * iterations, 6)

    if not over(config.warmup_fraction):
        return False, "before warmup_fraction"
    if measuring:
        return False, "the search of r_max is not finished"
    if entropy is None and not config.gives_ranks:
        return False, "no entropy was measured in this window"
    change = abs(entropy - previous) if entropy is not None and previous is not None else math.inf
    if change <= config.stability_tolerance:
        return True, f"entropy stable within {change:.4f} nats"
    if over(config.warmup_limit_fraction):
        return True, "warmup_limit_fraction reached"
    return False, "entropy is not stable yet"
