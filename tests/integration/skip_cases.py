"""What the ranks of ``test_megatron_skips.py`` do: training with gradients that are not finite."""

from __future__ import annotations

from typing import Any

from edgc.megatron import cpu_shims
from tests.examples import EACH, settings_of
from tests.integration.layout_cases import FP16, OVERLAP, SHARDED
from tests.integration.megatron_cases import EDGC, configuration, train

METHODS: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in EACH.items() if name != "edgc"},
    "powersgd": {"method": "powersgd", "rank": 4},
    "powersgd int8": {"method": "powersgd", "rank": 8, "factor_dtype": "int8", "error_dtype": "bf16"},
    "topk_dgc": settings_of("topk_dgc"),
    "powersgd one-sided": {"method": "powersgd", "rank": 4, "one_sided": True},
}
HOW: dict[str, dict[str, Any]] = {
    "": {},
    ", overlap": OVERLAP,
    ", overlap, distributed optimizer": {**OVERLAP, **SHARDED},
}
POISONED = frozenset({0, 3, 4})
STEPS = 7


def all_cases() -> dict[str, Any]:
    cpu_shims.install()
    results: dict[str, Any] = {}
    for method, compression in METHODS.items():
        for how, settings in HOW.items() if method == "powersgd" else [("", {}), (", overlap", OVERLAP)]:
            own = {"adam_beta1": 0.0} if "momentum" in compression else {}
            run = configuration("skip", compression, train={**settings, **own})
            results[method + how] = {
                "poisoned": train(run, iterations=STEPS, poison=POISONED),
                "without": train(run, iterations=STEPS, omit=POISONED),
            }
    always = configuration("always", METHODS["powersgd"])
    results["always"] = train(always, iterations=22, poison=frozenset(range(22)))
    # Windows of entropy and decisions must not see what is not finite.
    results["edgc"] = train(configuration("edgc", EDGC), poison=frozenset({5, 9}))
    # The loss scale begins so high that the first steps overflow.
    results["fp16"] = train(configuration("fp16", METHODS["powersgd"], train=FP16), poison=frozenset({5, 8}))
    return results
