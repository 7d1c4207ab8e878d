"""Values of the benchmarks' options: read from the command line, and refused where they make no sense."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from edgc.errors import UserError

FACTORS = ("fp32", "bf16", "int8", "int4")
"""Types of factors whose engines are measured, a selection of what there is."""


def numbers(text: str, option: str) -> tuple[int, ...]:
    """``8,32`` as numbers, each once; UserError if it is anything else."""
    try:
        return tuple(dict.fromkeys(int(word) for word in text.split(",")))
    except ValueError:
        fix = f"give whole numbers with commas between them, e.g. {option} 8,32"
        raise UserError(f"{option} {text!r} is not valid", fix=fix) from None


def words(text: str, option: str, allowed: Iterable[str]) -> tuple[str, ...]:
    """``a,b`` as words, each once and each allowed; UserError if one is not."""
    known = list(allowed)
    found = tuple(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in found:
        if word not in known:
            raise UserError(f"{option} {word!r} is not known", fix=f"use some of {', '.join(known)}")
    return found


def at_least(low: float, **values: float | tuple[float, ...]) -> None:
    """Raise UserError naming the option unless the value of each, or each of its values, is ``low`` or more."""
    for name, value in values.items():
        every = value if isinstance(value, tuple) else (value,)
        if not every or not all(one >= low for one in every):
            given = ",".join(f"{one:g}" for one in every)
            raise UserError(f"--{name.replace('_', '-')} {given} is not valid", fix=f"use {low:g} or more")


def check_rates(rates: Iterable[float | None], fix: str = "use 1 to 10000 Mbit/s") -> None:
    """Raise UserError with ``fix`` unless a testbed can make these limits in Mbit/s; None is no limit."""
    for rate in rates:
        if rate is not None and not 1 <= rate <= 1e4:
            raise UserError(f"--rates {rate:g} is not valid", fix=fix)


def check_delay(milliseconds: float) -> None:
    """Raise UserError unless a testbed can delay packets so long."""
    if not 0 <= milliseconds <= 1000:
        raise UserError(f"--delay {milliseconds:g} is not valid", fix="use 0 to 1000 milliseconds")


def device_of(name: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is a GPU if there is one. UserError if it is not known, or there is no GPU."""
    [known] = words(name, "--device", ("auto", "cpu", "cuda"))
    if known == "cuda" and not torch.cuda.is_available():
        raise UserError("this torch finds no GPU", where="--device cuda", fix="use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if known == "auto" else known
