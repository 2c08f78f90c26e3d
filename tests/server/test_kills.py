"""Kill -9 while a server compiles and while it serves: the next one starts, and answers the same."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.generation.small import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
# The system kills who writes more than so many bytes into a file, in the middle of writing it.
LIMIT = 2**14
MAIN = """
import resource, signal, sys
from gdnjax.cli import main

limit, *arguments = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
sys.exit(main(arguments))
"""
BODY: dict[str, Any] = {"prompt": "the thé", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


class Server:
    """`gdnjax serve` in a process of its own; `file_limit` -1 is none."""

    def __init__(self, folder: Path, port: int = 0, file_limit: int = -1):
        arguments = ["serve", "--model", str(folder / "model"), "--port", str(port), "--max-requests", "1"]
        arguments += ["--compilation-cache", str(folder / "cache"), "--kv-tokens", "8192"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        with open(folder / "log", "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", MAIN, str(file_limit), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._log = folder / "log"

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.match(r"model on http://127\.0\.0\.1:(\d+)/v1, 1 requests at once", line)
        assert found is not None, line + self.log
        self.port = int(found[1])
        self.url = f"http://127.0.0.1:{self.port}"

    def answer(self) -> str:
        response = httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=60)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]


@contextlib.contextmanager
def serve(folder: Path, **arguments: Any) -> Iterator[Server]:
    server = Server(folder, **arguments)
    try:
        yield server
    finally:
        server.process.kill()
        server.process.communicate()


def written(folder: Path) -> dict[Path, tuple[int, int]]:
    """All files but the log, with their size and their time."""
    found = {path: path.stat() for path in folder.rglob("*") if path.is_file() and path.name != "log"}
    return {path: (stat.st_size, stat.st_mtime_ns) for path, stat in found.items()}


def test_a_killed_server_leaves_nothing_that_the_next_one_trips_over(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model")
    with serve(tmp_path, file_limit=LIMIT) as server:
        assert server.process.wait(120) == -signal.SIGXFSZ, server.log
    # A program was half written, under the name by which it would be found.
    (cut,) = [path for path in (tmp_path / "cache").iterdir() if path.stat().st_size == LIMIT]

    with serve(tmp_path) as server:
        server.wait_until_ready()
        assert "compilation cache" not in server.log
        assert cut.stat().st_size > LIMIT
        before, wanted, port = written(tmp_path), server.answer(), server.port
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            # One that runs and two that wait.
            asked = BODY | {"stream": True, "max_tokens": 4000}
            streams = [stack.enter_context(client.stream("POST", "/v1/completions", json=asked)) for _ in range(3)]
            lines = [stream.iter_lines() for stream in streams]
            assert next(lines[0]).startswith("data: ")
            server.process.kill()
            for one in lines:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(one)
    assert written(tmp_path) == before

    with serve(tmp_path, port=port) as server:
        server.wait_until_ready()
        assert server.port == port and server.answer() == wanted
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert "compilation cache" not in server.log
    assert written(tmp_path) == before  # every program came from the cache
