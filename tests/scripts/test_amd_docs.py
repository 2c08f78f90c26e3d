"""The tables of docs/amd.md: made from the command's JSON, and those on the page made from the kept figures."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("amd_docs", ROOT / "scripts" / "amd_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def kernel(name: str, arch: str, shape: str, vgprs: int = 8, spills: int = 0, occupancy: int = 8) -> dict[str, Any]:
    figures = dict(vgprs=vgprs, spills=spills, lds_bytes=0, occupancy=occupancy, wide_loads=1, wide_stores=1)
    return {"name": name, "arch": arch, "shape": shape, **figures}


def program(name: str, arch: str, kernels: int, config: str = "0.8b") -> dict[str, Any]:
    figures = dict(rows=64, kernels_per_step=kernels, pool_copies=0, alias_bytes=1, temp_bytes=1)
    return {"program": name, "config": config, "arch": arch, **figures}


FOUND = {
    "kernels": [
        kernel("walk", "gfx1201", "0.8B", 90, 3, 5),
        kernel("walk", "gfx1201", "27B", 90, 3, 5),
        kernel("walk", "gfx1201", "9B", 99, 0, 4),
        kernel("walk", "gfx942", "9B"),
        kernel("norm", "gfx942", "9B", 40),
    ],
    "programs": [
        program("prefill", "gfx942", 7),
        program("prefill", "gfx1201", 8),
        program("prefill", "gfx942", 9, "9b"),
    ],
    "failures": [],
}


@pytest.fixture
def root(script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with a page that has old figures."""
    monkeypatch.setattr(script.importlib.metadata, "version", {"jax": "1", "jax-rocm7-pjrt": "2", "triton": "3"}.get)
    (tmp_path / "docs" / "results").mkdir(parents=True)
    (tmp_path / "docs" / "amd.md").write_text(f"Before.\n\n{script.BEGIN}\nstale\n{script.END}\n\nAfter.\n")
    return tmp_path


def run(script: Any, root: Path, found: dict[str, Any]) -> None:
    (root / "found.json").write_text(json.dumps(found))
    script.main(str(root / "found.json"), root)


def test_tables(script: Any, root: Path) -> None:
    run(script, root, FOUND)
    page = (root / "docs" / "amd.md").read_text()
    assert page.startswith("Before.\n\n") and page.endswith("\n\nAfter.\n") and "stale" not in page
    assert "Compilers: jax 1, jax-rocm7-pjrt 2, triton 3." in page
    # the worst of all shapes, architectures in the targets' order
    assert "| kernel | gfx942 | gfx1201 |\n|---|---|---|\n| `norm` | 40 / 0 (8) |  |\n" in page
    assert "| `walk` | 8 / 0 (8) | 99 / 3 (4) |\n" in page
    assert "Registers that spill:\n\n* `walk` on gfx1201: 3 (0.8B 27B)\n\n" in page
    assert "| `prefill`, 0.8b, 64 rows | 7 / 0 | 8 / 0 |\n| `prefill`, 9b, 64 rows | 9 / 0 |  |\n" in page
    kept = (root / script.RESULTS).read_text()
    assert json.loads(kept)["programs"] == FOUND["programs"] and len(json.loads(kept)["kernels"]) == 4
    # a second time changes nothing
    run(script, root, FOUND)
    assert ((root / "docs" / "amd.md").read_text(), (root / script.RESULTS).read_text()) == (page, kept)


def test_a_failed_check_changes_nothing(script: Any, root: Path) -> None:
    before = (root / "docs" / "amd.md").read_text()
    with pytest.raises(SystemExit, match="norm spills"):
        run(script, root, {**FOUND, "failures": ["norm spills"]})
    assert (root / "docs" / "amd.md").read_text() == before and not (root / script.RESULTS).exists()


def test_a_page_without_a_place_is_refused(script: Any, root: Path) -> None:
    (root / "docs" / "amd.md").write_text("Nothing.")
    with pytest.raises(SystemExit, match="no place for the tables"):
        run(script, root, FOUND)
    assert not (root / script.RESULTS).exists()


def test_the_page_shows_the_kept_figures(script: Any) -> None:
    kept = json.loads((ROOT / script.RESULTS).read_text(encoding="utf-8"))
    page = (ROOT / script.PAGE).read_text(encoding="utf-8")
    assert script.replaced(page, script.tables(kept)) == page, "make amd-docs makes both"
