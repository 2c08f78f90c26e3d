"""The tables that `gdnjax amd-check` prints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

KERNEL_COLUMNS = {
    "name": "kernel",
    "arch": "arch",
    "shape": "shape",
    "vgprs": "VGPRs",
    "spills": "spills",
    "lds_bytes": "LDS",
    "occupancy": "waves/SIMD",
    "wide_loads": "16-byte loads",
    "wide_stores": "16-byte stores",
}
PROGRAM_COLUMNS = {
    "program": "program",
    "config": "config",
    "arch": "arch",
    "rows": "rows",
    "kernels_per_step": "launches/step",
    "pool_copies": "pool copies",
    "alias_bytes": "in place",
    "temp_bytes": "temporaries",
}


def markdown(columns: dict[str, str], rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, columns aligned. `columns`: key of a row -> heading."""
    cells = [list(columns.values()), *[[_text(key, row[key]) for key in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def merged(kernels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that differ in nothing but the shape, as one row with all their shapes."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for row in kernels:
        groups.setdefault(tuple((k, v) for k, v in row.items() if k != "shape"), []).append(row["shape"])
    return [{**dict(key), "shape": _join(shapes)} for key, shapes in groups.items()]


def _join(shapes: list[str]) -> str:
    """`0.8B 9B; bf16 state: 9B` of `0.8B`, `9B` and `9B, bf16 state`."""
    models: dict[str, list[str]] = {}
    for shape in shapes:
        model, _, variant = shape.partition(", ")
        models.setdefault(variant, []).append(model)
    return "; ".join(f"{variant}: {' '.join(m)}" if variant else " ".join(m) for variant, m in models.items())


def _text(key: str, value: Any) -> str:
    if key in ("alias_bytes", "temp_bytes"):
        return f"{value / 2**20:,.1f} MiB"
    return str(value)
