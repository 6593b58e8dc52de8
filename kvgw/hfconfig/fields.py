"""Typed reading of a config's plain dict; every complaint names the field by its path."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from kvgw.canonical import Value
from kvgw.errors import FormatError

_INTEGER_END = 2**32
_NESTING_MAX = 3


class Fields:
    """One mapping of a config. A null value reads as absent; several names for one field must agree."""

    __slots__ = ("_values", "path")

    def __init__(self, values: object, path: str = "config") -> None:
        if not isinstance(values, Mapping):
            raise FormatError(f"{path} must be a mapping of field names, not {type(values).__name__}")
        for name in values:
            if type(name) is not str:
                raise FormatError(f"{path} has a field name {name!r} that is not text")
        self._values: Mapping[str, object] = values
        self.path = path

    def __iter__(self) -> Iterator[str]:
        """Names of the fields that are not null."""
        return (name for name, value in self._values.items() if value is not None)

    def states(self, name: str) -> bool:
        """Whether the field is there at all, null included."""
        return name in self._values

    def says_more_than_off(self, name: str) -> bool:
        """Whether the field is anything but null, false, zero or empty."""
        return self._values.get(name) not in (None, False, 0, "", [], (), {})

    def nests(self, name: str) -> bool:
        """Whether the field is a mapping of its own."""
        return isinstance(self._values.get(name), Mapping)

    def missing(self, *names: str) -> FormatError:
        """The error for a required field that is absent or null."""
        wanted = " or ".join(names)
        return FormatError(
            f"{self.path} does not say {wanted}; if transformers has a default for it, pass config.to_dict() of the "
            "loaded config"
        )

    def wrong(self, name: str, expected: str) -> FormatError:
        """The error for a field with an unusable value."""
        return FormatError(f"{self.path}.{name} must be {expected}, not {self._values.get(name)!r:.200}")

    def value_or_none(self, *names: str) -> tuple[str, object] | None:
        """Name and value of the first of `names` that is not null."""
        found = [(name, self._values[name]) for name in names if self._values.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise FormatError(
                    f"{self.path} contradicts itself: {found[0][0]} is {found[0][1]!r:.100}, {name} is {value!r:.100}"
                )
        return found[0] if found else None

    def integer_or_none(self, *names: str, least: int = 1) -> int | None:
        found = self.value_or_none(*names)
        if found is None:
            return None
        name, value = found
        if type(value) is not int or not least <= value < _INTEGER_END:
            raise self.wrong(name, f"an integer from {least} to 2**32-1")
        return value

    def integer(self, *names: str, least: int = 1) -> int:
        value = self.integer_or_none(*names, least=least)
        if value is None:
            raise self.missing(*names)
        return value

    def flag_or_none(self, name: str) -> bool | None:
        value = self._values.get(name)
        if value is not None and type(value) is not bool:
            raise self.wrong(name, "true or false")
        return value

    def flag(self, name: str) -> bool:
        value = self.flag_or_none(name)
        if value is None:
            raise self.missing(name)
        return value

    def text_or_none(self, *names: str) -> str | None:
        found = self.value_or_none(*names)
        if found is None:
            return None
        name, value = found
        if type(value) is not str or not value:
            raise self.wrong(name, "non-empty text")
        return value

    def mapping_or_none(self, name: str) -> Fields | None:
        value = self._values.get(name)
        return None if value is None else Fields(value, f"{self.path}.{name}")

    def mapping(self, name: str) -> Fields:
        value = self.mapping_or_none(name)
        if value is None:
            raise self.missing(name)
        return value

    def items_or_none(self, name: str) -> Sequence[object] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self.wrong(name, "a list")
        return value

    def integers(self, name: str) -> list[int]:
        items = self.items_or_none(name)
        if items is None:
            raise self.missing(name)
        integers = [item for item in items if type(item) is int]
        if len(integers) != len(items):
            raise self.wrong(name, "a list of integers")
        return integers

    def texts_or_none(self, name: str) -> list[str] | None:
        items = self.items_or_none(name)
        if items is None:
            return None
        texts = [item for item in items if type(item) is str]
        if len(texts) != len(items):
            raise self.wrong(name, "a list of names")
        return texts

    def mappings(self, name: str) -> list[Fields]:
        items = self.items_or_none(name)
        if items is None:
            raise self.missing(name)
        return [Fields(item, f"{self.path}.{name}[{index}]") for index, item in enumerate(items)]

    def canonical(self, name: str) -> Value:
        """The field as a canonical value: every number a float, so that 10000 and 10000.0 are one; flags as text."""
        return self._canonical(name, self._values.get(name), 0)

    def _canonical(self, name: str, value: object, depth: int) -> Value:
        if type(value) is bool:
            return "true" if value else "false"
        if value is None or type(value) is str:
            return value
        if isinstance(value, int | float):
            return self._number(name, value)
        if isinstance(value, list | tuple) and depth < _NESTING_MAX:
            return tuple(self._canonical(name, item, depth + 1) for item in value)
        raise self.wrong(name, "text, a finite number, a flag, or a list of them")

    def _number(self, name: str, value: float) -> float:
        try:
            number = float(value)
        except OverflowError as error:
            raise self.wrong(name, "a number that fits 64 bits") from error
        if not math.isfinite(number):
            raise self.wrong(name, "a finite number")
        return number + 0.0  # -0.0 is the same position value as 0.0

    def as_json(self) -> str:
        """The whole mapping as JSON that is the same for equal mappings."""
        try:
            return json.dumps(dict(self._values), sort_keys=True, separators=(",", ":"), allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise FormatError(f"{self.path} cannot be written as JSON: {error}") from error
