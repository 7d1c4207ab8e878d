"""The device that these tests run on: a GPU where there is one, else the CPU treated as one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from edgc.runtime.device import masked_path


def _name() -> str:
    """In every test's id, so that a report says what was tested."""
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "masked path on the CPU"


def of_kernels() -> list[pytest.MarkDecorator]:
    """Marks of a module that tests Triton's kernels; it is skipped where there is no Triton."""
    pytest.importorskip("triton", reason="there is no triton here; docs/gpu.md says how to run this by hand")
    return [
        pytest.mark.gpu,
        pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of the interpreter: 1 / 0, what is not finite
        pytest.mark.skipif(
            not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
            reason="neither a GPU nor TRITON_INTERPRET=1",
        ),
    ]


@pytest.fixture(params=[pytest.param(None, id=_name())])
def device() -> Iterator[torch.device]:
    """The GPU, or the CPU on the masked path; results to compare with are computed under ``masked_path(False)``."""
    if torch.cuda.is_available():
        # Products in TF32 would lose what is to be kept: sent plus kept is exact in fp32 only.
        torch.set_float32_matmul_precision("highest")
        yield torch.device("cuda", 0)
        return
    with masked_path():
        yield torch.device("cpu")
