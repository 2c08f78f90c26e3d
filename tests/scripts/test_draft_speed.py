"""The timing of drafts, on a micro model: what it reads and what it reports."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.generation.small import SMALL

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[2] / "scripts")
    sys.path.insert(0, folder)
    import draft_speed

    yield draft_speed
    sys.path.remove(folder)


def test_a_cell_for_each_head(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "STEPS", 2)
    config = SMALL.replace(mtp_num_hidden_layers=1, max_position_embeddings=1024)
    cells = script.study(config, [3], 2, packed=True, bandwidth=1e6)
    assert [(c["requests"], c["head"]) for c in cells] == [(3, "weights"), (3, "fp8")]
    # By hand, float32: a layer of H 48, A 4, D 16, I 64 with its four norms, the joining matrix, three more norms.
    layer = 48 * (2 * 64 + 2 * 32 + 64) + 3 * 48 * 64 + 2 * 16 + 2 * 48
    mtp = 4 * (layer + 2 * 48 * 48 + 3 * 48)
    head = {"weights": 4 * 262 * 48, "fp8": 262 * 48 + 4 * 262}
    keys = (script.POSITION + 1) + (script.POSITION + 2)
    for cell in cells:
        assert cell["bytes"] == 2 * (mtp + head[cell["head"]]) + cell["requests"] * keys * 4 * 2 * 2 * 16
        assert cell["floor_ms"] == pytest.approx(cell["bytes"] / 1e3, rel=1e-6)
        assert 0 < cell["ratio"] == pytest.approx(cell["floor_ms"] / cell["draft_ms"], rel=0.02)
    json.dumps(cells)
