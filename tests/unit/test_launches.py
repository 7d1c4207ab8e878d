"""How many operations a GPU is given for a bucket of gradients: small ones take longer to launch than to do.

Counted on the masked path. A step of GPT-2 124M on a GPU was limited by the host before operations were shared by the
matrices of all shapes: 337 for this bucket with fp32 factors, 619 with int8 factors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from edgc.compressors import Gradient
from edgc.config import EDGCConfig
from edgc.runtime.device import masked_path
from experiments.bench.variants import Mirror

HIDDEN, RANK = 64, 8
LAYER = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
VECTORS = ((HIDDEN,), (3 * HIDDEN,), (HIDDEN,), (HIDDEN,), (HIDDEN,), (4 * HIDDEN,), (HIDDEN,))
# What only makes another view or takes memory launches nothing.
FREE = ("view", "as_strided", "slice", "select", "split", "expand", "transpose", "detach", "alias", "unbind", "empty")


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not any(word in name for word in (*FREE, "permute", "squeeze", "diagonal")) and name != "t":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def launches(shapes: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> int:
    """Of a step in the middle of a training."""
    config = EDGCConfig.from_dict({"method": "powersgd", "rank": RANK, "min_compression_elements": 64, **options})
    sizes = [torch.Size(shape).numel() for shape in shapes]
    flat = torch.empty(sum(sizes))
    parts = zip(flat.split(sizes), shapes, strict=True)
    gradients = [Gradient(f"p{i}", part.view(shape)) for i, (part, shape) in enumerate(parts)]
    with masked_path():
        compressor = config.build()
        for _ in range(3):
            flat.normal_()
            with Launches() as counted:
                compressor.reduce(gradients, Mirror(), RANK)
                compressor.settle(True)
    return len(counted.names)


@pytest.mark.parametrize(
    ("options", "most"),
    [({}, 130), ({"one_sided": True}, 130), ({"factor_dtype": "bf16"}, 150), ({"factor_dtype": "int8"}, 320)],
    ids=str,
)
def test_a_bucket_launches_little_and_another_shape_hardly_more(options: dict[str, Any], most: int) -> None:
    bucket = (*LAYER, *VECTORS)
    count = launches(bucket, options)
    assert count <= most
    # Products, and what masks the new error and the new factor; everything else is done for all shapes at once.
    assert launches((*bucket, (2 * HIDDEN, HIDDEN)), options) <= count + 20
    assert launches((*bucket, (HIDDEN,)), options) == count
