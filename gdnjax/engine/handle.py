"""A request as its caller sees it, and what the engine notes about it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from gdnjax.engine.pace import Fate
from gdnjax.generation.collect import Collector
from gdnjax.generation.sampling import SamplingParams

if TYPE_CHECKING:
    from gdnjax.engine.constraint import Matcher
    from gdnjax.engine.programs import Mode

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
"""`stop`: a stop id or string. `length`: `max_new_tokens`, or `max_length`. `error`: NaN in the logits, a flood of
token 0, a grammar that became too complex, or a device that failed again and again."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Tokens of a request: of its prompt, of them those resumed from a shared prefix, and new ones."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    preemptions: int


class Piece(NamedTuple):
    """New tokens of a request, with their log-probabilities, and new text. Text may lag behind: what could
    become a stop string, or is half a character, waits."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str


@dataclasses.dataclass(eq=False)
class Handle:
    """One submitted request.

    * `number`: counts the requests of an engine.
    * `prompt`: its token ids. `tokens`, `logprobs`, `text`: what has come so far; text without a stop
      string, None without a tokenizer.
    * `prompt_logprobs`: of every token of the prompt but the first, if asked for: its log-probability behind
      those before it.
    * `finish_reason`: None while it runs.
    * `pieces`: what has come and `Engine.stream` has not yet handed out.
    * `speculate`: most drafts that a step of its verifies, where the engine speculates.
    * `matcher`: what its tokens are held to; it has taken in `tokens`.
    * `on_piece`: called with every piece by the thread that steps, and with None at the end.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams
    mode: Mode
    collector: Collector
    deadline: float | None = None
    priority: int = 0
    number: int = 0
    text: str | None = None
    prompt_logprobs: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    pieces: collections.deque[Piece] = dataclasses.field(default_factory=collections.deque)
    on_piece: Callable[[Piece | None], None] | None = None
    speculate: int = 0
    matcher: Matcher | None = None

    # The engine's notes: number in the pool (None: waiting); what it must read before it decodes, whether some of
    # that is left, and where prefixes of it are kept; tokens whose sampling was sent; whether what it reads is
    # scored, and the token that follows the prompt, scored too; steps that failed under it, and tokens 0 at its end;
    # how its drafts have fared.
    request: int | None = None
    to_read: list[int] = dataclasses.field(default_factory=list)
    reading: bool = False
    cuts: list[int] = dataclasses.field(default_factory=list)
    sent: int = 0
    scoring: bool = False
    followed_by: int | None = None
    cached: int = 0
    preemptions: int = 0
    failures: int = 0
    zeros: int = 0
    fate: Fate = dataclasses.field(default_factory=Fate)

    @property
    def tokens(self) -> list[int]:
        return self.collector.tokens

    @property
    def logprobs(self) -> list[float]:
        return self.collector.logprobs

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer."""
        return len(self.prompt) + self.max_new_tokens

    @property
    def usage(self) -> Usage:
        return Usage(len(self.prompt), self.cached, len(self.tokens), self.preemptions)
