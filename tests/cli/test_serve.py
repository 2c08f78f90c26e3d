"""`gdnjax serve` from its arguments to its end by a signal."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from gdnjax.cli import main
from tests.server.serving import model

pytestmark = pytest.mark.usefixtures("quick_compilation")
LINE = r"(\w+) on (http://127\.0\.0\.1:\d+)/v1, (\d+) requests at once, 64 tokens each, (\d+) in all\n"


def test_a_server_from_start_to_stop(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("gdnjax.loading.load", lambda source, dtype=None, **overrides: model())
    monkeypatch.setenv("GDNJAX_API_KEY", "sesame")
    seen: list[object] = []

    def visit() -> None:
        out = ""
        try:
            for _ in range(15000):  # a busy machine compiles slowly, and a kill before it listens ends the tests
                out += capfd.readouterr().out
                if found := re.fullmatch(LINE, out):
                    break
                threading.Event().wait(0.02)
            assert found is not None, out
            seen.append(found.groups())
            body = {"prompt": "a", "max_tokens": 3, "model": "small"}
            for key in ("sesame", "other"):
                headers = {"authorization": f"Bearer {key}"}
                seen.append(httpx.post(f"{found[2]}/v1/completions", json=body, headers=headers).status_code)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=visit)
    thread.start()
    arguments = ["--port", "0", "--name", "small", "--compilation-cache", "none", "--kv-tokens", "256"]
    assert main(["serve", *arguments, "--max-requests", "4"]) == 0
    thread.join()
    (name, _, requests, tokens), *statuses = seen
    assert (name, requests, tokens, statuses) == ("small", "4", "256", [200, 401])


def test_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err
    assert main(["serve", "--config", "0.8b"]) == 2
    assert "random weights have no tokenizer" in capsys.readouterr().err
    for arguments in (["--max-requests", "0"], ["--timeout", "nan"], ["--max-waiting", "x"]):
        with pytest.raises(SystemExit):
            main(["serve", *arguments])
        assert arguments[0] in capsys.readouterr().err
    assert main(["serve", "--drafts", "ngram"]) == 2
    assert "--drafts ngram says where drafts come from; give their number with --speculate K" in capsys.readouterr().err
    assert main(["serve", "--adaptive"]) == 2
    assert (
        "--adaptive chooses how many drafts a step verifies; give most of them with --spec" in capsys.readouterr().err
    )
    assert main(["serve", "--draft-head", "fp8"]) == 2
    assert "--draft-head fp8 says what drafts of the draft head are chosen by" in capsys.readouterr().err
    with monkeypatch.context() as patched:
        loaded: list[dict[str, Any]] = []
        patched.setattr("gdnjax.loading.load", lambda source, dtype=None, **keys: loaded.append(keys) or model())
        arguments = [
            "--port",
            "0",
            "--compilation-cache",
            "none",
            "--speculate",
            "2",
            "--drafts",
            "mtp",
            "--draft-head",
            "fp8",
        ]
        assert main(["serve", *arguments]) == 1
    assert "speculate = 2 with drafts = 'mtp', and this model has no draft head" in capsys.readouterr().err
    assert loaded == [{"draft_head": "fp8"}]
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "gdnjax.server.run", raising=False)
    assert main(["serve"]) == 1
    assert "the module uvicorn is missing; run pip install 'gdnjax[serve]'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_shipped_model_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gdnjax", "serve", "--port", "0", "--compilation-cache", str(tmp_path / "xla")]
    for _ in range(2):  # the second time from the cache
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(
                r"tiny on (http://[\d.:]+)/v1, 8 requests at once, 4096 tokens each, 32768 in all\n", line
            )
            assert found is not None, line
            assert httpx.get(f"{found[1]}/health").json()["status"] == "ok"
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.communicate()
    assert any((tmp_path / "xla").iterdir())


@pytest.mark.parametrize(
    ("option", "value", "takes"),
    [
        ("--kv-tokens", "x", "an integer >= 1"),
        ("--max-requests", "-1", "an integer >= 1"),
        ("--drain", "x", "seconds > 0"),
        ("--speculate", "8", "an integer from 0 (plain decoding) to 7"),
    ],
)
def test_an_option_names_what_it_takes(option: str, value: str, takes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", f"{option}={value}"])
    error = capsys.readouterr().err
    assert f"{option}: {value}; it takes" in error
    assert takes in error
