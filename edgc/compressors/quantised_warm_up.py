"""Warm-up in a few bits an entry: a method of its own until compression starts, which then takes over what it kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from edgc.compressors.base import Compressor
from edgc.compressors.entrywise.quantize import Quantize, QuantizeConfig
from edgc.config import EDGCConfig
from edgc.control.plan import Plan
from edgc.control.settings import PolicyConfig

if TYPE_CHECKING:
    from edgc.compressors.powersgd.algorithm import PowerSGD

PHASES = ("warmup", "search")
THROUGH = 1  # to a method without ranks the number says only that it is to compress


class WarmUp:
    """What gradients are sent with before compression starts, under ``warmup_bits`` (ours; the paper sends fp32).

    Error feedback is kept by parameter name, as the low-rank method keeps it, and is part of that one's saved state: so
    what a state means does not depend on which of the two holds it.

    Args:
        main: the method after warm-up.

    Attributes:
        on: whether it is warm-up now.
        compressor: without memory once warm-up is over.
    """

    compressor: Quantize

    def __init__(self, config: PolicyConfig, main: PowerSGD, deferred: bool) -> None:
        self._config, self._main, self._deferred = config, main, deferred
        self.on = True
        self._keep({})

    @classmethod
    def of(cls, config: EDGCConfig, main: Compressor, deferred: bool) -> WarmUp | None:
        """None where warm-up sends fp32."""
        if not isinstance(config, PolicyConfig) or config.warmup_bits is None:
            return None
        return cls(config, cast("PowerSGD", main), deferred)

    def follow(self, plan: Plan) -> None:
        """Between two iterations, all changes settled: hand over what is kept if compression starts with ``plan``."""
        before, self.on = self.on, plan.phase in PHASES
        if before and not self.on:
            self._main.adopt_errors(self.compressor.errors)
            self._keep({})

    def state_dict(self, main: dict[str, Any]) -> dict[str, Any]:
        """``main``, the saved state of the main method, with the errors that are kept here."""
        return {**main, "errors": {**main["errors"], **self.compressor.state_dict()["errors"]}}

    def load_state_dict(self, main: dict[str, Any], plan: Plan) -> dict[str, Any]:
        """Take what belongs here from the result of :meth:`state_dict`; returns the rest."""
        self.on = plan.phase in PHASES
        self._keep(main["errors"] if self.on else {})
        return {**main, "errors": {}} if self.on else main

    def _keep(self, errors: dict[str, Any]) -> None:
        """Begin anew with ``errors``."""
        config = self._config
        assert config.warmup_bits is not None
        self.compressor = QuantizeConfig(
            bits=config.warmup_bits,
            min_compression_elements=config.min_compression_elements,
            error_feedback=config.error_feedback,
            seed=config.seed,
        ).build()
        self.compressor.deferred = self._deferred
        self.compressor.load_state_dict({"errors": errors, "counts": {}})
