"""The folder of compiled programs: where it is, and what is thrown away of it."""

from __future__ import annotations

import zlib
from pathlib import Path

import jax
import pytest

from gdnjax.cli.compilation_cache import ZSTD, is_whole, remove_cut_entries, use_compilation_cache


def test_where_compiled_programs_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        use_compilation_cache("none")
        assert jax.config.jax_compilation_cache_dir == before[names[0]]
        use_compilation_cache(None)
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "gdnjax" / "xla")
        use_compilation_cache("elsewhere")
        assert jax.config.jax_compilation_cache_dir == "elsewhere"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_entries_that_were_cut_are_removed(tmp_path: Path) -> None:
    remove_cut_entries(tmp_path / "not there yet")
    whole = zlib.compress(bytes(range(256)) * 40)
    kept = {"a-cache": whole, "b-cache": b"of another kind", "c-atime": b""}
    cut = {f"{size}-cache": whole[:size] for size in (0, 1, 2, 50, len(whole) - 1)}
    for name, entry in {**kept, **cut}.items():
        (tmp_path / name).write_bytes(entry)
    remove_cut_entries(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == kept


def test_entries_of_zstandard() -> None:
    zstd = pytest.importorskip("zstandard")
    whole = zstd.compress(bytes(range(256)) * 40)
    assert whole.startswith(ZSTD) and is_whole(whole)
    assert not any(is_whole(whole[:size]) for size in range(4, len(whole)))
