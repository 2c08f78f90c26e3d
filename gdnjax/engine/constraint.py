"""Answers that are held to a JSON schema: at every step, which tokens may come next.

The grammar is the work of `llguidance`, an optional dependency that is imported where a schema is compiled. A
`Constraint` is compiled once, and every request that is held to it has a `Matcher`, which takes the request's tokens as
they come and says in bits what may follow. What a schema may cost is bounded here: it comes from strangers.

    constraint = json_schema(lm, {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]})
    handle = engine.submit("Her age as JSON:", constraint=constraint)
"""

from __future__ import annotations

import importlib.util
import json
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gdnjax.engine import schema_limits
from gdnjax.tokenizer import Tokenizer

if TYPE_CHECKING:
    from gdnjax.lm import LanguageModel

MOST_LEXER_STATES = 20_000
"""Of one grammar, 1 to 2 KB each."""
WHITESPACE = r"[ \n\t]{1,40}"
"""Between two parts of a JSON text. A model that may write blanks for ever at times does. A schema may name another
pattern, by the library's `"x-guidance": {"whitespace_pattern": ...}`."""
STACK_BYTES = 128 * 2**20
"""Of the thread that compiles. The library goes down a schema's references by recursion: of the schemas that are taken
the worst known needs between 16 and 32 MB, and with the usual 8 MB it ends the process. Only what is used takes memory.
"""
_BEHIND_THOUGHTS = r"""start: thoughts space answer
thoughts[lazy]: /(?s:.*)<\/think>/
space: /[ \n]{0,64}/
answer: @answer"""
_compiling = threading.Lock()
_vocabularies: weakref.WeakKeyDictionary[Tokenizer, Any] = weakref.WeakKeyDictionary()


class ConstraintError(ValueError):
    """A schema that cannot be compiled, or a grammar that has become too complex under way."""


def available() -> bool:
    """Whether `llguidance` is installed."""
    return importlib.util.find_spec("llguidance") is not None


class Constraint:
    """A compiled grammar; made by `json_schema`, for requests to one model.

    Attributes:
        vocab_size: tokens that its masks speak of, those of the model.
    """

    def __init__(self, grammar: Any, tokenizer: Tokenizer, vocab_size: int):
        self._grammar, self._tokenizer, self.vocab_size = grammar, tokenizer, vocab_size

    def start(self, stop_ids: Sequence[int]) -> Matcher:
        """The matcher of a new request.

        Args:
            stop_ids: ids that end it. Those of control tokens come to stand where the grammar is complete, and nowhere
                else.

        Raises:
            ConstraintError: none of them is a control token's.
        """
        ends = [i for i in stop_ids if i in self._tokenizer.control_ids]
        if not ends:
            raise ConstraintError(
                f"stop_ids = {list(stop_ids)}: a constrained request ends with a control token; give one of "
                f"{sorted(self._tokenizer.control_ids)[:8]}, or None for the checkpoint's"
            )
        special = [token.id for token in self._tokenizer.control_tokens.values() if token.special]
        return Matcher(
            self._grammar.deep_copy(), _bits(ends, self.vocab_size), _bits([*special, *ends], self.vocab_size)
        )


class Matcher:
    """Where one request stands in its grammar.

    Attributes:
        mask: `[ceil(V / 32)]` uint32: bit i % 32 of word i // 32 says whether token i may come next. Never empty.
    """

    def __init__(self, state: Any, ends: np.ndarray, control: np.ndarray):
        self._state, self._ends, self._text = state, ends, ~control
        self.mask = self._allowed()

    def advance(self, token: int) -> None:
        """Takes the next token, which `mask` allows and which ends nothing.

        Raises:
            ConstraintError: the grammar has become too complex. The matcher is of no use then.
        """
        if not self._state.consume_token(token):
            raise ConstraintError(f"the grammar cannot go on: {_short(self._state.get_error())}")
        self.mask = self._allowed()

    def _allowed(self) -> np.ndarray:
        try:
            words = np.frombuffer(self._state.compute_bitmask(), np.uint32)
        except Exception as error:  # the library raises bare ValueError
            raise ConstraintError(f"the grammar cannot go on: {_short(str(error))}") from None
        if self._state.is_error():
            raise ConstraintError(f"the grammar cannot go on: {_short(self._state.get_error())}")
        mask = np.zeros_like(self._ends)
        mask[: len(words)] = words[: len(mask)]
        mask &= self._text
        if self._state.is_accepting():
            mask |= self._ends
        if not mask.any():
            raise ConstraintError("no text satisfies the schema")
        return mask


def json_schema(lm: LanguageModel, schema: Mapping[str, Any] | None, *, thinking: bool = False) -> Constraint:
    """Compiles a JSON schema for a model's tokens.

    Args:
        lm: the model, with a tokenizer.
        schema: a JSON schema, an object; None is any JSON object. Keywords that the library does not know are refused,
            not ignored. What is not forbidden is allowed, further properties too.
        thinking: the prompt ends inside of a think block. Up to `</think>` the text is free then, but does not end.

    Raises:
        ConstraintError: the schema is not valid, or asks for too much; the message says what.
        ValueError: `llguidance` is not installed, or the model has no tokenizer.
    """
    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, and a schema speaks of text; add tokenizer.json to the model")
    if not available():
        raise ValueError("JSON schemas need llguidance, which is not installed: pip install 'gdnjax[serve]'")
    text = schema_limits.check({"type": "object"} if schema is None else schema)
    state = _in_a_deep_stack(lambda: _compile(tokenizer, text, thinking))
    return Constraint(state, tokenizer, lm.config.vocab_size)


def _compile(tokenizer: Tokenizer, schema: str, thinking: bool) -> Any:
    import llguidance

    options: Any = {"whitespace_pattern": WHITESPACE}
    limits = llguidance.LLParserLimits(max_lexer_states=MOST_LEXER_STATES, verbose_errors=False)
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, defaults=options)
    except ValueError as error:
        raise ConstraintError(f"the schema is refused: {_short(str(error))}") from None
    if thinking:
        (answer,) = json.loads(grammar)["grammars"]
        thoughts = {"name": "thoughts", "lark_grammar": _BEHIND_THOUGHTS}
        grammar = json.dumps({"grammars": [thoughts, {**answer, "name": "answer"}]})
    state = llguidance.LLMatcher(_vocabulary(tokenizer), grammar, log_level=0, limits=limits)
    if state.is_error():
        raise ConstraintError(f"the schema is refused: {_short(state.get_error())}")
    state.compute_bitmask()  # what the first one takes, no step waits for
    return state


def prepare(tokenizer: Tokenizer) -> None:
    """Makes what all schemas for a tokenizer need, so that the first of them does not: seconds for a large one."""
    _vocabulary(tokenizer)


def _vocabulary(tokenizer: Tokenizer) -> Any:
    import llguidance

    with _compiling:
        found = _vocabularies.get(tokenizer)
        if found is None:
            found = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(tokenizer)))
            _vocabularies[tokenizer] = found
    return found


class _Tokens:
    """A tokenizer in the form that the library takes. Control tokens that are not special, `</think>` among them, are
    text."""

    def __init__(self, tokenizer: Tokenizer):
        special = sorted(token.id for token in tokenizer.control_tokens.values() if token.special)
        self._encode = tokenizer.encode
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        # It wants an end, which the masks replace by the request's own.
        self.eos_token_id = tokenizer.eos_id if tokenizer.eos_id is not None else special[0] if special else 0
        self.bos_token_id = None
        self.special_token_ids = special

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _in_a_deep_stack(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except Exception as error:
            found.append((None, error))

    with _compiling:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    ((result, error),) = found
    if error is not None:
        raise error
    return result


def _bits(ids: Sequence[int], vocab_size: int) -> np.ndarray:
    allowed = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    allowed[list(ids)] = 1
    return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)


def _short(text: str) -> str:
    (line, *_) = text.strip().splitlines() or [""]
    return line if len(line) <= 300 else line[:300] + "..."
