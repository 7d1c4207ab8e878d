"""Warm-up in a few bits an entry: a method of its own until compression starts, which then takes over what it kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgc.compressors.entrywise.quantize import Quantize, QuantizeConfig
from edgc.compressors.powersgd import LowRankConfig

if TYPE_CHECKING:
    from edgc.compressors.powersgd.algorithm import PowerSGD

THROUGH = 1  # to a method without ranks the number says only that it is to compress


class WarmUp:
    """What gradients are sent with before compression starts, under ``warmup_bits`` (ours; the paper sends fp32).

    Error feedback is kept by parameter name, as the low-rank method keeps it, and is part of that one's saved state: so
    what a state means does not depend on which of the two holds it.

    Args:
        config: of the method after warm-up, ``main``.
        bits: of an entry in warm-up.

    Attributes:
        on: whether it is warm-up now.
        compressor: without memory once warm-up is over.
    """

    compressor: Quantize

    def __init__(self, config: LowRankConfig, bits: int, main: PowerSGD) -> None:
        self._config, self._bits, self._main = config, bits, main
        self.on = True
        self._keep({})

    def follow(self, on: bool) -> None:
        """Whether it is still warm-up; between two iterations, all changes settled. Hands over what is kept if not."""
        before, self.on = self.on, on
        if before and not self.on:
            self._main.adopt_errors(self.compressor)
            self._keep({})

    def state_dict(self, main: dict[str, Any]) -> dict[str, Any]:
        """``main``, the saved state of the main method, with the errors that are kept here."""
        return {**main, "errors": {**main["errors"], **self.compressor.state_dict()["errors"]}}

    def load_state_dict(self, main: dict[str, Any], on: bool) -> dict[str, Any]:
        """Take what belongs here from the result of :meth:`state_dict`; returns the rest."""
        self.on = on
        self._keep(main["errors"] if self.on else {})
        return {**main, "errors": {}} if self.on else main

    def _keep(self, errors: dict[str, Any]) -> None:
        """Begin anew with ``errors``."""
        config = self._config
        self.compressor = QuantizeConfig(
            bits=self._bits,
            min_compression_elements=config.min_compression_elements,
            error_feedback=config.error_feedback,
            seed=config.seed,
        ).build()
        self.compressor.deferred = self._main.deferred
        self.compressor.load_state_dict({"errors": errors, "counts": {}})
