"""Which platform JAX runs on, and the names of AMD architectures."""

from __future__ import annotations

import types

import pytest

from gdnjax.platform import current_platform, gfx_architecture


@pytest.mark.newest
@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx950", "gfx950"),
        (" GFX1100 ", "gfx1100"),
        ("gfx1201:xnack-", "gfx1201"),
        ("AMD Instinct MI300X", None),
        ("NVIDIA H200", None),
        ("cpu", None),
        ("gfx", None),
        ("gfx942 something", None),
        ("my gfx942", None),
        ("", None),
    ],
)
def test_gfx_architecture(kind: str, architecture: str | None) -> None:
    assert gfx_architecture(kind) == architecture


@pytest.mark.parametrize(
    ("platform", "version", "expected"),
    [
        ("cpu", "cpu", "cpu"),
        ("gpu", "PJRT C API\nrocm 70100", "rocm"),
        ("gpu", "PJRT C API\nROCm 7.1", "rocm"),
        ("rocm", "?", "rocm"),
        ("gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("cuda", "?", "cuda"),
    ],
)
def test_current_platform(monkeypatch: pytest.MonkeyPatch, platform: str, version: str, expected: str) -> None:
    monkeypatch.setattr("jax.devices", lambda: [types.SimpleNamespace(platform=platform)])
    backend = types.SimpleNamespace(platform_version=version)
    monkeypatch.setattr("jax.extend.backend.get_backend", lambda: backend)
    assert current_platform() == expected


def test_other_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax.devices", lambda: [types.SimpleNamespace(platform="tpu")])
    with pytest.raises(RuntimeError, match="is on platform 'tpu'; gdnjax takes rocm, cuda and cpu"):
        current_platform()
