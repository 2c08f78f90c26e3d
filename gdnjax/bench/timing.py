"""Timing of device work from JAX's profiler: how long the device says that each kernel ran.

Neither the host's dispatch nor the gaps between kernels count, so that a kernel and the copy it is compared
with are measured alike, whatever runs around them.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

COPY_BYTES = 2**30
PRODUCT_SIZE = 8192


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over repetitions, and half their spread relative to it."""

    seconds: float
    spread: float


def time_kernels(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    constants: Any = (),
    *,
    calls: int,
    repetitions: int = 9,
) -> Timing:
    """Time on the device of one call of what `step` calls `calls` times.

    Everything that runs on the device counts, copies included, so that nothing can hide beside a kernel.

    Args:
        step: (carry, constants) -> (carry, outputs), pure; each of its calls works on arrays of its own, so
            that no cache hides the memory. The carry is donated.
        carry: its first input.
        constants: what every step reads. Arrays must come this way: captured ones would be compiled in.
        calls: calls in one step.
        repetitions: steps that are timed, after one that warms up.

    Raises:
        RuntimeError: the profiler saw nothing run on a GPU, or not the same in every step.
    """
    run = jax.jit(step, donate_argnums=0)
    carry, outputs = jax.block_until_ready(run(carry, constants))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repetitions):
                carry, outputs = run(carry, constants)
            jax.block_until_ready((carry, outputs))
        traces = list(Path(folder).rglob("*.xplane.pb"))
        if len(traces) != 1:
            raise RuntimeError(f"the profiler wrote {len(traces)} traces, not one; it takes a single process")
        profile = jax.profiler.ProfileData.from_file(str(traces[0]))
    return summarize(device_events(profile), calls, repetitions)


def device_events(profile: Any) -> list[tuple[float, float]]:
    """(start, duration) in nanoseconds of everything that ran on a stream of a GPU, in order."""
    events = [
        (event.start_ns, event.duration_ns)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]
    return sorted(events)


def summarize(events: list[tuple[float, float]], calls: int, repetitions: int) -> Timing:
    """The events of `repetitions` equal steps of `calls` calls each -> the time of one call.

    Raises:
        RuntimeError: there are none, or they do not divide into equal steps.
    """
    if not events or len(events) % repetitions:
        raise RuntimeError(
            f"the profiler recorded {len(events)} kernels on GPUs in {repetitions} equal steps; it takes a GPU "
            "whose profiler JAX can read, and nothing else running in this process"
        )
    size = len(events) // repetitions
    steps = [events[i : i + size] for i in range(0, len(events), size)]
    times = [sum(duration for _, duration in step) / calls * 1e-9 for step in steps]
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / 2 / middle)


def copy_bandwidth(size: int = COPY_BYTES) -> float:
    """Bytes a second of a large copy, bytes read plus bytes written."""
    source = jnp.zeros(size // 4, jnp.int32)
    timing = time_kernels(lambda x, _: (x + 1, ()), source, calls=1)
    return 2 * size / timing.seconds


def product_rate(size: int = PRODUCT_SIZE) -> float:
    """Operations a second of a large square bfloat16 product, multiplications plus additions."""
    x, y = jax.random.normal(jax.random.key(0), (2, size, size), jnp.bfloat16)
    # Scaled, so that what is multiplied again and again stays of one size.
    timing = time_kernels(lambda x, y: (x @ y, ()), x, y * size**-0.5, calls=1)
    return 2 * size**3 / timing.seconds
