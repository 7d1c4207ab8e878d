"""Whether the settings of method ``edgc`` can work with a model and a length of run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from edgc.config import EDGCConfig
from edgc.control.rank_model import StageModel
from edgc.errors import UserError


def check(config: EDGCConfig, shapes: Sequence[tuple[int, int]], iterations: int) -> StageModel:
    """The model of the first stage's errors, from the (rows, columns) of its compressible matrices.

    Raises:
        UserError: no matrix, no complete window, windows without an entropy where the policy (at least its warm-up)
            needs one, a rank that could never move, or limits that the model is too small for.
    """
    given = config.ranks_given
    if not shapes:
        fix = "lower min_compression_elements or use method: none"
        raise UserError("the first pipeline stage has no matrix to compress", fix=fix)
    model = StageModel(shapes)
    if config.window >= iterations:
        what = f"window = {config.window} leaves nothing to compress in {iterations} iterations"
        raise UserError(what, fix="choose a shorter window or method: none")
    rate = config.entropy.iteration_rate
    if not given and round(config.window * rate, 9) < 1:
        what = (
            f"window = {config.window} is shorter than 1 / entropy.iteration_rate = {1 / rate:.4g} iterations"
        )
        fix = f"some windows would have no entropy; use a window of at least {math.ceil(round(1 / rate, 9))}"
        raise UserError(what, fix=f"{fix}, or a higher rate")
    if not given and config.step_limit < config.rank_multiple:
        what = f"step_limit = {config.step_limit} is below rank_multiple: no rank could ever move"
        raise UserError(what, fix=f"use a step_limit of at least {config.rank_multiple}")
    if not given and config.r_max is not None and config.r_max >= model.max_rank:
        what = f"r_max = {config.r_max} is not below the largest rank of the first stage"
        raise UserError(what, fix=f"use an r_max below {model.max_rank}")
    if config.r_max is not None and config.r_max < max(given, default=0):
        what = f"{'rank' if config.policy == 'fixed' else 'schedule: rank'} = {max(given)} is above r_max"
        raise UserError(what, fix=f"use a rank of at most {config.r_max}")
    return model
