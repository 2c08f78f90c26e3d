"""Which platform runs the arrays: `rocm`, `cuda` or `cpu`, and the names its devices go by."""

from __future__ import annotations

import re
from typing import Literal

Platform = Literal["rocm", "cuda", "cpu"]


def current_platform() -> Platform:
    """The platform of JAX's default device."""
    import jax
    from jax.extend import backend

    device = jax.devices()[0]
    if device.platform == "cpu":
        return "cpu"
    if device.platform in ("gpu", "rocm", "cuda"):
        version = backend.get_backend().platform_version.lower()
        return "rocm" if device.platform == "rocm" or "rocm" in version else "cuda"
    raise RuntimeError(f"device {device} is on platform {device.platform!r}; gdnjax takes rocm, cuda and cpu")


def gfx_architecture(device_kind: str) -> str | None:
    """`gfx942` of an AMD device kind such as `gfx942:sramecc+:xnack-`; None for anything else."""
    match = re.match(r"(gfx[0-9a-f]+)(?::|$)", device_kind.strip().lower())
    return match.group(1) if match else None
