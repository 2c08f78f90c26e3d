"""The collector: text, stop strings, what a stream may release, and finish reasons."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.generation import NonFiniteLogitsError
from gdnjax.generation.accept import NOT_FINITE, NOTHING
from gdnjax.generation.collect import Collector, GenerationResult
from gdnjax.generation.generate import _collect
from gdnjax.generation.speculation import Verified
from gdnjax.resources import checkpoints_dir
from gdnjax.tokenizer import Tokenizer, load_tokenizer
from tests.generation.small import OTHER_STOP_ID, STOP_ID, byte_tokenizer


@functools.cache
def shipped_tokenizer() -> Tokenizer:
    tokenizer = load_tokenizer(checkpoints_dir() / "tiny")
    assert tokenizer is not None
    return tokenizer


def collect(
    tokens: list[int], stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = (), tokenizer: Tokenizer | None = None
) -> tuple[GenerationResult, list[tuple[list[int], str]]]:
    """The result, and the calls of the stream."""
    calls: list[tuple[list[int], str]] = []
    collector = Collector(
        3, 5, tokenizer or byte_tokenizer(), stop_ids, stop, lambda index, ids, text: calls.append((ids, text))
    )
    for token in tokens:
        collector.push(token, -1.0)
    return collector.result(True), calls


def by_hand(
    tokens: list[int], stop: tuple[str, ...], stop_ids: tuple[int, ...], t: Tokenizer
) -> tuple[list[int], str, str]:
    """Tokens, text and finish reason from decoding every beginning anew."""
    for count in range(1, len(tokens) + 1):
        ended = tokens[count - 1] in stop_ids
        stream = t.stream()
        text = stream.push(tokens[: count - ended])
        if ended or count == len(tokens):
            # half a character can't become whole any more
            cut = [text.find(s) for s in stop if s in text]
            if not cut:
                text += stream.finish()
        cut = [text.find(s) for s in stop if s in text]
        if cut:
            return tokens[:count], text[: min(cut)], "stop"
        if ended:
            return tokens[:count], text, "stop"
    return tokens, text, "length"


@given(
    st.lists(st.sampled_from([*b"abab \xc3\xa9\xe2\x82\xac\xff", 256, 257, STOP_ID]), min_size=1, max_size=12),
    st.lists(st.text("ab é€\ufffd", min_size=1, max_size=4), max_size=3),
    st.sampled_from([(), (STOP_ID,), (STOP_ID, OTHER_STOP_ID)]),
)
def test_text_and_stream(tokens: list[int], stop: list[str], stop_ids: tuple[int, ...]) -> None:
    # ids of bytes: the byte tokenizer's vocabulary is the bytes in order
    result, calls = collect(tokens, tuple(stop), stop_ids)
    kept, text, reason = by_hand(tokens, tuple(stop), stop_ids, byte_tokenizer())
    assert (result.tokens, result.text, result.finish_reason) == (kept, text, reason)
    assert "".join(piece for _, piece in calls) == result.text
    assert [t for ids, _ in calls for t in ids] == result.tokens
    assert result.logprobs == [-1.0] * len(kept)
    assert result.prompt_tokens == 5
    assert not any(s in result.text for s in stop)


@given(st.text("the cat\n.é€日", min_size=1, max_size=20), st.data())
def test_the_shipped_tokenizer_cuts_anywhere(text: str, data: st.DataObject) -> None:
    tokenizer = shipped_tokenizer()
    tokens = tokenizer.encode(text)
    text = tokenizer.decode(tokens)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 6))]
    result, calls = collect(tokens, (stop,), tokenizer=tokenizer)
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"
    assert "".join(piece for _, piece in calls) == result.text


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_nothing_that_could_become_a_stop_string_is_released() -> None:
    result, calls = collect(ids("say STOP now"), ("STOP",))
    assert [piece for _, piece in calls] == ["s", "a", "y", " ", "", "", "", ""]
    assert (result.text, result.finish_reason, len(result.tokens)) == ("say ", "stop", 8)


def test_what_was_held_back_for_nothing_comes_later() -> None:
    result, calls = collect(ids("aSTORE"), ("STOP",))
    assert [piece for _, piece in calls] == ["a", "", "", "", "STOR", "E"]
    assert (result.text, result.finish_reason) == ("aSTORE", "length")
    # at the end of the request, with a call of its own
    result, calls = collect(ids("aSTO"), ("STOP",))
    assert calls[-1] == ([], "STO")
    assert (result.text, result.finish_reason) == ("aSTO", "length")


def test_overlapping_beginnings() -> None:
    result, calls = collect(ids("aaab"), ("aab",))
    assert (result.text, [piece for _, piece in calls]) == ("a", ["", "", "a", ""])
    result, _ = collect(ids("abcd"), ("bcx", "cd"))
    assert (result.text, result.finish_reason) == ("ab", "stop")


def test_the_earliest_stop_string_wins() -> None:
    # one token brings both
    result, _ = collect([ord("x"), 257], ("e", "the"))
    assert result.text == "x"


def test_half_a_character_waits() -> None:
    result, calls = collect(ids("é€"))
    assert [piece for _, piece in calls] == ["", "é", "", "", "€"]
    result, calls = collect(ids("aé")[:-1])
    assert result.text == "a\ufffd"
    assert calls[-1] == ([], "\ufffd")
    # a stop id ends the text too
    result, calls = collect([*ids("aé")[:-1], STOP_ID], stop_ids=(STOP_ID,))
    assert (result.text, calls[-1]) == ("a\ufffd", ([STOP_ID], "\ufffd"))


def test_tokens_after_the_end_are_ignored() -> None:
    calls: list[int] = []
    collector = Collector(0, 1, None, (9,), (), lambda index, tokens, text: calls.extend(tokens))
    assert collector.push(4, -0.5)
    assert not collector.push(9, -0.25)
    assert not collector.push(4, -0.5)
    result = collector.result(True)
    assert (result.tokens, result.logprobs, result.text, calls) == ([4, 9], [-0.5, -0.25], None, [4, 9])
    assert collector.result(False).logprobs is None


def test_a_step_of_several_tokens_is_cut_where_the_request_ends() -> None:
    calls: list[tuple[list[int], str]] = []

    def collector(stop_ids: tuple[int, ...] = (), stop: tuple[str, ...] = ()) -> Collector:
        calls.clear()
        made = Collector(0, 1, byte_tokenizer(), stop_ids, stop, lambda index, new, text: calls.append((new, text)))
        # the prompt's own token, and no step
        assert made.push(ord("x"), -1.0)
        return made

    one = collector()
    assert one.push_step(ids("abc"), [-1.0, -2.0, -3.0], 4) and one.push_step(ids("d"), [-4.0])
    result = one.result(True)
    assert (result.text, result.logprobs) == ("xabcd", [-1.0, -1.0, -2.0, -3.0, -4.0])
    assert (result.steps, result.drafted, result.accepted, result.tokens_per_step) == (2, 4, 2, 2.0)
    assert calls == [(ids("x"), "x"), (ids("abc"), "abc"), (ids("d"), "d")]

    # a stop id, a stop string, and one that ends inside of the step and began before it
    for stop_ids, stop, text in [((ord("b"),), (), "xa"), ((), ("b",), "xa"), ((), ("xab",), "")]:
        one = collector(stop_ids, stop)
        assert not one.push_step(ids("abc"), [-1.0] * 3, 3) and not one.push_step(ids("d"), [-1.0])
        result = one.result(False)
        assert (result.tokens, result.text, result.finish_reason) == (ids("xab"), text, "stop")
        assert (result.steps, result.drafted, result.accepted) == (1, 3, 1)
        assert [t for new, _ in calls for t in new] == ids("xab")
        assert "".join(piece for _, piece in calls) == text
    assert collector().result(False).tokens_per_step is None


def test_logits_that_are_not_finite_behind_the_end_are_nobodys() -> None:
    def emission(text: str) -> Verified:
        token = np.array([[*ids(text), NOT_FINITE, NOTHING]], np.int32)
        return Verified(token, np.zeros(token.shape, np.float32), np.array([3], np.int32))  # pyright: ignore[reportArgumentType]

    ended = Collector(0, 1, byte_tokenizer(), (), ("b",), None)
    assert _collect({0: ended}, emission("ab")) == [0] and ended.result(False).text == "a"
    for text in ("ac", ""):
        going = Collector(0, 1, byte_tokenizer(), (), ("b",), None)
        with pytest.raises(NonFiniteLogitsError, match="prompt 0: the logits are NaN or infinite"):
            _collect({0: going}, emission(text))
