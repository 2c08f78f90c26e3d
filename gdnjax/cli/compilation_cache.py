"""Where JAX keeps what it compiles, and what a process that was killed has left there."""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import zlib
from collections.abc import Callable

ZSTD = b"\x28\xb5\x2f\xfd"
"""What zstandard's frames begin with."""


def use_compilation_cache(folder: str | None) -> None:
    """Makes JAX keep what it compiles: None is the user's cache directory, `none` keeps nothing."""
    import jax

    if folder == "none":
        return
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    path = pathlib.Path(folder or pathlib.Path(base) / "gdnjax" / "xla")
    remove_cut_entries(path)
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Warming up compiles many small programs: together they take as long as the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def remove_cut_entries(folder: pathlib.Path) -> None:
    """Removes entries that were being written when their process was killed.

    JAX writes an entry under its name from the first byte on. It does not use one that was cut, but never replaces
    it either: that program would be compiled at every start, with a warning.
    """
    for entry in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # somebody else removes it too
            if not is_whole(entry.read_bytes()):
                entry.unlink()


def is_whole(entry: bytes) -> bool:
    """Whether what JAX has compressed is there to its end; of a compression that is not known here, True."""
    decompress: Callable[[bytes], bytes] | None = None
    if entry[:1] == b"\x78":
        decompress = zlib.decompress
    elif entry[:4] == ZSTD:
        decompress = _zstd()
    if decompress is None:
        return len(entry) > 0
    try:
        decompress(entry)
    except Exception:  # each module has its own
        return False
    return True


def _zstd() -> Callable[[bytes], bytes] | None:
    """JAX's choice of a module: without one it writes zlib, and reads nothing else."""
    for name in ("compression.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(name).decompress
    return None
