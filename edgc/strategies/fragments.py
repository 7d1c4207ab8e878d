"""Fragments of a model whose turns come one after another."""

from __future__ import annotations

import re
from collections.abc import Collection

from edgc.checks import require


def fragments_of(names: Collection[str], count: int) -> list[list[str]]:
    """Names of every fragment's parameters.

    As in MaxText, what is in no layer makes the first of several fragments, if there is any, and layers go round the
    others (strided, as in the paper). The layer of a parameter is the first number in its name.

    Raises:
        UserError: there are fewer layers than fragments for them.
    """
    layers: dict[int, list[str]] = {}
    outside: list[str] = []
    for name in names:
        found = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        (layers.setdefault(int(found[1]), []) if found else outside).append(name)
    if count == 1:
        return [list(names)]
    inside = [layers[number] for number in sorted(layers)]
    strides = count - bool(outside)
    fix = f"use at most {len(inside) + bool(outside)}: the model has {len(inside)} layers"
    require(strides <= len(inside), "fragments", count, fix)
    strided = [[name for layer in inside[first::strides] for name in layer] for first in range(strides)]
    return [outside, *strided] if outside else strided
