"""The one exception for mistakes that a user can mend."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in what the user gave: a setting, a file, a folder.

    Programs print it as one line, ``error: <message> (in <where>); <fix>``, and end with exit code 2.

    Args:
        message: what is wrong, naming the key or the object.
        where: the file or object that holds the mistake.
        fix: what to write or do instead.
    """

    def __init__(self, message: str, *, where: object = None, fix: str | None = None) -> None:
        self.message, self.where, self.fix = message, where, fix
        line = message + (f" (in {where})" if where is not None else "") + (f"; {fix}" if fix else "")
        super().__init__(" ".join(line.split()))
