"""What can be read off a compiled program: its launches and its copies of the state."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Set

# A line of XLA's thunk sequence: indentation, number, kind.
THUNK = re.compile(r"^(\s*)\d+: (k\w+)")
# Kinds that hold other thunks, or wait for one: nothing is launched by themselves.
CONTAINERS = {"kWhile", "kConditional", "kSequential", "kCommandBuffer", "kAsyncDone", "kCopyDone", "kWaitForStreams"}

# An instruction: its result, an array or a tuple, and its operation.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (.+?) ([a-z][\w-]*)\(", re.MULTILINE)
ARRAY = re.compile(r"\w\[([\d,]*)\]")
# What may have a pool's size without writing a whole pool: handing it on, and updates in place. A fusion
# counts by what stands inside it, and a custom call is a kernel.
HARMLESS = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "fusion", "custom-call",
    "scatter", "dynamic-update-slice", "copy-done", "opt-barrier",
}  # fmt: skip


def launches(thunks: str, loop: bool) -> int:
    """Launches of one step: kernels, copies, fills and library calls; a nested loop's body counts once.

    Args:
        thunks: XLA's dump of the thunk sequence.
        loop: the program is one loop; its body and condition are counted, not what stands around it.

    Raises:
        ValueError: no thunks are found, or not exactly one loop.
    """
    lines = [(len(match[1]), match[2]) for match in map(THUNK.match, thunks.splitlines()) if match]
    if not lines:
        raise ValueError("the thunk sequence lists no thunk: another version of XLA?")
    if loop:
        outer = min(indent for indent, _ in lines)
        starts = [i for i, line in enumerate(lines) if line == (outer, "kWhile")]
        if len(starts) != 1:
            raise ValueError(f"the program has {len(starts)} outermost loops, not one")
        inside = lines[starts[0] + 1 :]
        end = next((i for i, (indent, _) in enumerate(inside) if indent <= outer), len(inside))
        lines = inside[:end]
    return sum(kind not in CONTAINERS for _, kind in lines)


def whole_array_writes(hlo: str, sizes: Set[int]) -> Counter[str]:
    """Operations, by name, that write a whole array of one of these element counts: copies, and what
    amounts to one (a conversion, a select over the pool)."""
    found: Counter[str] = Counter()
    for result, operation in INSTRUCTION.findall(hlo):
        arrays = (math.prod(int(n) for n in dims.split(",") if n) for dims in ARRAY.findall(result))
        if operation not in HARMLESS and any(size in sizes for size in arrays):
            found[operation] += 1
    return found
