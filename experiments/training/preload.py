"""What the fork server of a CPU machine imports once, for all ranks that it forks."""

from __future__ import annotations

import logging
import warnings

from edgc.megatron.cpu_shims import without_compiler


def quiet() -> None:
    """Megatron warns on every import about each optional package that is absent."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)


quiet()
with without_compiler():
    import experiments.training.train  # noqa: F401
