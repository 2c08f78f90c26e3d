"""Requests held to a JSON schema: what comes fits, costs the others nothing, and no schema harms the engine."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from gdnjax.engine import Engine, Handle, constraint, programs
from gdnjax.engine.constraint import json_schema
from gdnjax.engine.schema_limits import MOST_BYTES, check
from gdnjax.generation import SamplingParams
from gdnjax.state.device import snapshot_bytes
from gdnjax.state.pages import Pages
from gdnjax.state.prefix_cache import PrefixCache
from gdnjax.tokenizer import ControlToken, Tokenizer
from tests.generation.small import GREEDY, OTHER_STOP_ID, SMALL, STOP_ID, VOCAB, byte_tokenizer, small_model

pytestmark = pytest.mark.usefixtures("quick_compilation")

# The shapes of test_engine.py and test_speculation.py.
CONFIG = dict(state_layout="twin", prefix_cache_bytes=4 * snapshot_bytes(SMALL), prefix_interval=16)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": -9, "maximum": 99}, "b": {"enum": ["the", "é", None]}},
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " ?"},  # short texts: a request has 64 bytes
}
HOT = SamplingParams(temperature=1.5)
KINDS = [
    GREEDY,
    HOT,
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=0.9, repetition_penalty=1.2, frequency_penalty=0.3),
]


def engine(pages: int | None = None, **arguments: Any) -> Engine:
    e = Engine(small_model(**CONFIG), **(dict(max_requests=4, kv_tokens=256, chunk_tokens=16) | arguments))
    if pages is not None:
        e.pool.pages = Pages(pages, e.config.page_size)
        e.pool.prefixes = PrefixCache(e.pool.pages, 4, 16)
    return e


def prompt(length: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, 250, length)]


def submit(e: Engine, seed: int, count: int = 50, **options: Any) -> Handle:
    sampling = dataclasses.replace(options.pop("sampling", HOT), seed=seed)
    held_to = json_schema(e.lm, SCHEMA)
    return e.submit(prompt(5, seed), count, sampling, stop_ids=[STOP_ID], constraint=held_to, **options)


def assert_fits(handle: Handle) -> None:
    assert handle.finish_reason == "stop" and handle.tokens[-1] == STOP_ID
    value = json.loads(handle.text or "")
    assert value.keys() == {"a", "b"}
    assert type(value["a"]) is int and -9 <= value["a"] <= 99 and value["b"] in ("the", "é", None)


def both(speculate: int | None) -> dict[str, Any]:
    return {} if speculate is None else {"speculate": speculate, "drafts": "ngram"}


speculating = pytest.mark.parametrize("speculate", [None, 2])


@speculating
def test_answers_fit_and_the_others_tokens_stay_what_they_are(speculate: int | None) -> None:
    def run(constrained: int) -> tuple[list[Handle], list[Handle]]:
        e = engine(**both(speculate))
        others = [e.submit(prompt(9, 7 + i), 40, kind, stop_ids=()) for i, kind in enumerate(KINDS[1:])]
        # One at a time, each after another: steps have 4 rows all along.
        fill = [submit(e, i, sampling=KINDS[i % 4]) if constrained else e.submit([1], 40) for i in range(12)]
        e.run()
        assert e.pool.live == ()
        return others, fill

    (plain, _), (beside, held) = run(0), run(1)
    for a, b in zip(plain, beside, strict=True):
        assert a.tokens == b.tokens
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-3)
    for handle in held:
        assert_fits(handle)
    assert len({handle.text for handle in held}) > 6


def test_a_request_beside_others_advances_every_step_and_its_scores_are_the_models_own() -> None:
    e = engine()
    handle = submit(e, 3)
    steps = 0
    while e.step():
        steps += 1
    assert_fits(handle)
    assert steps <= len(handle.tokens) + 3
    # A mask does not move them: the same text scored as given.
    scores = engine().score(handle.prompt, handle.tokens)
    np.testing.assert_allclose(handle.logprobs, scores, rtol=0, atol=1e-3)


def test_a_step_in_two_parts() -> None:
    # As with more than 64 requests: the second part takes no memory that the first still samples from.
    whole, parts = engine(), engine()
    parts._launcher.row_buckets = [1, 2]
    each = [(submit(whole, i), submit(parts, i)) for i in range(4)]
    whole.run()
    parts.run()
    for a, b in each:
        assert a.tokens == b.tokens
        assert_fits(b)


def test_speculation_changes_nothing() -> None:
    plain, speculating = engine(), engine(**both(2))
    each = [(submit(plain, i, sampling=kind), submit(speculating, i, sampling=kind)) for i, kind in enumerate(KINDS)]
    plain.run()
    speculating.run()
    for a, b in each:
        assert a.tokens == b.tokens and b.speculate == 0
        assert_fits(b)


@speculating
def test_preempted_requests_go_on_where_they_were(speculate: int | None) -> None:
    wanted = engine()
    tight = engine(pages=5, overcommit=True, **both(speculate))
    pairs = [(submit(wanted, i), submit(tight, i)) for i in range(6)]
    wanted.run()
    tight.run()
    assert tight.counters["preemptions"] > 0
    for a, b in pairs:
        assert_fits(b)
        assert a.tokens == b.tokens


def test_after_an_error_of_the_device_they_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, e = engine(), engine()
    pairs = [(submit(wanted, i), submit(e, i)) for i in range(3)]
    wanted.run()
    real, calls = programs.run_draw, [0]

    def fails_once(*arguments: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] == 9:
            raise RuntimeError("the device has gone")
        return real(*arguments, **named)

    monkeypatch.setattr(programs, "run_draw", fails_once)
    with pytest.raises(RuntimeError, match="has gone"):
        e.run()
    e.run()
    for a, b in pairs:
        assert a.tokens == b.tokens and b.finish_reason == "stop"


def test_limits_stops_and_cancelling() -> None:
    e = engine()
    cut = submit(e, 1, count=4)
    one = json_schema(e.lm, {"const": "the cat"})
    at_string = e.submit([1], 30, stop_ids=[STOP_ID], stop="cat", constraint=one)
    either = e.submit([1], 30, stop_ids=[OTHER_STOP_ID, 5], constraint=one)
    gone = submit(e, 2)
    for _ in range(5):
        e.step()
    e.cancel(gone)
    e.run()
    assert (cut.finish_reason, len(cut.tokens)) == ("length", 4)
    assert (at_string.finish_reason, at_string.text) == ("stop", '"the ')
    assert (either.finish_reason, either.text, either.tokens[-1]) == ("stop", '"the cat"', OTHER_STOP_ID)
    assert gone.finish_reason == "cancelled" and e.pool.live == ()


def test_a_grammar_that_becomes_too_complex_ends_its_own_request() -> None:
    e = engine()
    hostile = json_schema(e.lm, {"type": "string", "pattern": "^(([a-z]{1,200}){1,200}){20,200}$"})
    bad = [e.submit([i], 60, HOT, stop_ids=[STOP_ID], constraint=hostile) for i in range(2)]
    good = submit(e, 2)
    e.run()
    for handle in bad:
        assert handle.finish_reason == "error" and 2 < len(handle.tokens) < 60
    assert_fits(good)
    assert e.pool.live == ()


def test_rows_that_a_vocabulary_is_padded_with_are_never_taken() -> None:
    model = small_model()
    padded = dataclasses.replace(model, config=SMALL.replace(vocab_size=VOCAB + 70))
    matcher = json_schema(padded, {"type": "string"}).start([OTHER_STOP_ID, 5])
    assert matcher.mask.shape == (11,) and matcher.mask.dtype == np.uint32
    rng, complete = random.Random(0), False
    while not complete:
        bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        # Of the ends only the request's own, where the text is complete.
        complete = allowed == [OTHER_STOP_ID]
        assert complete or max(allowed) < STOP_ID
        if not complete:
            matcher.advance(rng.choice(allowed))
    # `unmask` and the host agree on the order of bits, and on the vocabulary's end.
    unmasked = np.asarray(programs.unmask(matcher.mask[None], VOCAB + 70))[0]
    np.testing.assert_array_equal(np.flatnonzero(unmasked), np.flatnonzero(bits[: VOCAB + 70]))


@pytest.mark.parametrize("as_token", [False, True])
def test_json_begins_behind_a_think_block(as_token: bool) -> None:
    plain = byte_tokenizer()
    close = [ControlToken(VOCAB, "</think>", False)] if as_token else []
    tokenizer = Tokenizer(plain._bpe, [*plain.control_tokens.values(), *close])
    model = dataclasses.replace(small_model(), tokenizer=tokenizer, config=SMALL.replace(vocab_size=VOCAB + 1))
    matcher = json_schema(model, SCHEMA, thinking=True).start([STOP_ID])

    def allows(token: int) -> bool:
        return bool(matcher.mask[token // 32] >> (token % 32) & 1)

    for token in tokenizer.encode("{1} < </thin\n"):
        assert allows(token) and not allows(STOP_ID)
        matcher.advance(token)
    for token in tokenizer.encode("</think>\n\n{", allow_control=True):
        assert allows(token)
        matcher.advance(token)
    assert not allows(ord("x")) and allows(ord('"')) and not allows(VOCAB)
    for token in tokenizer.encode('"a":7, "b":null}'):
        assert allows(token)
        matcher.advance(token)
    assert np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist() == [STOP_ID]


def chain(count: int, depth: int) -> dict[str, Any]:
    """References in a row, each so many levels down: recursion through it ends a process with a stack of 8 MB."""
    links = {f"a{i}": nested(depth, {"$ref": f"#/$defs/a{i + 1}"}) for i in range(count)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{count}": {"type": "integer"}}}


def nested(depth: int, innermost: dict[str, Any] | None = None) -> dict[str, Any]:
    schema: dict[str, Any] = innermost or {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "schema, message",
    [
        ([], "the schema is a list; it takes a JSON object"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"if": {}, "then": {}}, "Unimplemented keys"),
        ({"$ref": "file:///etc/passwd"}, "does not fetch resources"),
        ({"$ref": "#"}, "cannot go on"),
        ({"type": "string", "pattern": "^a$", "minLength": 5}, "Unsatisfiable schema"),
        ({"type": "string", "pattern": "(" * 9000 + ")" * 9000}, "the schema is refused"),
        ({"type": "string", "pattern": "(?=a)b"}, "the schema is refused"),
        ({"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(4)]} for i in range(9)]}, "too large"),
        ({"type": "integer", "multipleOf": 999_983}, "more than 20000 remainders together"),
        ({"allOf": [{"multipleOf": 991}, {"multipleOf": 997}]}, "more than 20000 remainders together"),
        ({"multipleOf": 1e-300}, "too many digits"),
        ({"multipleOf": -1}, "multipleOf = -1; it takes a number > 0"),
        ({"multipleOf": 10**400}, "more than 20000 remainders together"),
        # Before their least common multiple is looked for, which would take hours.
        ({"allOf": [{"multipleOf": 10**9 + 2 * i + 1} for i in range(200_000)]}, "bytes; at most 65536 are taken"),
        ({"const": float("nan")}, "the schema is not JSON"),
        ({"const": "\ud800"}, "the schema is not JSON"),
        (nested(2000), "more than 100 levels"),
        ({"enum": ["x" * MOST_BYTES]}, f"at most {MOST_BYTES} are taken"),
    ],
    ids=range(19),
)
def test_hostile_schemas_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        json_schema(small_model(), schema).start([STOP_ID])


def test_what_is_odd_but_sound_is_taken() -> None:
    json_schema(small_model(), nested(90))
    json_schema(small_model(), nested(90), thinking=True)
    for count, depth in ((1300, 1), (62, 90)):
        json_schema(small_model(), chain(count, depth)).start([STOP_ID])
    check({"properties": {"a": {"multipleOf": 0.01}, "multipleOf": {"multipleOf": 5}, "c": {"multipleOf": 25}}})
    json_schema(small_model(), None)


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    model, e = small_model(), engine()
    held_to = json_schema(model, None)
    with pytest.raises(ValueError, match=r"stop_ids = \[5\]: a constrained request ends with a control token; .*260"):
        e.submit([1], 4, stop_ids=[5], constraint=held_to)
    other = dataclasses.replace(model, config=SMALL.replace(vocab_size=300))
    with pytest.raises(ValueError, match="the constraint is for vocab_size = 300, and this model has 262"):
        e.submit([1], 4, stop_ids=[STOP_ID], constraint=json_schema(other, None))
    with pytest.raises(ValueError, match="no tokenizer"):
        json_schema(dataclasses.replace(model, tokenizer=None), None)
    monkeypatch.setattr(constraint, "available", lambda: False)
    with pytest.raises(ValueError, match=r"need llguidance, which is not installed: pip install 'gdnjax\[serve\]'"):
        json_schema(model, None)
