"""Which implementation of an operation runs: its reference, its kernel, or the kernel interpreted."""

from __future__ import annotations

import functools
import logging
from typing import Literal

import jax

Implementation = Literal["reference", "pallas", "interpret"]
"""`reference`: plain jnp, the definition. `pallas`: the compiled kernel. `interpret`: the kernel as plain
JAX, for tests on any machine."""

log = logging.getLogger("pallas_kernels")


def choose(op: str, requested: Implementation | None, unsupported: str | None) -> Implementation:
    """The implementation of one call.

    Args:
        op: the operation's name.
        requested: None takes the kernel on a GPU, and the reference anywhere else.
        unsupported: why the kernel cannot take these shapes, or None. It then runs the reference and says
            so, once a reason.

    Raises:
        ValueError: an unknown implementation.
    """
    if requested not in (None, "reference", "pallas", "interpret"):
        raise ValueError(f"implementation = {requested!r}; it takes reference, pallas, interpret or None")
    wanted = requested or ("pallas" if jax.default_backend() == "gpu" else "reference")
    if wanted != "reference" and unsupported is not None:
        _say_once(op, unsupported)
        return "reference"
    return wanted


@functools.cache
def _say_once(op: str, reason: str) -> None:
    log.warning("%s runs its reference instead of its kernel: %s", op, reason)


def power_of_two(value: int) -> bool:
    """Whether a size fits the Triton backend's blocks."""
    return value > 0 and value & (value - 1) == 0
