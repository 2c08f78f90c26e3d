"""What a JSON schema may ask for, before a compiler sees it: limits that the grammar library does not have itself."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

MOST_BYTES = 64 * 2**10
MOST_DEPTH = 100
"""Of objects and lists in each other. The library's own reader takes 128."""
MOST_REMAINDERS = 20_000
"""`multipleOf` compiles to an automaton with a state for every remainder, and two of them to one with a state for every
pair: a million take 20 s and 400 MB."""


def check(schema: Any) -> str:
    """The schema as JSON.

    Raises:
        ValueError: it is no JSON object, or passes a limit; the message names it.
    """
    if not isinstance(schema, Mapping):
        raise ValueError(f"the schema is a {type(schema).__name__}; it takes a JSON object")
    parts = []
    for depth, key, value in _walk(schema):
        if depth > MOST_DEPTH:
            raise ValueError(f"the schema has more than {MOST_DEPTH} levels; make it flatter, or use $defs")
        parts.append((key, value))
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except (TypeError, ValueError) as error:
        raise ValueError(f"the schema is not JSON: {error}") from None
    if size > MOST_BYTES:
        raise ValueError(f"the schema has {size} bytes; at most {MOST_BYTES} are taken")
    # Last: of a schema without a limit, the least common multiple alone would take hours.
    _check_multiples([value for key, value in parts if key == "multipleOf" and type(value) in (int, float)])
    return text


def _check_multiples(values: list[int | float]) -> None:
    for value in values:
        if value <= 0:
            raise ValueError(f"the schema has multipleOf = {value}; it takes a number > 0")
    multiples = [Fraction(str(value)) for value in values]
    whole = math.lcm(*(m.denominator for m in multiples))
    if math.lcm(*(int(m * whole) for m in multiples)) > MOST_REMAINDERS:
        raise ValueError(
            f"the schema's values of multipleOf have more than {MOST_REMAINDERS} remainders together (their least "
            "common multiple, counted in their last decimal); use smaller or rounder ones"
        )


def _walk(schema: Any) -> Iterator[tuple[int, Any, Any]]:
    """(depth, key, value) of everything in it; no recursion, and nothing behind what is too deep is needed."""
    left: list[tuple[int, Any, Any]] = [(1, None, schema)]
    while left:
        depth, key, value = left.pop()
        yield depth, key, value
        if isinstance(value, Mapping):
            left += [(depth + 1, k, v) for k, v in value.items()]
        elif isinstance(value, list | tuple):
            left += [(depth + 1, None, v) for v in value]
