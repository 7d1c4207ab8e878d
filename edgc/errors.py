"""The exception for mistakes that a user can mend, what to say of misspelt names, and how a kept error is raised."""

from __future__ import annotations

import argparse
import copy
import difflib
from collections.abc import Iterable
from typing import NoReturn, TypeVar

AnyError = TypeVar("AnyError", bound=Exception)


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


class Parser(argparse.ArgumentParser):
    """Parser of a command line whose mistakes are :class:`UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, fix="see --help")


def nearest(name: object, known: Iterable[str], otherwise: str = "known") -> str:
    """Name that may have been meant by ``name``, as a ``fix``: the closest of ``known``, or else all of them."""
    names = list(known)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"did you mean {close[0]}?" if close else f"{otherwise}: {', '.join(names)}"


def choices(name: object, allowed: Iterable[str]) -> str:
    """All that is ``allowed``, as a ``fix``, and which of it may have been meant by ``name``."""
    names = list(allowed)
    close = difflib.get_close_matches(str(name), names, n=1)
    return f"use one of {', '.join(names)}" + (f"; did you mean {close[0]}?" if close else "")


def copied(error: AnyError) -> AnyError:
    """``error`` anew, to be raised in its place where it is kept: an error holds on to the frames that it goes through,
    and so to all that is in use there."""
    new = copy.copy(error)
    new.__traceback__, new.__cause__ = None, error.__cause__
    return new
