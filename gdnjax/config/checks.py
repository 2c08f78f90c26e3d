"""Checks of a dataclass's fields against their annotations, and the error they raise."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union

PLATFORMS = ("rocm", "cuda", "cpu")


class ConfigError(ValueError):
    """A configuration that cannot work; the message names the key, its value and what it takes."""


def check_types(config: Any, values: Mapping[str, Any] | None = None, where: str = "") -> None:
    """Checks a dataclass's fields, or `values` for some of them, against their annotations.

    `True` is no integer, an integer is a float.

    Raises:
        ConfigError: names the field, its value and what it takes, behind `where`.
    """
    hints = typing.get_type_hints(type(config))
    if values is None:
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    for name, value in values.items():
        if not _matches(value, hints[name]):
            raise ConfigError(f"{where}{name} = {value!r}; it takes {_describe(hints[name])}")


def _matches(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_matches(value, h) for h in typing.get_args(hint))
    if origin is tuple:
        args = typing.get_args(hint)
        if not isinstance(value, tuple):
            return False
        if args[-1] is Ellipsis:
            return all(_matches(v, args[0]) for v in value)
        return len(value) == len(args) and all(map(_matches, value, args))
    if hint is Any:
        return True
    if hint is float:
        # Compared, not converted: an integer may be too large for a float. NaN compares as false.
        limit = sys.float_info.max
        return isinstance(value, int | float) and not isinstance(value, bool) and -limit <= value <= limit
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(hint)))
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a string"}.get(hint, str(hint))


def require(condition: bool, key: str, value: Any, takes: str) -> None:
    if not condition:
        raise ConfigError(f"{key} = {value!r}; it takes {takes}")
