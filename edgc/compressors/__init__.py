"""Methods of averaging gradients, one file each; :mod:`edgc.compressors.base` holds their contract.

A file here is a method if it has a type of settings (:class:`edgc.config.EDGCConfig`) with a ``method``: its name, its
settings with their sources, :meth:`~edgc.config.EDGCConfig.build`, its ``look`` in figures, and the ``examples`` that
the tests of all methods run. There is no list to add it to.
"""

from __future__ import annotations

from edgc.compressors.base import Compressor, Gradient, Statistics
from edgc.runtime.channel import Channel

__all__ = ["Channel", "Compressor", "Gradient", "Statistics"]
