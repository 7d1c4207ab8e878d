"""Singular values of the mean of a matrix, which PowerSGD has for nothing."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from edgc.compressors.passes import square_sums
from edgc.compressors.powersgd.workspace import Group


class Spectrum(NamedTuple):
    """Of a matrix M: its shape, squared singular values of an approximation, and ||M||^2."""

    shape: tuple[int, int]
    singular_sq: list[float]
    input_sq: float


def spectrum(group: Group, i: int) -> Spectrum:
    """Of the mean of the i-th matrix of ``group``, after a reduction.

    The singular values are those of M^, from the averaged factor, the same on all workers. ``input_sq`` adds to their
    squares what this worker's own approximation leaves of its M_w: with error feedback it is for the caller to put what
    is missing of the mean in its place (:mod:`edgc.measurement.mean_error`), which is less.
    """
    mean = group.mean[i].double()
    gram = mean.mT @ mean if mean.shape[1] == group.rank else mean @ mean.mT
    values = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0).tolist()
    left = float(group.input_sq[i] - square_sums(group.own[i : i + 1])[0])
    return Spectrum(group.shape, values, math.fsum(values) + max(0.0, left))
