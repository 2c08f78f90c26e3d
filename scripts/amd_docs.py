"""Makes the tables of docs/amd.md from what `gdnjax amd-check --json` printed; `make amd-docs` runs both.

    python scripts/amd_docs.py build/amd_check.json

Keeps the figures as docs/results/amd_check.json, shapes with equal figures on one line.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gdnjax.amd.report import merged
from gdnjax.amd.targets import TARGETS

PAGE = Path("docs/amd.md")
RESULTS = Path("docs/results/amd_check.json")
BEGIN, END = "<!-- made by make amd-docs -->", "<!-- end of what make amd-docs makes -->"
COMPILERS = ("jax", "jax-rocm7-pjrt", "triton")


def main(path: str, root: Path) -> None:
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    if found["failures"]:
        raise SystemExit(f"{path} lists failures, the tables stay as they are: {'; '.join(found['failures'])}")
    kept = {
        "versions": {name: importlib.metadata.version(name) for name in COMPILERS},
        "kernels": merged(found["kernels"]),
        "programs": found["programs"],
    }
    page = root / PAGE
    text = replaced(page.read_text(encoding="utf-8"), tables(kept))
    (root / RESULTS).write_text(one_line_each(kept), encoding="utf-8")
    page.write_text(text, encoding="utf-8")


def replaced(page: str, figures: str) -> str:
    """The page with its figures, which stand between two comments, replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} has no place for the tables: it takes the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{figures}\n\n{END}{after}"


def tables(kept: dict[str, Any]) -> str:
    """The figures as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in kept["versions"].items())
    kernels, programs = kept["kernels"], kept["programs"]
    archs = [arch for arch in TARGETS if any(row["arch"] == arch for row in (*kernels, *programs))]
    names = sorted({row["name"] for row in kernels})
    keys = list(dict.fromkeys((row["program"], row["config"], row["rows"]) for row in programs))
    by_kernel = table(
        "kernel",
        archs,
        {f"`{n}`": {arch: kernel_cell(r for r in kernels if (r["name"], r["arch"]) == (n, arch)) for arch in archs}
         for n in names},
    )  # fmt: skip
    by_program = table(
        "program",
        archs,
        {f"`{key[0]}`, {key[1]}, {key[2]} rows": {
            row["arch"]: f"{row['kernels_per_step']} / {row['pool_copies']}"
            for row in programs if (row["program"], row["config"], row["rows"]) == key} for key in keys},
    )  # fmt: skip
    return f"""\
Compilers: {versions}.

Most VGPRs / most spilled ones over all shapes (fewest waves that a SIMD holds):

{by_kernel}

{spilling(kernels)}

Launches of one step / writes of a whole pool, ring or KV cache:

{by_program}"""


def kernel_cell(rows: Iterable[dict[str, Any]]) -> str:
    """`VGPRs / spilled (waves)`: the worst of each."""
    rows = list(rows)
    if not rows:
        return ""
    most = {key: max(row[key] for row in rows) for key in ("vgprs", "spills")}
    return f"{most['vgprs']} / {most['spills']} ({min(row['occupancy'] for row in rows)})"


def spilling(kernels: list[dict[str, Any]]) -> str:
    """Every kernel that spills, with its shapes."""
    lines = [f"* `{r['name']}` on {r['arch']}: {r['spills']} ({r['shape']})" for r in kernels if r["spills"]]
    return "\n".join(["Registers that spill:", "", *lines]) if lines else "No kernel spills registers on any of them."


def table(first: str, archs: list[str], lines: dict[str, dict[str, str]]) -> str:
    """A Markdown table: a line's name -> its cells by architecture."""
    head = [f"| {first} | {' | '.join(archs)} |", "|---" * (len(archs) + 1) + "|"]
    body = [f"| {name} | {' | '.join(cells.get(arch, '') for arch in archs)} |" for name, cells in lines.items()]
    return "\n".join([*head, *body])


def one_line_each(kept: dict[str, Any]) -> str:
    """JSON with a row a line, so that a change of one figure is a change of one line."""
    parts = []
    for key, value in kept.items():
        lines = ",\n".join(json.dumps(row) for row in value) if isinstance(value, list) else None
        parts.append(f"{json.dumps(key)}: " + (f"[\n{lines}\n]" if lines is not None else json.dumps(value)))
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/amd_docs.py AMD_CHECK.json")
    main(sys.argv[1], Path(__file__).resolve().parent.parent)
