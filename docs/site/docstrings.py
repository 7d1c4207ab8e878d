"""Docstrings of the library as Markdown: roles become code, a table of reStructuredText stays as it is written."""

import re
from typing import Any

from griffe import Extension

ROLE = re.compile(r":[a-z]+:(`[^`]+`)")
TABLE = re.compile(r"^=+( +=+)+\n(?:.+\n)+?=+( +=+)+\n(?:.+\n)+?=+( +=+)+$", re.MULTILINE)


class Docstrings(Extension):
    """Rewrites the docstring of every object that griffe has read."""

    def on_instance(self, *, obj: Any, **_: Any) -> None:
        if obj.is_alias or not obj.docstring:
            return
        text = ROLE.sub(r"\1", obj.docstring.value.replace("``", "`"))
        obj.docstring.value = TABLE.sub(lambda table: f"```text\n{table[0]}\n```", text)
