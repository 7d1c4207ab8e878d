"""Named settings: ``EDGCConfig.from_dict({"preset": "optimus_cc", "rank": 16})`` lays the preset under the given keys.

``optimus_cc`` and its three parts are the method of Song et al., "Optimus-CC: Efficient Large NLP Model Training with
3D Parallelism Aware Communication Compression", ASPLOS 2023, with the values of its authors' training scripts for GPT
335M, 2.5B and 8.3B (repository AIS-SNU/Optimus-CC, ``ASPLOS23/tbl2_fig9_tbl4/*-CB-FE-SC.sh``, commits 54c0a2d and
029bb5b), hidden sizes 1024 to 3072: smaller models need smaller ranks.

* compressed backpropagation, in the epilogue alone: ``--inter_grad_comp_rank 16 --inter_grad_comp_epilogue_only``;
* selective stage compression: PowerSGD with error feedback, ``--grad_comp_rank 128`` from the first iteration
  (``--grad_comp_warm_up 0.0``), on 3 of 4 stages (``--selective_grad_comp_way 3``);
* fused embedding synchronisation: ``--emb_comm_opt``.

``paper`` is EDGC (arXiv 2511.10333) with every choice as published; r_max is found by timing and r_min a quarter of it.
What the paper leaves open (how stable is stable, bins, seeds) stays at this library's defaults.

``hygon`` is EDGC as HYGON's plugin for Megatron-LM has it by default (repository HYGON-AI/Megatron-LM-das, option
``--enable-dynamic-grad-comp``): the rank follows the loss, which has to be told (``add_loss``). ``docs/audit.md`` says
of each key where it comes from. Schedule and types are HYGON's, the compressor is not: theirs projects onto new random
directions in every step and sums Q over the replicas; here Q is refined from step to step, and results are means. They
take the loss of every tenth iteration, here every loss that is told counts, and warm-up ends with a window.

``best`` is what the study ``equal_bytes`` finds best at few bytes. It changes with the evidence:

* 2026-11: PowerSGD of rank 32 with int8 factors. At 10.8 % of the bytes it is 0.0068 nats above uncompressed, which
  three seeds do not decide (``results/reference/ci/equal_bytes/summary.csv``). Of its level it is better than rank 8
  with fp32 factors, rank 64 with int4 ones and top-k; from rank 16 with bf16 ones and from int4 of every entry (13.8 %)
  it cannot be told (``levels.csv`` beside it).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from edgc.errors import UserError, nearest

_BACKPROP: dict[str, Any] = {"pipeline": {"rank": 16, "epilogue_only": True}}
_STAGES: dict[str, Any] = {"method": "powersgd", "rank": 128, "compressed_stages": 0.75}
_EMBEDDING: dict[str, Any] = {"fused_embedding": True}

PRESETS: dict[str, dict[str, Any]] = {
    "optimus_cc": {**_STAGES, **_BACKPROP, **_EMBEDDING},
    "optimus_cc_backprop": {"method": "none", **_BACKPROP},
    "optimus_cc_stages": _STAGES,
    "optimus_cc_embedding": {"method": "none", **_EMBEDDING},
    "paper": {
        "method": "edgc",
        "policy": "cqm",
        "rank_multiple": 4,
        "step_limit": 8,
        "window": 1000,
        "warmup_fraction": 0.1,
        "alignment": "measured",
        "remeasure_above": None,
        "entropy": {
            "estimator": "histogram",
            "iteration_rate": 0.1,
            "entry_rate": 0.25,
            "sampling": "random",
        },
    },
    "hygon": {
        "method": "edgc",
        "policy": "loss",
        "rank_multiple": 2,
        "step_limit": 4,
        "window": 1000,
        "warmup_fraction": 0.1,
        "warmup_limit_fraction": 0.1,
        "alignment": "measured",
        "remeasure_above": None,
        "factor_dtype": "bf16",
        "error_dtype": "bf16",
        "entropy": {"iteration_rate": 0.1, "entry_rate": 0.1},
    },
    "best": {"method": "powersgd", "rank": 32, "factor_dtype": "int8"},
}


def resolved(values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> dict[str, Any]:
    """``values`` without the key ``preset``, laid over the settings it names; nested mappings are merged.

    Raises:
        UserError: there is no such preset.
    """
    given = dict(values)
    if "preset" not in given:
        return given
    name = given.pop("preset")
    if not isinstance(name, str) or name not in PRESETS:
        raise UserError(f"{prefix}preset = {name!r} is not known", where=where, fix=nearest(name, PRESETS))
    return deep_merge(copy.deepcopy(PRESETS[name]), given)


def deep_merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """``high`` laid over ``low``; nested mappings are merged, everything else is replaced."""
    merged = dict(low)
    for key, value in high.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
