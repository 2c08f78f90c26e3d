"""What an operator can set."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """Limits of the server; those of the engine are in its own config.

    * `model`: the name that clients give.
    * `api_key`: what they must send as a bearer token; None asks for nothing.
    * `max_body_bytes`: of one request.
    * `max_connections`: open at once; each holds up to 64 KiB that its client has not read.
    * `max_choices`: of one request: its prompts times `n`.
    * `max_tokens`: most new tokens a choice; None leaves it to the engine's `max_length`.
    * `timeout`: seconds that a request may take, waiting included; its answer is then what it has.
    * `client_timeout`: seconds in which a client must have sent its body, and read a piece of a stream, before it is
      dropped.
    * `drain`: seconds that running requests have to end when the server is told to stop.
    * `retry_after`: seconds that a client is told to wait when the server is full or stops.
    """

    model: str
    api_key: str | None = None
    max_body_bytes: int = 8 * 2**20
    max_connections: int = 4096
    max_choices: int = 16
    max_tokens: int | None = None
    timeout: float = 600.0
    client_timeout: float = 30.0
    drain: float = 30.0
    retry_after: int = 1
