"""Base of the settings of the library: checks of values, and ``from_dict`` / ``to_dict``.

Every check raises :class:`edgc.errors.UserError` naming the key, the value and the fix.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from edgc.errors import UserError, choices, nearest

Kind = TypeVar("Kind")


def require(condition: bool, key: str, value: object, fix: str) -> None:
    """Refuse ``value`` unless the condition holds."""
    if not condition:
        raise UserError(f"{key} = {value!r} is not valid", fix=fix)


def one_of(key: str, value: object, allowed: Collection[str]) -> None:
    """Refuse anything that is not ``allowed``."""
    require(value in list(allowed), key, value, choices(value, allowed))  # also what cannot be hashed


def mapping(values: object, where: object, fix: str) -> None:
    """Refuse settings that are no mapping."""
    if not isinstance(values, Mapping):
        raise UserError(f"the settings are {values!r}, not a mapping", where=where, fix=fix)


def integer(key: str, value: object, low: int) -> int:
    """``value`` as a plain int; refuse anything but a whole number, of whatever type, of at least ``low``."""
    try:
        whole = low - 1 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        whole = low - 1
    require(whole >= low, key, value, f"use a whole number of at least {low}")
    return whole


def number(
    key: str, value: object, low: float, high: float = math.inf, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Refuse anything but a finite number in [low, high], without an end that is open."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    ok = ok and (value > low if open_low else value >= low)  # type: ignore[operator]
    ok = ok and (value < high if open_high else value <= high)  # type: ignore[operator]
    bound = f"{'above' if open_low else 'at least'} {low:g}"
    if high < math.inf:
        bound += f" and {'below' if open_high else 'at most'} {high:g}"
    require(ok, key, value, f"use a number {bound}")


def dotted(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys; empty ones stay values."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        inner = isinstance(value, Mapping) and value
        flat |= dotted(value, f"{prefix}{key}.") if inner else {f"{prefix}{key}": value}
    return flat


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Settings that differ, with both values; "" if none does."""
    old, new = dotted(old), dotted(new)
    # Files may not tell lists from tuples.
    other = [key for key in {**old, **new} if plain(old.get(key)) != plain(new.get(key))]
    return ", ".join(f"{key} = {old.get(key)!r}, now {new.get(key)!r}" for key in other)


def plain(value: Any) -> Any:
    """``value`` with non-finite floats as None (JSON has no NaN) and tuples as lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def need(state: object, keys: Iterable[str], where: str) -> None:
    """Refuse a saved state that is no mapping or lacks one of ``keys``; ``where`` is its place in the whole."""
    fix = "load what state_dict() returned, of the same version of edgc"
    if not isinstance(state, Mapping):
        raise UserError(f"the saved state's {where} is {type(state).__name__}, not a mapping", fix=fix)
    for key in keys:
        if key not in state:
            raise UserError(f"the saved state has no {where}.{key}", fix=fix)


class Settings:
    """``from_dict`` / ``to_dict`` for a frozen dataclass of settings; nested settings are dictionaries.

    On construction switches and sections are checked by their declaration, and floats made plain; the rest is for
    :meth:`_check`.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, float):  # NumPy's would be in every checkpoint, and could not be read
                object.__setattr__(self, field.name, float(value))
            if field.type == "bool":
                require(isinstance(value, bool), field.name, value, "use true or false")
            elif (section := _section(field)) is not None:
                if isinstance(value, Mapping):
                    value = section.from_dict(value, prefix=f"{field.name}.")
                    object.__setattr__(self, field.name, value)
                fix = "give a mapping of its settings, or leave it out"
                require(isinstance(value, section), field.name, value, fix)
        self._check()

    def _check(self) -> None:
        """Refuse values that are not valid, with a ``UserError``."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], *, where: object = None, prefix: str = "") -> Self:
        """Build from a plain mapping; unknown keys and bad values raise ``UserError`` naming ``where``."""
        fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
        kwargs: dict[str, Any] = {}
        for key, value in values.items():
            if key not in fields:
                raise unknown(key, fields, where, prefix)
            section = _section(fields[key])
            if section is not None and isinstance(value, Mapping):
                value = section.from_dict(value, where=where, prefix=f"{prefix}{key}.")
            kwargs[key] = value
        try:
            return cls(**kwargs)
        except UserError as error:
            if error.where is not None:
                raise
            raise UserError(prefix + error.message, where=where, fix=error.fix) from None

    def _whole(self, key: str, low: int, *, optional: bool = False) -> None:
        """Check a whole number and keep it as a plain int: one of NumPy's would not go into JSON or YAML."""
        value = getattr(self, key)
        if not (optional and value is None):
            object.__setattr__(self, key, integer(key, value, low))

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain nested dictionaries, defaults included."""
        return dataclasses.asdict(self)  # type: ignore[call-overload]


def subclasses(kind: type[Kind]) -> Iterator[type[Kind]]:
    """The classes that are derived from one, and those that are derived from these."""
    for other in kind.__subclasses__():
        yield other
        yield from subclasses(other)


def unknown(key: str, known: Iterable[str], where: object = None, prefix: str = "") -> UserError:
    """The error for a key that nothing knows."""
    return UserError(f"unknown key {prefix}{key}", where=where, fix=nearest(key, known, "known keys"))


def _section(field: dataclasses.Field[Any]) -> type[Settings] | None:
    """The type of a field that holds nested settings, else None."""
    kind = field.default_factory
    return kind if isinstance(kind, type) and issubclass(kind, Settings) else None
