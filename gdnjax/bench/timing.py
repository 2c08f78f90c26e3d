"""Timing of device work: medians over repetitions of a loop that stays on the device."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

COPY_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over repetitions, and half their spread relative to it."""

    seconds: float
    spread: float


def time_loop(
    body: Callable[[Any, Any], Any],
    carry: Any,
    constants: Any = (),
    *,
    calls: int,
    iterations: int = 10,
    repetitions: int = 7,
) -> Timing:
    """Time of one call inside a loop on the device, so that the host's dispatch does not count.

    Args:
        body: (carry, constants) -> carry, pure; it makes `calls` calls of what is timed, each on arrays of
            its own, so that no cache hides the memory. The carry is donated.
        carry: its first input.
        constants: what every body reads. Arrays must come this way: captured ones would be compiled in.
        calls: calls in one body.
        iterations: bodies in one timed loop.
        repetitions: timed loops, after one that warms up.
    """

    def run(carry: Any, constants: Any) -> Any:
        return jax.lax.fori_loop(0, iterations, lambda _, c: body(c, constants), carry)

    loop = jax.jit(run, donate_argnums=0)
    carry = jax.block_until_ready(loop(carry, constants))
    times = []
    for _ in range(repetitions):
        start = time.perf_counter()
        carry = jax.block_until_ready(loop(carry, constants))
        times.append((time.perf_counter() - start) / (iterations * calls))
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / 2 / middle)


def copy_bandwidth(size: int = COPY_BYTES) -> float:
    """Bytes a second of a large copy, bytes read plus bytes written."""
    source = jnp.zeros(size // 4, jnp.int32)
    # The carry alternates between two buffers: each iteration reads one and writes the other.
    timing = time_loop(lambda x, _: x + 1, source, calls=1)
    return 2 * size / timing.seconds
