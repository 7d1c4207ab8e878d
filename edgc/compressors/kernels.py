"""When the kernels of ``edgc.runtime.block_kernels`` quantise in place of torch's operations, which launch dozens.

On a GPU where there is a ``triton``, or on a CPU with ``TRITON_INTERPRET=1`` in the environment, which is slow. Each
kind of message is tried first, on every device: what the kernels cannot do or do otherwise stays torch's.
"""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import TYPE_CHECKING

from edgc.lazy import torch

if TYPE_CHECKING:
    from edgc.compressors.quantization import Blocks

_tried: dict[tuple[torch.device, int], ModuleType | None] = {}


def kernels_for(blocks: Blocks, device: torch.device) -> ModuleType | None:
    """The kernels, if they are to do the work of ``blocks`` on ``device``; the host waits for a GPU when first asked.

    Warns:
        UserWarning: once, if there is a ``triton`` and it does not do.
    """
    if blocks.stochastic or not blocks.has_kernels or device.type not in ("cpu", "cuda"):
        return None
    key = (device, blocks.bits)
    if key not in _tried:
        _tried[key] = _try(blocks, device)
    return _tried[key]


def _try(blocks: Blocks, device: torch.device) -> ModuleType | None:
    reason = "they give other numbers than torch"
    try:
        from edgc.runtime import block_kernels

        x = torch.arange(3 * blocks.group + 9, dtype=torch.float32, device=device).mul_(37).remainder_(201).sub_(100)
        messages = torch.zeros((2, blocks.bytes(len(x))), dtype=torch.uint8, device=device)
        kept, out = x.repeat(2, 1), x.repeat(2, 1)
        blocks.pack_by_torch(x, messages[0], kept[0])
        blocks.unpack_by_torch(messages[0], out[0], 0.5, True)
        block_kernels.pack(blocks, x, messages[1:], kept[1])
        block_kernels.unpack(blocks, messages[1:], out[1], weight=0.5, add=True)
        if all(torch.equal(*pair) for pair in (messages, kept, out)):
            return block_kernels
    except Exception as error:  # of whatever Triton lacks: a library, a compiler, a driver, this GPU
        if isinstance(error, ModuleNotFoundError) and error.name == "triton":
            return None
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    what = f"edgc: kernels of Triton are not used for {blocks.bits} bits on {device}, torch's are: {reason}"
    warnings.warn(what, stacklevel=2)
    return None
