"""EDGC for Megatron-Core: needs the package ``megatron-core`` besides torch."""

from __future__ import annotations

from edgc.megatron.attachment import Attachment, attach

__all__ = ["Attachment", "attach"]
