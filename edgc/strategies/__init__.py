"""Ways of training with less communication, one file each; :mod:`edgc.strategies.base` holds their contract.

A file here is a strategy if it has a type of settings (:class:`~edgc.strategies.base.StrategyConfig`) with a ``name``.
There is no list to add it to.
"""

from __future__ import annotations

from edgc.strategies.base import Replica, Strategy, StrategyConfig, strategies

__all__ = ["Replica", "Strategy", "StrategyConfig", "strategies"]
