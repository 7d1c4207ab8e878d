"""When kernels of Triton's do the work of torch's operations: those of ``edgc.runtime.block_kernels``, for these launch
dozens, and of ``edgc.runtime.matrix_kernels``, for these read a matrix nine times.

On a GPU where there is a ``triton``, or on a CPU with ``TRITON_INTERPRET=1`` in the environment, which is slow. Each
kind of message and rank is tried first, on every device: what the kernels cannot do or do otherwise stays torch's. But
products of matrices are not torch's to the bit, so replicas would part if only some ranks had those kernels: they are
used where ``EDGC_MATRIX_KERNELS=1`` asks every rank for them, and a rank on which they fail stops.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from edgc.errors import UserError
from edgc.lazy import torch

if TYPE_CHECKING:
    from edgc.compressors.quantization import Blocks

_ASKS = {"cpu": "TRITON_INTERPRET", "cuda": "EDGC_MATRIX_KERNELS"}
_LARGEST = 128  # rank of which a tile has room
_PRODUCT = 2.0**-18  # of the products' magnitudes: fp32 and its parts in TF32 lose less, TF32 alone more
_tried: dict[tuple[torch.device, str], ModuleType | None] = {}


def kernels_for(blocks: Blocks, device: torch.device) -> ModuleType | None:
    """The kernels, if they are to do the work of ``blocks`` on ``device``; the host waits for a GPU when first asked.

    Warns:
        UserWarning: once, if there is a ``triton`` and it does not do.
    """
    if blocks.stochastic or not blocks.has_kernels or device.type not in ("cpu", "cuda"):
        return None
    return _first(device, f"{blocks.bits} bits", lambda: _try_blocks(blocks, device))


def matrix_kernels_for(rank: int, device: torch.device) -> ModuleType | None:
    """The kernels, if they are to make passes over matrices on ``device`` at ``rank``.

    Raises:
        UserError: they were asked for on a GPU, and do not do.
    """
    asked = _ASKS.get(device.type)
    if rank > _LARGEST or asked is None or os.environ.get(asked) != "1":
        return None
    padded = max(16, 1 << (rank - 1).bit_length())  # as a tile is
    found = _first(device, f"rank {padded}", lambda: _try_matrices(padded, device))
    if found is None and device.type == "cuda":
        fix = "leave it out on every rank; a warning says why, if there is a triton"
        raise UserError(f"kernels of Triton do not do for rank {padded} on {device}", where=f"{asked}=1", fix=fix)
    return found


def _first(device: torch.device, what: str, check: Callable[[], ModuleType | None]) -> ModuleType | None:
    """Result of ``check``, which is made when ``what`` is first asked for."""
    if (device, what) not in _tried:
        reason, found, there = "they give other numbers than torch", None, True
        try:
            found = check()
        except Exception as error:  # of whatever Triton lacks: a library, a compiler, a driver, this GPU
            there = not (isinstance(error, ModuleNotFoundError) and error.name == "triton")
            reason = (str(error).splitlines() or [type(error).__name__])[0]
        if found is None and there:
            line = f"edgc: kernels of Triton are not used for {what} on {device}, torch's are: {reason}"
            warnings.warn(line, stacklevel=2)
        _tried[device, what] = found
    return _tried[device, what]


def _try_blocks(blocks: Blocks, device: torch.device) -> ModuleType | None:
    from edgc.runtime import block_kernels

    x = torch.arange(3 * blocks.group + 9, dtype=torch.float32, device=device).mul_(37).remainder_(201).sub_(100)
    messages = torch.zeros((2, blocks.bytes(len(x))), dtype=torch.uint8, device=device)
    kept, out = x.repeat(2, 1), x.repeat(2, 1)
    blocks.pack_by_torch(x, messages[0], kept[0])
    blocks.unpack_by_torch(messages[0], out[0], 0.5, True)
    block_kernels.pack(blocks, x, messages[1:], kept[1])
    block_kernels.unpack(blocks, messages[1:], out[1], weight=0.5, add=True)
    return block_kernels if all(torch.equal(*pair) for pair in (messages, kept, out)) else None


def _try_matrices(rank: int, device: torch.device) -> ModuleType | None:
    """In fp64, for torch's own products may be of less than fp32."""
    from edgc.runtime import matrix_kernels

    generator = torch.Generator("cpu").manual_seed(0)
    shapes = ((2, 70, 130), (2, 70, 130), (2, rank, 130), (2, 70, rank))
    g, error, right, left = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device) for shape in shapes
    )
    good = torch.ones((), dtype=torch.bool, device=device)
    for height in matrix_kernels.HEIGHTS:
        m, p, spare = g.clone(), torch.empty_like(left), torch.empty_like(g)
        norms = matrix_kernels.load(m, error, right, p, height)
        added = m.clone()
        own, mean = (left, right), (left.clone(), right)
        matrix_kernels.store(m, error, spare, own, mean, good, torch.float32, height)
        wide, (x, y) = added.double(), (part.double() for part in own)
        results = (
            (added, g + error, 0.0, wide),
            (norms, torch.stack([g.double(), wide]).square().sum((-2, -1)), 2.0**-40, norms),
            (p, wide @ y.mT, _PRODUCT, wide.abs() @ y.abs().mT),
            (m, x @ y, _PRODUCT, x.abs() @ y.abs()),
            (spare, wide - x @ y, _PRODUCT, wide.abs() + x.abs() @ y.abs()),
        )
        if not all(bool(((found - exact).abs() <= share * scale).all()) for found, exact, share, scale in results):
            return None
    return matrix_kernels
