"""Optimus-CC and its parts: the tables of the methods comparison."""

from __future__ import annotations

from experiments.analyse.methods import analyse

__all__ = ["analyse"]
