"""What the compiled code must keep to."""

from __future__ import annotations

from typing import Any, Literal

Side = Literal["decode", "prefill"]
"""`decode`: the kernel runs at every step. `prefill`: it runs in prefills only."""

PREFILL_ARCHS = ("gfx942", "gfx950")
"""Where prefill kernels must not spill either: elsewhere a chunk's matrices need more registers than there
are, which costs time and nothing else."""


def spills(side: Side, row: dict[str, Any]) -> str | None:
    """What is wrong with a row of the kernels' table, or None."""
    if not row["spills"] or (side == "prefill" and row["arch"] not in PREFILL_ARCHS):
        return None
    return f"{row['name']}, {row['shape']}, {row['arch']}: spills {row['spills']} registers"


def copies(row: dict[str, Any]) -> str | None:
    """What is wrong with a row of the programs' table, or None."""
    if not row["pool_copies"]:
        return None
    return (
        f"{row['program']}, {row['config']}, {row['arch']}: writes a whole pool, ring or KV cache "
        f"{row['pool_copies']} times instead of updating it in place"
    )
