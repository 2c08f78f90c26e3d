"""A server for the tests of a module, and OpenAI's own client of it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.server.serving import Running, running


@pytest.fixture(scope="module")
def server(quick_compilation: None) -> Iterator[Running]:
    with running() as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.openai() as one:
        yield one
