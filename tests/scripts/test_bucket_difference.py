"""Across row buckets: the same tokens but for near-ties, whose gaps are printed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.generation.small import NEAR_TIE, small_model
from tests.helpers import LOGITS

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    folder = str(Path(__file__).resolve().parents[2] / "scripts")
    sys.path.insert(0, folder)
    import bucket_difference

    yield bucket_difference
    sys.path.remove(folder)


def test_buckets_differ_by_rounding(script: Any) -> None:
    lm = small_model()
    report = script.study(lm.params, lm.config, steps=12)
    assert list(report["decode"]) == ["1", "2", "4"] and list(report["prefill"]) == ["16", "64"]
    for kind, by_rows in report.items():
        for rows, found in by_rows.items():
            for gap in found["gaps"]:
                print(f"{kind}, {rows} rows: another token, gap {gap:.2g}")
                assert gap < NEAR_TIE
            assert found["largest"] <= LOGITS, (kind, rows)
        assert by_rows[max(by_rows, key=int)]["largest"] == 0.0


def test_what_differs_is_told(script: Any) -> None:
    wanted = np.array([[0.0, 1.0, 0.75], [2.0, 0.0, 0.0]], np.float32)
    found = np.array([[0.0, 1.0, 1.5], [2.0, 0.5, 0.0]], np.float32)
    assert script.compare(found, wanted) == {"largest": 0.75, "flips": 1, "gaps": [0.25]}
