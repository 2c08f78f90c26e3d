"""The draft head against Hugging Face's layers wired as the head is, and against a loop written by hand."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config, ConfigError
from gdnjax.model import decode_hidden, draft, draft_prefill, fill_draft_kv, mtp_logits, prefill_hidden
from gdnjax.model.forward import forward_hidden
from gdnjax.state import Batch, State, cached_kv, commit, init_state, prefill_batch
from gdnjax.state.device import copy_pages
from gdnjax.state.snapshot import take
from gdnjax.weights.declaration import Params, tensor_names
from gdnjax.weights.packing import pack
from tests.helpers import (
    KV,
    LOGITS,
    STATES,
    assert_close,
    assert_same_bits,
    decode_batch,
    golden_arrays,
    host_copy,
    load_golden,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")

COUNT = 3
# One shape for all prefills, so that one program is compiled.
ROWS = 64
DRAFT_ROWS = 4


@jax.jit
def read(params: Params, state: State, batch: Batch, following: jax.Array) -> tuple[jax.Array, State]:
    """A window of prompts through the model and into the head's cache."""
    hidden, state = prefill_hidden(params, state, batch)
    return hidden, draft_prefill(params, state, batch, hidden, following)


@jax.jit
def advance(params: Params, state: State, batch: Batch) -> tuple[jax.Array, State]:
    """A decode step, committed: the hiddens of its rows."""
    hidden, state = decode_hidden(params, state, batch)
    return hidden, commit(state)


run_draft = jax.jit(draft, static_argnames="count")
run_fill = jax.jit(fill_draft_kv)
run_forward = jax.jit(forward_hidden, static_argnames="config")
run_mtp_logits = jax.jit(mtp_logits, static_argnames="config")


def drafting(packed: bool = False, **changes: Any) -> tuple[Config, Params, State]:
    config, params = load_golden("dense_gva")
    config = config.replace(**dict(page_size=16, state_layout="twin", draft_kv=True) | changes)
    return config, pack(params, config) if packed else params, init_state(config)


def read_prompts(
    params: Params, state: State, prompts: Mapping[int, Sequence[int]], sizes: Sequence[int]
) -> tuple[dict[int, np.ndarray], State]:
    """Prompts in windows of at most these sizes: all hiddens `[tokens, H]` by request, and the state."""
    hiddens: dict[int, list[np.ndarray]] = {request: [] for request in prompts}
    start = 0
    for size in sizes:
        windows = {r: ids[start : start + size] for r, ids in prompts.items() if start < len(ids)}
        batch = prefill_batch(state.config, {r: [int(i) for i in ids] for r, ids in windows.items()}, ROWS)
        following = np.full(state.config.max_requests, -1, np.int32)
        for request in windows:
            following[request] = [*prompts[request][start + size :], -1][0]
        hidden, state = read(params, state, batch, jnp.asarray(following))
        for request in windows:
            hiddens[request].append(np.asarray(hidden)[np.asarray(batch.request) == request])
        start += size
    return {request: np.concatenate(pieces) for request, pieces in hiddens.items()}, state


def run_drafts(
    params: Params, state: State, tokens: Mapping[int, int], hidden: Mapping[int, np.ndarray], count: int = COUNT
) -> tuple[dict[int, np.ndarray], dict[int, np.ndarray], State]:
    """Drafts `[count]` and their logits `[count, V]` by request; the first rows are padding."""
    padding = DRAFT_ROWS - len(tokens)
    rows = np.full((DRAFT_ROWS, state.config.hidden_size), np.nan, np.float32)
    rows[padding:] = [hidden[request] for request in tokens]
    drafts, logits, state = run_draft(params, state, decode_batch(tokens, DRAFT_ROWS), jnp.asarray(rows), count=count)
    by_request = [{r: np.asarray(x)[padding + i] for i, r in enumerate(tokens)} for x in (drafts, logits)]
    return by_request[0], by_request[1], state


# By hand


def head_by_hand(params: Params, c: Config, tokens: Sequence[int], hiddens: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Position i has hidden i and the token after it: outputs `[t, H]`, logits `[t, V]`, keys and values in float64."""
    weights = {name: np.asarray(array, np.float64) for name, array in tensor_names(params).items()}

    def w(name: str) -> np.ndarray:
        return weights[f"mtp.{name}.weight"]

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c.rms_norm_eps) * (1 + weight)

    def rope(x: np.ndarray) -> np.ndarray:
        half = c.rotary_dim // 2
        angles = np.arange(len(x))[:, None] * c.rope_theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half : 2 * half]) * np.exp(1j * angles)[:, None]
        return np.concatenate([turned.real, turned.imag, x[..., 2 * half :]], axis=-1)

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    embedded = weights["model.embed_tokens.weight"][np.asarray(tokens)]
    hidden = np.stack([np.asarray(h, np.float64) for h in hiddens])
    pair = norm(embedded, w("pre_fc_norm_embedding")), norm(hidden, w("pre_fc_norm_hidden"))
    x = np.concatenate(pair, axis=-1) @ w("fc").T

    y, p = norm(x, w("layers.0.input_layernorm")), "layers.0.self_attn."
    length, heads, dim = len(y), c.num_attention_heads, c.head_dim
    q, gate = np.split((y @ w(p + "q_proj").T).reshape(length, heads, 2 * dim), 2, axis=-1)
    k, v = ((y @ w(p + f"{name}_proj").T).reshape(length, -1, dim) for name in "kv")
    q, k = rope(norm(q, w(p + "q_norm"))), rope(norm(k, w(p + "k_norm")))
    shared = heads // c.num_key_value_heads
    scores = np.einsum("tad,sad->ats", q, k.repeat(shared, axis=1)) / np.sqrt(dim)
    scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    out = np.einsum("ats,sad->tad", scores / scores.sum(-1, keepdims=True), v.repeat(shared, axis=1))
    x = x + (out * sigmoid(gate)).reshape(length, -1) @ w(p + "o_proj").T

    y, p = norm(x, w("layers.0.post_attention_layernorm")), "layers.0.mlp."
    inner = y @ w(p + "gate_proj").T
    x = x + (inner * sigmoid(inner) * (y @ w(p + "up_proj").T)) @ w(p + "down_proj").T
    x = norm(x, w("norm"))
    return x, x @ weights["lm_head.weight"].T, k, v


def chain_by_hand(
    params: Params, c: Config, tokens: Sequence[int], hiddens: Sequence[Any], count: int
) -> tuple[list[int], np.ndarray]:
    """Drafts and their logits: every step is the whole sequence again, one position longer."""
    tokens, hiddens, chosen = list(tokens), list(hiddens), []
    for _ in range(count):
        outputs, logits, _, _ = head_by_hand(params, c, tokens, hiddens)
        chosen.append(logits[-1])
        tokens.append(int(np.argmax(logits[-1])))
        hiddens.append(outputs[-1])
    return tokens[-count:], np.stack(chosen)


# Whole sequences


def test_whole_sequences() -> None:
    config, params = load_golden("dense_gva")
    golden = golden_arrays("dense_gva", "mtp")
    ids = golden["input_ids"]
    hidden, seen = run_forward(params, config, ids)
    assert_close(hidden, golden["hidden_post_norm"], STATES, "hidden")
    assert_close(run_mtp_logits(params, config, hidden, ids), golden["teacher_logits"], LOGITS, "own hidden")
    teacher = run_mtp_logits(params, config, golden["hidden_post_norm"], ids)
    assert_close(teacher, golden["teacher_logits"], LOGITS, "golden hidden")
    packed = run_mtp_logits(pack(params, config), config, golden["hidden_post_norm"], ids)
    assert_close(packed, golden["teacher_logits"], LOGITS, "packed weights")

    # One token more makes it a draft. The last hidden is not read.
    longer = np.concatenate([ids, golden["first_token"]], axis=1)
    unread = jnp.pad(hidden, ((0, 0), (0, 1), (0, 0)), constant_values=np.nan)
    first = run_mtp_logits(params, config, unread, longer)[0, -1]
    assert_close(first, golden["draft_logits"][0, 0], LOGITS, "first draft")
    assert int(jnp.argmax(first)) == golden["drafts"][0, 0]

    # The hidden before the final norm is another input altogether.
    before_norm = run_mtp_logits(params, config, seen.hidden_states[-2], ids)
    assert float(jnp.abs(before_norm - golden["teacher_logits"]).max()) > 100 * LOGITS


def test_the_loop_by_hand_is_hugging_faces() -> None:
    config, params = load_golden("dense_gva")
    golden = golden_arrays("dense_gva", "mtp")
    tokens = [*golden["input_ids"][0, 1:], golden["first_token"][0, 0]]
    drafts, logits = chain_by_hand(params, config, tokens, golden["hidden_post_norm"][0], COUNT)
    assert drafts == list(golden["drafts"][0])
    assert_close(logits, golden["draft_logits"][0], LOGITS)


# With a cache


@pytest.mark.newest
@pytest.mark.parametrize("sizes", [(40,), (7, 16, 17)], ids=["whole", "windows"])
def test_prompts_and_chained_drafts(sizes: tuple[int, ...]) -> None:
    golden = golden_arrays("dense_gva", "mtp")
    ids = golden["input_ids"][0]
    config, params, state = drafting(packed=len(sizes) > 1)
    _, unpacked = load_golden("dense_gva")
    # another request in the same calls, with another number of pages and another last window
    prompts = {3: ids, 1: ids[::-1][:20]}
    hidden, state = read_prompts(params, state, prompts, sizes)
    assert_close(hidden[3], golden["hidden_post_norm"][0], STATES, "hidden")

    tokens = {3: int(golden["first_token"][0, 0]), 1: 11}
    known = {r: [*prompts[r][1:], tokens[r]] for r in prompts}
    for request, prompt in prompts.items():
        keys, values = cached_kv(state, -1, request)
        _, _, k, v = head_by_hand(unpacked, config, known[request], hidden[request])
        assert_close(keys[: len(prompt) - 1], k[:-1], KV, "keys")
        assert_close(values[: len(prompt) - 1], v[:-1], KV, "values")
        assert not np.any(keys[-1]), "the sampled token was not known yet"

    before = host_copy(state)
    drafts, logits, state = run_drafts(params, state, tokens, {r: h[-1] for r, h in hidden.items()})
    assert_close(logits[3], golden["draft_logits"][0], LOGITS, "drafts")
    np.testing.assert_array_equal(drafts[3], golden["drafts"][0])
    for request in prompts:
        by_hand = chain_by_hand(unpacked, config, known[request], hidden[request], COUNT)
        np.testing.assert_array_equal(drafts[request], by_hand[0])
        assert_close(logits[request], by_hand[1], LOGITS, f"request {request} by hand")

    # Drafting changes nothing but the head's own cache.
    for field in dataclasses.fields(State):
        if field.name != "config":
            found, kept = (jax.tree.leaves(getattr(s, field.name)) for s in (state, before))
            own = field.name in ("keys", "values")
            for one, other in zip(found[: len(found) - own], kept[: len(kept) - own], strict=True):
                assert_same_bits(one, other, field.name)


def test_token_by_token() -> None:
    golden = golden_arrays("dense_gva", "mtp")
    ids = golden["input_ids"][0]
    _, params, state = drafting()
    found = []
    for token, after in itertools.pairwise(ids):
        hidden, state = advance(params, state, decode_batch({2: int(token)}, DRAFT_ROWS))
        # Chained drafts behind the first are wrong guesses, mostly: the next rows write over them.
        _, logits, state = run_drafts(params, state, {2: int(after)}, {2: np.asarray(hidden)[-1]})
        found.append(logits[2][0])
    assert_close(np.stack(found), golden["teacher_logits"][0], LOGITS)


def test_rejected_and_accepted_drafts() -> None:
    golden = golden_arrays("dense_gva", "mtp")
    ids = golden["input_ids"][0]
    config, params, state = drafting()
    hidden, state = read_prompts(params, state, {0: ids}, [40])
    last, hidden = hidden[0][-1], list(hidden[0])
    drafts, _, state = run_drafts(params, state, {0: int(golden["first_token"][0, 0])}, {0: last})
    # The first token and one draft are taken, then comes another token than was drafted.
    other = (int(drafts[0][1]) + 1) % config.vocab_size
    taken = [int(golden["first_token"][0, 0]), int(drafts[0][0])]
    for token in taken:
        row, state = advance(params, state, decode_batch({0: token}, DRAFT_ROWS))
        hidden.append(np.asarray(row)[-1])
    # rows as a step that verified them has them: the accepted one, the newest (not stored yet), padding
    rows = jnp.asarray([hidden[40], hidden[41], np.full_like(last, np.nan)])
    request, position = jnp.asarray([0, 0, -1], jnp.int32), jnp.asarray([40, -1, 41], jnp.int32)
    state = run_fill(params, state, jnp.asarray([taken[1], other, 0], jnp.int32), rows, request, position)
    drafts, logits, state = run_drafts(params, state, {0: other}, {0: hidden[-1]})

    by_hand = chain_by_hand(params, config, [*ids[1:], *taken, other], hidden, COUNT)
    np.testing.assert_array_equal(drafts[0], by_hand[0])
    assert_close(logits[0], by_hand[1], LOGITS)


def test_the_end_of_a_request_and_padding_store_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNJAX_DEBUG", "2")  # operations look at places and lengths
    config, params, state = drafting(max_length=32)
    ids = golden_arrays("dense_gva", "mtp")["input_ids"][0, :31]
    hidden, state = read_prompts(params, state, {0: ids}, [31])
    before = host_copy((state.keys[-1], state.values[-1]))
    # Requests 1 and 3 are empty; padding must not pass for request 0. Positions 30 and 31 are there, 32 is not.
    batch = Batch(jnp.full(DRAFT_ROWS, 5, jnp.int32), jnp.asarray([-1, 1, 0, 3], jnp.int32))
    rows = jnp.tile(hidden[0][-1], (DRAFT_ROWS, 1))
    _, logits, state = run_draft(params, state, batch, rows, count=COUNT)
    assert np.isfinite(logits).all()
    places = np.asarray(state.page_table)[0, 1] * config.page_size + np.array([14, 15])
    for cache, kept in zip((state.keys[-1], state.values[-1]), before, strict=True):
        changed = np.flatnonzero((np.asarray(cache) != kept).any(axis=(1, 2)))
        np.testing.assert_array_equal(changed, places)


def test_pages_are_moved_with_the_heads_cache() -> None:
    config, _, state = drafting()
    cells = np.random.default_rng(0).normal(size=state.keys[-1].shape).astype(np.float32)
    state = dataclasses.replace(
        state, keys=(*state.keys[:-1], jnp.asarray(cells)), values=(*state.values[:-1], jnp.asarray(-cells))
    )
    size, moved = config.page_size, np.array([3, 0, 0, 0, 0, 0, 0, 0], np.int32)
    cells[5 * size : 6 * size] = cells[3 * size : 4 * size]
    state = copy_pages(state, jnp.asarray(moved), jnp.asarray(moved // 3 * 5))
    assert_same_bits(state.keys[-1], cells)
    assert_same_bits(state.values[-1], -cells)
    # A snapshot takes them along too.
    kept = take(state, 0, 20, np.asarray(state.page_table)[0, :2].tolist())
    assert_same_bits(kept.keys[-1], cells[size : size + 20])
    assert_same_bits(kept.values[-1], -cells[size : size + 20])


# What is refused


def test_without_a_head() -> None:
    config, params, state = drafting()
    headless = {name: part for name, part in params.items() if name != "mtp"}
    batch, hidden = decode_batch({0: 1}, 1), jnp.zeros((1, config.hidden_size))
    numbers = jnp.zeros(1, jnp.int32)
    with pytest.raises(ConfigError, match=r"draft_kv = True; it takes False .*mtp_num_hidden_layers = 0.*mtp\.\* tens"):
        config.replace(mtp_num_hidden_layers=0)
    with pytest.raises(ValueError, match=r"no draft head.*load a checkpoint with mtp\.\* tensors"):
        mtp_logits(headless, config, hidden[None], batch.tokens[None])
    plain = init_state(config.replace(draft_kv=False))
    assert len(plain.keys) == len(state.keys) - 1 == len(config.attention_layers)
    for weights, kept, message in ((headless, state, "no draft head"), (params, plain, "set draft_kv to True")):
        with pytest.raises(ValueError, match=message):
            draft(weights, kept, batch, hidden, 1)
        with pytest.raises(ValueError, match=message):
            fill_draft_kv(weights, kept, batch.tokens, hidden, batch.request, numbers)
    with pytest.raises(ValueError, match="count = 0; it takes an integer >= 1"):
        draft(params, state, batch, hidden, 0)
