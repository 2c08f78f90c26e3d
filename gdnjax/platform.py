"""Which platform runs the arrays: `rocm`, `cuda` or `cpu`, and the names its devices go by."""

from __future__ import annotations

import os
import re
from typing import Any, Literal

Platform = Literal["rocm", "cuda", "cpu"]


def devices() -> list[Any]:
    """JAX's devices.

    Raises:
        RuntimeError: there is none.
    """
    import jax

    try:
        return jax.devices()
    except AssertionError:
        # JAX asserts, without a message, that one of the platforms it was told to use has started.
        raise RuntimeError(f"JAX was told to use {os.environ.get('JAX_PLATFORMS')!r}, and that is not here") from None


def current_platform() -> Platform:
    """The platform of JAX's default device. Raises RuntimeError without a device."""
    from jax.extend import backend

    device = devices()[0]
    if device.platform == "cpu":
        return "cpu"
    if device.platform in ("gpu", "rocm", "cuda"):
        version = backend.get_backend().platform_version.lower()
        return "rocm" if device.platform == "rocm" or "rocm" in version else "cuda"
    raise RuntimeError(f"device {device} is on platform {device.platform!r}; gdnjax takes rocm, cuda and cpu")


def device_memory() -> int | None:
    """Bytes that JAX may use on its default device; None where the device does not say, as a CPU."""
    stats = devices()[0].memory_stats()
    return None if stats is None else stats.get("bytes_limit")


def gfx_architecture(device_kind: str) -> str | None:
    """`gfx942` of an AMD device kind such as `gfx942:sramecc+:xnack-`; None for anything else."""
    match = re.match(r"(gfx[0-9a-f]+)(?::|$)", device_kind.strip().lower())
    return match.group(1) if match else None
