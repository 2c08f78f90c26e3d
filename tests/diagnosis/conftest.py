"""Traces of a test's own."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Has what follows traced into a file of that name; returns its path."""

    def begin(name: str) -> str:
        path = str(tmp_path / name)
        monkeypatch.setenv("GDNJAX_TRACE", path)
        return path

    return begin
