"""What every checkpoint on disk needs: one error type, paths that stay inside, and all-or-nothing writes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
from collections.abc import Iterator

MANIFEST = "gdnjax.json"
"""The file that makes a directory a checkpoint of this project."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; the message names the file or tensor and what to change."""


def inside(directory: pathlib.Path, name: str) -> pathlib.Path:
    """The regular file `name` directly in `directory`, for names that come from an untrusted file.

    A symbolic link may point into the directory itself, or, in a Hugging Face download cache
    (`snapshots/REVISION/`), into the cache's own `blobs/`.

    Raises:
        CheckpointError: the name is no plain file name, leads elsewhere, or no regular file is there.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name or len(name) > 255:
        raise CheckpointError(f"{directory}: file name {name!r}; it takes a plain name of a file in that directory")
    path, root = directory / name, directory.resolve()
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError):
        raise CheckpointError(f"{path}: no such file; download or copy the checkpoint again") from None
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    if real.parent not in allowed:
        raise CheckpointError(f"{path}: a link that leads out of the checkpoint, to {real}; copy the file into place")
    if not real.is_file():
        raise CheckpointError(f"{path}: not a regular file")
    return path


@contextlib.contextmanager
def new_directory(destination: pathlib.Path) -> Iterator[pathlib.Path]:
    """A temporary sibling of `destination` that becomes `destination` when the block ends without an error.

    After an error nothing is left; after a kill a hidden `.NAME.partial-*` is, which the next call for the
    same destination removes. Its owner holds a lock on it, so a run that is still alive is left alone.

    Raises:
        CheckpointError: `destination` exists.
    """
    _refuse_existing(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(destination)
    temporary, lock = _make_locked(destination)
    try:
        yield temporary
        _sync(temporary)
        _refuse_existing(destination)
        os.rename(temporary, destination)
        _sync_one(destination.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _refuse_existing(destination: pathlib.Path) -> None:
    if os.path.lexists(destination):
        raise CheckpointError(f"{destination} exists; it takes a path that does not: remove it or choose another")


def _make_locked(destination: pathlib.Path) -> tuple[pathlib.Path, int]:
    while True:
        temporary = destination.with_name(f".{destination.name}.partial-{secrets.token_hex(4)}")
        os.mkdir(temporary)
        # Another run may take the directory for a leftover before it is locked: then start over.
        try:
            lock = os.open(temporary, os.O_RDONLY)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            continue
        if temporary.exists():
            return temporary, lock
        os.close(lock)


def _remove_leftovers(destination: pathlib.Path) -> None:
    prefix = f".{destination.name}.partial-"
    for entry in list(os.scandir(destination.parent)):
        if not entry.name.startswith(prefix) or not entry.is_dir(follow_symlinks=False):
            continue
        try:
            lock = os.open(entry.path, os.O_RDONLY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(entry.path, ignore_errors=True)
        except BlockingIOError:
            pass
        finally:
            os.close(lock)


def _sync(directory: pathlib.Path) -> None:
    # Without this a power cut after the rename could leave the new name with empty files behind it.
    for folder, _, names in os.walk(directory):
        for name in names:
            _sync_one(pathlib.Path(folder, name))
        _sync_one(pathlib.Path(folder))


def _sync_one(path: pathlib.Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_checkpoint(directory: pathlib.Path) -> bool:
    """Whether a directory is a checkpoint that `gdnjax convert` wrote."""
    return (directory / MANIFEST).exists()
