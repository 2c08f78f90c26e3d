"""Turns emitted ids into a result: text as it grows, stop strings, finish reason, log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdnjax.tokenizer import Tokenizer

StreamCallback = Callable[[int, list[int], str], None]
"""(index of the prompt, new token ids, new text). Text may lag behind the ids: half a character, or
what could become a stop string, waits."""


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """What one prompt produced.

    * `tokens`: new ids only, the stop id that ended it included.
    * `text`: their text, without the stop id and cut before a stop string; None without a tokenizer.
    * `finish_reason`: `stop` (a stop id or stop string) or `length`.
    * `logprobs`: log-probability of each token under the model itself (before penalties, temperature
      and truncation); None unless asked for.
    * `prompt_tokens`: number of prompt ids.
    * `steps`: steps of the model behind the prompt, which itself gives the first token.
    * `drafted`, `accepted`: drafts that those steps verified, and those among them that became tokens. Each step gives
      one token more: there are 1 + steps + accepted.
    """

    tokens: list[int]
    text: str | None
    finish_reason: str
    logprobs: list[float] | None
    prompt_tokens: int
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a step gave on average: 1 without speculation. None where no step ran."""
        return 1 + self.accepted / self.steps if self.steps else None


class Collector:
    """Collects one request's tokens.

    * `tokens`, `logprobs`: what has come so far.
    """

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        tokenizer: Tokenizer | None,
        stop_ids: Sequence[int],
        stop: Sequence[str],
        callback: StreamCallback | None,
    ):
        self._index, self._prompt_tokens = index, prompt_tokens
        self._stop_ids, self._stop, self._callback = frozenset(stop_ids), tuple(stop), callback
        self._stream = tokenizer.stream() if tokenizer is not None else None
        self._text = ""
        self._sent = 0
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._steps = self._drafted = self._accepted = 0
        self.finish_reason: str | None = None

    def listen(self, callback: StreamCallback) -> None:
        """Sets who is called with what comes."""
        self._callback = callback

    def push(self, token: int, logprob: float) -> bool:
        """Adds the token of a step; False once the request has ended (later tokens are ignored)."""
        if self.finish_reason is not None:
            return False
        before = len(self.tokens)
        self._add(token, logprob)
        return self._tell([token], before, 0)

    def push_step(self, tokens: Sequence[int], logprobs: Sequence[float], drafted: int = 0) -> bool:
        """Adds the tokens of a step, at least one, as far as the request goes on; False once it has ended.

        The very first is the prompt's, and no step's. `drafted`: drafts that the step has verified.
        """
        if self.finish_reason is not None:
            return False
        before = len(self.tokens)
        for token, logprob in zip(tokens, logprobs, strict=True):
            self._add(token, logprob)
            if self.finish_reason is not None:
                break
        return self._tell(self.tokens[before:], before, drafted)

    def _tell(self, new: list[int], before: int, drafted: int) -> bool:
        # What a step has brought, behind `before` tokens.
        self._steps += before > 0
        self._drafted += drafted
        self._accepted += len(new) - 1
        if self._callback is not None:
            self._callback(self._index, new, self._release())
        return self.finish_reason is None

    def _add(self, token: int, logprob: float) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self._stop_ids:
            self.finish_reason = "stop"
            self._close()
        elif self._stream is not None:
            self._text += self._stream.push([token])
            self._cut_at_stop()

    def _close(self) -> None:
        if self._stream is not None:
            self._text += self._stream.finish()
            self._cut_at_stop()

    def _cut_at_stop(self) -> None:
        found = [place for s in self._stop if (place := self._text.find(s)) >= 0]
        if found:
            self._text = self._text[: min(found)]
            self.finish_reason = "stop"

    def _release(self) -> str:
        if self._stream is None:
            return ""
        held = 0
        if self.finish_reason is None:
            for s in self._stop:
                for size in range(min(len(s) - 1, len(self._text)), held, -1):
                    if self._text.endswith(s[:size]):
                        held = size
                        break
        new = self._text[self._sent : len(self._text) - held]
        self._sent += len(new)
        return new

    def result(self, logprobs: bool) -> GenerationResult:
        """Ends the request (`length` if nothing else ended it) and returns what it produced."""
        if self.finish_reason is None:
            self._close()
            self.finish_reason = self.finish_reason or "length"
            if self._callback is not None and (rest := self._release()):
                self._callback(self._index, [], rest)
        return GenerationResult(
            tokens=self.tokens,
            text=self._text if self._stream is not None else None,
            finish_reason=self.finish_reason,
            logprobs=self.logprobs if logprobs else None,
            prompt_tokens=self._prompt_tokens,
            steps=self._steps,
            drafted=self._drafted,
            accepted=self._accepted,
        )
