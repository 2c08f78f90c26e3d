"""Which implementation a call gets."""

from __future__ import annotations

import logging

import jax
import pytest

from pallas_kernels import dispatch


@pytest.mark.parametrize(("backend", "expected"), [("cpu", "reference"), ("gpu", "pallas")])
def test_the_platform_decides_unless_somebody_asks(monkeypatch, backend, expected):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    assert dispatch.choose("op", None, None) == expected
    for asked in ("reference", "pallas", "interpret"):
        assert dispatch.choose("op", asked, None) == asked


def test_a_fallback_is_logged_once_a_reason(caplog):
    with caplog.at_level(logging.WARNING, "pallas_kernels"):
        for _ in range(2):
            assert dispatch.choose("some_op", "pallas", "7 heads are odd") == "reference"
        assert dispatch.choose("some_op", "interpret", "9 heads are odd") == "reference"
        assert dispatch.choose("some_op", "reference", "11 heads are odd") == "reference"
    assert [r.getMessage() for r in caplog.records] == [
        "some_op runs its reference instead of its kernel: 7 heads are odd",
        "some_op runs its reference instead of its kernel: 9 heads are odd",
    ]


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="implementation = 'triton'; it takes reference, pallas, interpret or None"):
        dispatch.choose("op", "triton", None)  # pyright: ignore[reportArgumentType]
