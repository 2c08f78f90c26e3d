"""Sampling by request: every sampler is the one of `gdnjax.generation`, and padding draws nothing. The largest step:
a request's logits are its own, and padding writes nothing."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.engine import programs
from gdnjax.generation import SamplingParams
from gdnjax.generation.accept import NOT_FINITE, NOTHING
from gdnjax.generation.sampling import make_sampler, penalize, sample
from gdnjax.state import State, init_state
from tests.generation.small import SMALL, VOCAB, small_model
from tests.helpers import assert_same_bits

pytestmark = pytest.mark.usefixtures("quick_compilation")

KINDS = {
    "greedy": SamplingParams(),
    "top": SamplingParams(temperature=1.5, top_k=programs.TOP, seed=1),
    "full": SamplingParams(temperature=1.5, top_p=0.99, seed=2),
    "penalized": SamplingParams(temperature=1.5, min_p=0.001, repetition_penalty=5.0, presence_penalty=0.5, seed=3),
}
ROWS, REQUESTS = 4, 6


def spent() -> jax.Array:
    return jnp.zeros((2, ROWS), jnp.int32)


@pytest.mark.parametrize("mode", programs.MODES)
def test_a_sampler_draws_what_generation_draws(mode: programs.Mode) -> None:
    params = KINDS[mode]
    assert programs.mode_of(params) == mode
    rng = np.random.default_rng(0)
    # nearly flat, so that tokens far down are drawn
    logits = jnp.asarray(0.3 * rng.normal(size=(ROWS, VOCAB)), jnp.float32)
    in_prompt = np.asarray(rng.random((REQUESTS, VOCAB)) < 0.5)
    slate = programs.new_slate(SMALL.replace(max_requests=REQUESTS))
    for request in range(REQUESTS):
        number = np.int32(request)
        slate = programs.run_admit(slate, number, np.int32(10 * request), *programs.settings(params))
        slate = programs.run_admit_penalties(slate, number, in_prompt[request], np.zeros(VOCAB, np.int32))
    rows, seen, far = np.array([4, 1, -1, 5], np.int32), np.zeros((ROWS, VOCAB), np.int32), 0
    sampler = make_sampler([params] * ROWS, ROWS)
    for turn in range(12):
        before = np.asarray(slate.token)
        slate, packed = programs.run_draw(slate, logits, rows, spent(), mode=mode)
        emission = programs.unpack(np.asarray(packed))
        changed = penalize(logits, sampler, jnp.asarray(in_prompt[rows]), jnp.asarray(seen))
        drawn = jnp.asarray([40 + turn, 10 + turn, 0, 50 + turn])
        wanted = np.asarray(sample(changed if mode == "penalized" else logits, sampler, drawn))
        found = np.asarray(emission.token)
        np.testing.assert_array_equal(found[[0, 1, 3]], wanted[[0, 1, 3]])
        assert found[2] == NOTHING
        np.testing.assert_array_equal(np.asarray(slate.token)[[4, 1, 5]], wanted[[0, 1, 3]])
        np.testing.assert_array_equal(np.asarray(slate.token)[[0, 2, 3]], before[[0, 2, 3]])
        seen[[0, 1, 3], wanted[[0, 1, 3]]] += 1
        every = np.asarray(logits) - np.log(np.exp(np.asarray(logits)).sum(-1, keepdims=True))
        np.testing.assert_allclose(np.asarray(emission.logprob)[0], every[0, wanted[0]], atol=1e-5)
        better = np.asarray(logits) > np.take_along_axis(np.asarray(logits), wanted[:, None], axis=1)
        far += bool((better[[0, 1, 3]].sum(axis=1) > programs.TOP).any())
    np.testing.assert_array_equal(slate.drawn, [0, 22, 20, 30, 52, 62])
    assert (far > 0) == (mode in ("full", "penalized"))


def test_more_candidates_than_top_holds_take_them_all() -> None:
    assert programs.mode_of(SamplingParams(temperature=1.0, top_k=programs.TOP + 1)) == "full"
    assert programs.mode_of(SamplingParams(temperature=0.0, top_k=5)) == "greedy"
    assert programs.mode_of(SamplingParams(temperature=0.0, presence_penalty=1.0)) == "penalized"


def test_logits_that_are_not_finite_are_told() -> None:
    slate = programs.new_slate(SMALL.replace(max_requests=REQUESTS))
    logits = jnp.zeros((ROWS, VOCAB)).at[1, 5].set(jnp.nan)
    _, packed = programs.run_draw(slate, logits, np.array([0, 1, 2, 3], np.int32), spent(), mode="greedy")
    assert [int(token) == NOT_FINITE for token in programs.unpack(np.asarray(packed)).token] == [
        False,
        True,
        False,
        False,
    ]


def test_a_step_of_64_rows_gives_a_request_the_same_bits_whoever_else_is_in_it() -> None:
    rows, params = 64, small_model().params
    config = SMALL.replace(max_requests=rows, state_layout="twin")
    nan = lambda arrays, kept: tuple(jnp.full_like(x, jnp.nan).at[:kept].set(0) for x in arrays)  # noqa: E731
    empty = init_state(config)
    start = dataclasses.replace(
        empty,
        recurrent=nan(empty.recurrent, 1),
        conv=nan(empty.conv, 1),
        keys=nan(empty.keys, config.page_size),
        values=nan(empty.values, config.page_size),
    )
    rng = np.random.default_rng(0)
    owner, tokens = rng.permutation(rows).astype(np.int32), rng.integers(0, 250, (3, rows)).astype(np.int32)

    def run(live: np.ndarray) -> tuple[np.ndarray, State]:
        state, found = jax.tree.map(jnp.array, start), []
        logits = jnp.full((rows, config.vocab_size), jnp.nan)
        for token in tokens:
            request = np.where(live, owner, -1)
            logits, state = programs.run_decode(params, state, logits, jnp.asarray(token), request)
            found.append(np.array(logits))
        return np.stack(found, 1), state

    together, _ = run(np.ones(rows, bool))
    assert np.isfinite(together).all()
    for count in (1, 3, 8):
        live = np.arange(rows) % (rows // count) == 5
        assert live.sum() >= count
        found, state = run(live)
        assert_same_bits(found[live], together[live], f"{count} of {rows} rows")
        absent = np.sort(owner[~live])
        pages = start.page_table[absent].reshape(-1)
        cells = (np.asarray(pages)[:, None] * config.page_size + np.arange(config.page_size)).reshape(-1)
        slots = np.concatenate([start.read_slot[absent], start.write_slot[absent]])
        for name, rest in (("recurrent", slots), ("conv", absent + 1), ("keys", cells), ("values", cells)):
            for after, before in zip(getattr(state, name), getattr(start, name), strict=True):
                untouched = np.concatenate([[0], rest])
                assert_same_bits(np.asarray(after)[untouched], np.asarray(before)[untouched], name)
