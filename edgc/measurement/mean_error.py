"""Error of the mean, ||mean_w(M_w) - M^||, known to every replica without sending what is missing.

With error feedback mean_w(M_w) - M^ = mean_w(E_w) at every step. A worker's E_w says little about that mean: the
differences between workers, which cancel in it, make ||E_w|| large. So every worker draws a linear sketch of its own
E_w (:func:`sketches`), with random signs that are the same on all replicas; the mean of the sketches is
the sketch of the mean, and its squared norm an unbiased estimate of ||mean_w(E_w)||^2.

Signs of different matrices and iterations are independent, so their sketches add up: one vector a window, whose squared
norm estimates the sum of ||mean_w(E_w)||^2 over matrices and sampled iterations.

What it is relative to is ||mean_w(M_w)||^2 = ||R||^2 + 2 <R, mean_w(E_w)> + ||mean_w(E_w)||^2, R the result that is
the same on every replica. The first two are exact: the inner product is linear in E_w and averaged along. For PowerSGD
R is a projection: its norm is that of the averaged factor, and the inner product 0, up to the rounding of factors.

At a window's end the replicas average one message of some 4 kB, through a channel of the engine, so that its bytes
count. Parameters that are reduced over another group than most (experts) are left out, as are steps that were skipped;
without error feedback nothing is known.

Everything is in the gradients' unit without their loss scale. Nothing here makes the host wait for a GPU, except
:meth:`MeanError.close` and the singular values that come from outside.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from edgc.compressors import Channel, Compressor, Gradient
from edgc.measurement.spectral import MatrixSpectrum, Shape
from edgc.runtime.device import to_device

BUCKETS = 512
"""Length of a sketch; with it the norm is off by 3 %."""
FEWER = 64
"""Buckets of one matrix alone; all together have ``BUCKETS``."""
PROJECTIONS = 8
_MANY = 1 << 20  # entries that are converted to another type at a time
_WORD = (1 << 32) - 1


@dataclass(frozen=True)
class WindowError:
    """Result of a window, the same on every replica but for matrices of other groups.

    Attributes:
        error_sq, input_sq: sums over sampled iterations of ||mean(M) - M^||^2 and ||mean(M)||^2; nan if unknown.
        spectra: of the mean, per matrix, averaged over sampled iterations; in alphabetical order.
    """

    error_sq: float = math.nan
    input_sq: float = math.nan
    spectra: dict[str, MatrixSpectrum] = field(default_factory=dict)


@dataclass
class _Sums:
    """Sums over sampled iterations of one matrix: its squared singular values, the squared norm that the worker's own
    approximation lacks, and its sketch (None: not sketched)."""

    shape: Shape
    values: list[float]
    lost: float = 0.0
    count: int = 0
    sketch: Tensor | None = None


class MeanError:
    """Sketches of one rank in the current window.

    Args:
        seed: of the signs; must agree on all replicas.

    Attributes:
        group: of the replicas: the largest over which anything compressed was reduced, the first of equal ones.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.group: dist.ProcessGroup | None = None
        self._world = 1
        self.start_iteration()
        self._start_window()

    def start_iteration(self) -> None:
        self._reduced: list[tuple[Sequence[Gradient], Compressor, dist.ProcessGroup | None]] = []

    def _start_window(self) -> None:
        self._sums: Tensor | None = None  # the sketch, ||R||^2, <R, E>
        self._matrices: dict[str, _Sums] = {}

    def reduced(self, gradients: Sequence[Gradient], channel: Channel, compressor: Compressor) -> None:
        """Note a lossy reduction of ``gradients``, which stay as they are until :meth:`measure`, over ``channel``."""
        if channel.world > self._world:
            if self._world > 1:
                self._start_window()
            self.group, self._world = channel.group, channel.world
        elif self.group is None and channel.world == self._world:  # that of a window that was loaded
            self.group = channel.group
        self._reduced.append((gradients, compressor, channel.group))

    def measure(
        self, iteration: int, scale: float, skipped: int | Tensor, spectra: Mapping[str, MatrixSpectrum]
    ) -> None:
        """Take in the error feedback of an iteration's reductions.

        Args:
            scale: what the gradients are multiplied by.
            skipped: how many of the reductions were given up; if any, the iteration does not count.
            spectra: of the mean, of the matrices whose singular values are asked for.
        """
        if not isinstance(skipped, Tensor) and skipped:
            return
        errors: dict[str, Tensor] = {}
        results: list[Tensor] = []
        for gradients, compressor, group in self._reduced:
            for gradient in gradients if group is self.group else ():
                if (error := compressor.kept.get(gradient.name)) is not None:
                    errors[gradient.name] = error
                    results.append(_result_norms(gradient, error, compressor))
        sketched: dict[str, Tensor] = {}
        if errors:
            drawn = sketches(list(errors.values()), [f"{self.seed}/{iteration}/{name}" for name in errors]) / scale
            rows = torch.cat([drawn, torch.stack(results) / scale**2], 1)
            if isinstance(skipped, Tensor):
                rows = torch.where(skipped.to(rows.device) == 0, rows, 0.0)
            self._sums = _added(self._sums, rows.sum(0))
            sketched = dict(zip(errors, rows, strict=True))
        for name, spectrum in spectra.items():
            sketch = sketched[name][:BUCKETS].view(-1, FEWER).sum(0) if name in sketched else None
            self._add(name, spectrum, sketch, scale**2)

    def _add(self, name: str, spectrum: MatrixSpectrum, sketch: Tensor | None, unit: float) -> None:
        values = [value / unit for value in spectrum.singular_sq]
        sums = self._matrices.get(name)
        # Singular values at another rank are not of the same approximation.
        if sums is None or len(sums.values) != len(values) or (sums.sketch is None) != (sketch is None):
            sums = self._matrices[name] = _Sums(spectrum.shape, [0.0] * len(values))
        sums.values = [a + b for a, b in zip(sums.values, values, strict=True)]
        sums.lost += max(0.0, spectrum.input_sq / unit - math.fsum(values))
        sums.count += 1
        if sketch is not None:
            sums.sketch = _added(sums.sketch, sketch)

    def message(self) -> Tensor | None:
        """Vector that is to become its mean over :attr:`group` at the window's end, fp64; None on all its ranks if
        nothing was sketched."""
        if self._sums is None or self._world == 1:
            return None
        parts = [sums.sketch for _, sums in sorted(self._matrices.items()) if sums.sketch is not None]
        on_gpu = dist.is_initialized() and dist.get_backend(self.group) == "nccl"
        device = torch.device("cuda") if on_gpu else self._sums.device
        return torch.cat([part.to(device) for part in (self._sums, *parts)])

    def close(self, mean: Tensor | None) -> WindowError:
        """Result of the window, given the mean of all replicas' :meth:`message`; the next window begins."""
        matrices = sorted(self._matrices.items())
        self._start_window()
        values = [] if mean is None else mean.tolist()
        error_sq = input_sq = math.nan
        if values:
            error_sq = _square(values[:BUCKETS])
            input_sq = values[BUCKETS] + 2 * values[BUCKETS + 1] + error_sq
        spectra, place = {}, BUCKETS + 2
        for name, sums in matrices:
            lost = sums.lost
            if sums.sketch is not None:
                lost, place = _square(values[place : place + FEWER]), place + FEWER
            singular_sq = [value / sums.count for value in sums.values]
            spectra[name] = MatrixSpectrum(sums.shape, singular_sq, math.fsum(singular_sq) + lost / sums.count)
        return WindowError(error_sq, input_sq, spectra)

    def state_dict(self) -> dict[str, Any]:
        """Window so far."""
        matrices = {name: vars(sums).copy() for name, sums in self._matrices.items()}
        return {"sums": self._sums, "matrices": matrices, "world": self._world}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict` of the same rank; None begins a window."""
        self._start_window()
        if state is None:
            return
        self.group, self._world = None, int(state["world"])
        self._sums = state["sums"]
        self._matrices = {name: _Sums(**sums) for name, sums in state["matrices"].items()}


def _result_norms(gradient: Gradient, error: Tensor, compressor: Compressor) -> Tensor:
    """||R||^2 and <R, E> of a gradient's result R."""
    sent_sq = compressor.sent_sq(gradient.name)
    if sent_sq is None:
        return products(gradient.tensor, error)
    return torch.nn.functional.pad(sent_sq.to(error.device).view(1), (0, 1))


def products(x: Tensor, y: Tensor) -> Tensor:
    """Squared norm of ``x`` and its inner product with ``y`` of the same shape: [2] in fp64, on the device of ``y``."""
    total = torch.zeros(2, dtype=torch.float64, device=y.device)
    for u, v in zip(x.reshape(-1).split(_MANY), y.reshape(-1).split(_MANY), strict=True):
        a, b = u.double(), v.double()
        total += torch.stack([a @ a, a @ b])
    return total


def _square(values: Sequence[float]) -> float:
    return math.fsum(value * value for value in values)


def _added(total: Tensor | None, addend: Tensor) -> Tensor:
    # A total that was loaded may lie on another device.
    return addend if total is None else total.to(addend.device) + addend


# ------------------------------------------------------------------ sketches


def sketches(matrices: Sequence[Tensor], keys: Sequence[str]) -> Tensor:
    """Map every matrix linearly to ``BUCKETS`` numbers, [matrices, BUCKETS] in fp64, keeping the norm in the mean over
    keys.

    Of a matrix E (m x n), T = U E / sqrt(K) with random signs U (K x m), one product and one pass over E; the K n
    entries of T are then added into S buckets, each with a random sign and every row of T turned by a random number of
    places. The squared norm is unbiased; its relative variance is about 2/S + 2/(K r) for E of stable rank r.

    The map follows from key and shape alone, bit for bit on every device. Those of several matrices are drawn together:
    on a GPU what one of them takes is mostly the launch of small operations.

    Args:
        matrices: at least one, all on one device.
    """
    shapes = [tuple(matrix.shape) for matrix in matrices]
    order = sorted(range(len(matrices)), key=shapes.__getitem__)
    words = torch.tensor([_words(keys[i]) for i in order], dtype=torch.int64, device="cpu")
    rows_seeds, columns_seeds, turns = to_device(words, matrices[0].device).split([2, 2, PROJECTIONS], 1)
    result: list[Tensor] = []
    for (rows, columns), alike in groupby(order, shapes.__getitem__):
        members = [matrices[i] for i in alike]
        part = slice(len(result), len(result) + len(members))
        signs = _signs(rows, rows_seeds[part]).float()
        product = torch.stack([_product(row, matrix) for row, matrix in zip(signs, members, strict=True)])
        signed = product.double() * _signs(columns, columns_seeds[part])
        padded = torch.nn.functional.pad(signed, (0, -columns % BUCKETS))
        folded = padded.view(len(members), PROJECTIONS, -1, BUCKETS).sum(2)
        places = torch.arange(BUCKETS, dtype=torch.int64, device=folded.device)
        result += folded.gather(2, (places - turns[part, :, None]) % BUCKETS).sum(1).div_(math.sqrt(PROJECTIONS))
    return torch.stack([result[order.index(i)] for i in range(len(order))])


def _words(key: str) -> list[int]:
    """Random numbers of a map: two seeds of two words, and how far each projection is turned."""
    digest = hashlib.sha256(key.encode()).digest()
    seeds = [int.from_bytes(digest[at : at + 4], "little") for at in range(0, 16, 4)]
    return seeds + [int.from_bytes(digest[at : at + 2], "little") for at in range(16, 16 + 2 * PROJECTIONS, 2)]


def _product(signs: Tensor, matrix: Tensor) -> Tensor:
    if matrix.dtype == torch.float32:
        return signs @ matrix
    step = max(1, _MANY // matrix.shape[1])
    parts = zip(signs.split(step, dim=1), matrix.split(step), strict=True)
    return torch.stack([part @ block.float() for part, block in parts]).sum(0)


def _signs(count: int, seeds: Tensor) -> Tensor:
    """Random signs, ``PROJECTIONS`` x ``count`` for each of ``seeds`` [B, 2]: bits of a hash of the place, which no
    device computes otherwise."""
    x = torch.arange(count, dtype=torch.int64, device=seeds.device)
    for part in seeds.split(1, 1):
        x = x ^ part
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD  # factors below 2^31: nothing overflows
        x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
        x = x ^ (x >> 15)
    places = torch.arange(PROJECTIONS, dtype=torch.int64, device=seeds.device)[:, None]
    return ((x[:, None] >> places) & 1) * 2 - 1
