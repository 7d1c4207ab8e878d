"""EDGC for Megatron-Core: needs the package ``megatron-core`` besides torch.

Megatron is imported when :func:`attach` is first asked for, so that :mod:`edgc.megatron.cpu_shims` can come before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgc.errors import UserError

if TYPE_CHECKING:
    from edgc.megatron.adapter import attach
    from edgc.megatron.attachment import Attachment

__all__ = ["Attachment", "attach"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from edgc.megatron import adapter
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "megatron":
            raise
        raise UserError("edgc.megatron needs Megatron-Core", fix="pip install '.[megatron]'") from None
    return getattr(adapter, name)
