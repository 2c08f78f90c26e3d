"""Acceptance: the tokens, the ends and the distribution of plain sampling, whatever the drafts are."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2

from gdnjax.generation.accept import NOT_FINITE, NOTHING, Acceptance, accept
from gdnjax.generation.sampling import Sampler, SamplingParams, make_sampler, sample

pytestmark = pytest.mark.usefixtures("quick_compilation")

VOCAB, ROWS = 8, 4
NO_STOPS = jnp.full((1, 1), -1, jnp.int32)
# Logits of a token hang on the one before it: a model that takes no forward pass.
TABLE = jnp.asarray(np.random.default_rng(3).normal(scale=1.5, size=(VOCAB, VOCAB)), jnp.float32)

run_accept = jax.jit(accept)


def sampler_of(params: SamplingParams, seeds: Any) -> Sampler:
    """One setting for many requests, which differ in their seeds."""
    one = make_sampler([params], 1)
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (len(seeds), *x.shape[1:])), one)
    return dataclasses.replace(many, seed=jnp.asarray(seeds, jnp.uint32))


@functools.partial(jax.jit, static_argnames=("rows", "tokens"))
def decode(
    sampler: Sampler, first: jax.Array, right: jax.Array, in_prompt: jax.Array | None, rows: int, tokens: int
) -> tuple[jax.Array, jax.Array]:
    """Tokens `[G, tokens]` and the steps that each request took.

    Drafts are the likeliest token after each, and some other one where `right` `[tokens]` says so.
    """
    groups = first.shape[0]
    stops = jnp.full((groups, 1), -1, jnp.int32)

    def more(carry: Any) -> jax.Array:
        return jnp.any(carry[1])

    def step(carry: Any) -> Any:
        last, live, emitted, counts, out, steps = carry
        fed = [last]
        for t in range(rows - 1):
            best = jnp.argmax(TABLE[fed[-1]], axis=-1)
            wrong = ~right[(emitted + t) % tokens]
            fed.append((best + wrong) % VOCAB)
        fed = jnp.stack(fed, axis=1)
        # Rows behind the count hold anything.
        count = 1 + (emitted + jnp.arange(groups)) % rows
        logits = jnp.where(jnp.arange(rows)[:, None] < count[:, None, None], TABLE[fed], jnp.nan)
        limit = jnp.full(groups, tokens)
        a = accept(logits, fed[:, 1:], count, sampler, live, emitted, limit, stops, in_prompt, counts)
        place = jnp.where(a.token >= 0, emitted[:, None] + jnp.arange(rows), tokens)
        out = out.at[jnp.arange(groups)[:, None], place].set(a.token, mode="drop")
        return a.last, a.live, emitted + a.accepted, a.counts, out, steps + live

    zeros = jnp.zeros(groups, jnp.int32)
    counts = None if in_prompt is None else jnp.zeros((groups, VOCAB), jnp.int32)
    out = jnp.full((groups, tokens), NOTHING)
    carry = first, jnp.ones(groups, bool), zeros, counts, out, zeros
    *_, out, steps = jax.lax.while_loop(more, step, carry)
    return out, steps


GREEDY = SamplingParams()
MIXED = [
    GREEDY,
    SamplingParams(temperature=0.9, top_k=6, top_p=0.95),
    SamplingParams(temperature=1.2, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3),
    SamplingParams(frequency_penalty=0.5),
]


@pytest.mark.newest
def test_the_tokens_are_plain_samplings() -> None:
    groups, tokens = 64, 24
    params = [dataclasses.replace(MIXED[i % 4], seed=i) for i in range(groups)]
    sampler, first = make_sampler(params, groups), jnp.arange(groups, dtype=jnp.int32) // 4 % VOCAB
    in_prompt = jax.nn.one_hot(first, VOCAB, dtype=bool)
    right = jnp.asarray(np.random.default_rng(0).random(tokens) < 0.8)
    plain, plain_steps = decode(sampler, first, right, in_prompt, 1, tokens)
    assert plain_steps.tolist() == [tokens] * groups
    found, steps = decode(sampler, first, right, in_prompt, ROWS, tokens)
    np.testing.assert_array_equal(found, plain)
    for kind in range(4):
        assert len(np.unique(np.asarray(plain)[kind::4], axis=0)) > VOCAB / 2
        # Some drafts were accepted and some were not.
        assert tokens / ROWS < np.mean(np.asarray(steps)[kind::4]) < tokens * 0.95


def test_drafts_that_are_the_target_and_drafts_that_are_anything() -> None:
    groups, rows, vocab = 512, 4, 64
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(size=(groups, rows, vocab)), jnp.float32)
    zeros = jnp.zeros(groups, jnp.int32)
    sampler = make_sampler([SamplingParams(temperature=1.0, seed=i) for i in range(groups)], groups)

    def accepted(drafts: Any) -> np.ndarray:
        stops = jnp.full((groups, 1), -1)
        a = run_accept(logits, drafts, zeros + rows, sampler, zeros == 0, zeros, zeros + 99, stops)
        return np.asarray(a.accepted) - 1

    target = jnp.stack([sample(logits[:, t], sampler, zeros + t) for t in range(rows - 1)], axis=1)
    assert (accepted(target) == rows - 1).all()
    # One in 64, and then another one in 64.
    found, wanted = accepted(jnp.asarray(rng.integers(0, vocab, (groups, rows - 1)))).mean(), 1 / vocab
    assert abs(found - wanted) < 5 * np.sqrt(wanted / groups)


def test_the_distribution_is_the_targets() -> None:
    """All strings of three tokens: a chi-square that chance exceeds once in a million."""
    groups, tokens = 8192, 3
    sampler, first = sampler_of(SamplingParams(temperature=1.0, top_k=4), np.arange(groups)), jnp.zeros(groups, int)
    found, steps = decode(sampler, first, jnp.array([True, False, True]), None, ROWS, tokens)
    assert np.mean(steps) < 2.8
    kept = np.asarray(jax.lax.top_k(TABLE, 4)[0])[:, -1:]
    after = np.where(np.asarray(TABLE) >= kept, np.exp(np.asarray(TABLE, np.float64)), 0)
    after /= after.sum(-1, keepdims=True)
    expected = np.einsum("a,ab,bc->abc", after[0], after, after).ravel() * groups
    counts = np.bincount(np.ravel_multi_index(np.asarray(found).T, (VOCAB,) * 3), minlength=VOCAB**3)
    assert not counts[expected == 0].any()
    # Rare strings together: a chi-square takes five expected ones a cell.
    rare = (expected > 0) & (expected < 5)
    found, wanted = (np.append(x[expected >= 5], x[rare].sum()) for x in (counts, expected))
    statistic = ((found - wanted) ** 2 / wanted).sum()
    bound = chi2.ppf(1 - 1e-6, len(wanted) - 1)
    assert len(wanted) > 40 and statistic < bound, f"chi-square {statistic:.1f}, at most {bound:.1f}"


def greedy(fed: list[list[int]], chosen: list[list[int]], count: list[int], **changes: Any) -> Acceptance:
    """Acceptance of requests whose target chooses `chosen` at rows that were fed `fed` (the first not read)."""
    groups, rows = len(fed), len(fed[0])
    values = dict(
        live=jnp.ones(groups, bool),
        emitted=jnp.zeros(groups, jnp.int32),
        limit=jnp.full(groups, 99, jnp.int32),
        stop_ids=jnp.full((groups, 2), -1, jnp.int32),
    )
    logits = 9 * jax.nn.one_hot(jnp.asarray(chosen), VOCAB)
    drafts = jnp.asarray(fed, jnp.int32).reshape(groups, rows)[:, 1:]
    sampler = make_sampler([GREEDY] * groups, groups)
    return run_accept(logits, drafts, jnp.asarray(count, jnp.int32), sampler, **values | changes)


N = NOTHING


def test_runs_of_accepted_drafts() -> None:
    # accepted: all, two, none; and drafts that would be right stand behind the count or a rejected one
    fed = [[0, 1, 2, 3], [0, 1, 2, 5], [0, 5, 2, 3], [0, 1, 2, 3], [0, 1, 5, 3], [0, 1, 2, 3]]
    a = greedy(fed, [[1, 2, 3, 4]] * 6, [4, 4, 4, 2, 4, 1])
    assert a.token.tolist() == [[1, 2, 3, 4], [1, 2, 3, N], [1, N, N, N], [1, 2, N, N], [1, 2, N, N], [1, N, N, N]]
    assert a.accepted.tolist() == [4, 3, 1, 2, 2, 1]
    assert a.last.tolist() == [4, 3, 1, 2, 2, 1]
    assert a.live.all() and a.counts is None
    logprob = np.asarray(jax.nn.log_softmax(9 * jax.nn.one_hot(1, VOCAB)))[1]
    np.testing.assert_allclose(a.logprob, logprob, rtol=0, atol=1e-6)


def test_what_is_accepted_follows_the_request_not_its_row() -> None:
    fed = [[0, 1, 2, 3], [0, 1, 2, 5], [0, 5, 2, 3], [0, 1, 2, 3]]
    limit, order = jnp.array([9, 2, 9, 9]), [2, 0, 3, 1]
    a = greedy(fed, [[1, 2, 3, 4]] * 4, [4, 4, 4, 2], limit=limit)
    assert a.accepted.tolist() == [4, 2, 1, 2]
    moved = greedy([fed[i] for i in order], [[1, 2, 3, 4]] * 4, [4, 4, 2, 4], limit=limit[jnp.array(order)])
    for one, other in zip(*map(jax.tree.leaves, (a, moved)), strict=True):
        np.testing.assert_array_equal(np.asarray(one)[order], other)


def test_counts_outside_of_what_was_run_are_clamped() -> None:
    a = greedy([[0, 1, 2, 3]] * 4, [[1, 2, 3, 4]] * 4, [9, 0, -1, 4])
    assert a.accepted.tolist() == [4, 1, 1, 4]
    # no token, so never what the target chooses
    assert greedy([[0, -1, 2, 3]], [[1, 2, 3, 4]], [4]).accepted.tolist() == [1]


def test_a_request_that_is_not_live_emits_nothing() -> None:
    a = greedy([[0, 1, 2, 3]] * 2, [[1, 2, 3, 4]] * 2, [4, 4], live=jnp.array([False, True]))
    assert a.token.tolist() == [[N] * 4, [1, 2, 3, 4]]
    assert (a.accepted.tolist(), a.live.tolist()) == ([0, 4], [False, True])


def test_stop_ids_and_limits_cut_inside_of_accepted_drafts() -> None:
    stops = jnp.array([[2, -1], [-1, 4], [7, 6], [1, 2], [-1, -1], [-1, -1], [3, -1]])
    a = greedy(
        [[0, 1, 2, 3]] * 7,
        [[1, 2, 3, 4]] * 7,
        [4] * 7,
        stop_ids=stops,
        emitted=jnp.array([0, 0, 0, 0, 5, 5, 5]),
        limit=jnp.array([9, 9, 9, 9, 7, 9, 8]),
    )
    whole = [1, 2, 3, 4]
    assert a.token.tolist() == [[1, 2, N, N], whole, whole, [1, N, N, N], [1, 2, N, N], whole, [1, 2, 3, N]]
    assert a.live.tolist() == [False, False, True, False, False, False, False]
    assert a.accepted.tolist() == [2, 4, 4, 1, 2, 4, 3]


def test_logits_that_are_not_finite_end_a_request_where_they_are_met() -> None:
    logits = np.tile(9 * np.eye(VOCAB, dtype=np.float32)[[1, 2, 3, 4]], (4, 1, 1))
    logits[0, 0, 5], logits[1, 2, 5] = np.nan, np.inf
    # behind a rejected draft, and behind the count: not met
    logits[2, 2], logits[3, 2] = np.nan, np.nan
    drafts = jnp.array([[1, 2, 3], [1, 2, 3], [7, 2, 3], [1, 2, 3]])
    sampler, stops = make_sampler([GREEDY] * 4, 4), jnp.full((4, 1), -1)
    zeros = jnp.zeros(4, jnp.int32)
    a = run_accept(jnp.asarray(logits), drafts, jnp.array([4, 4, 4, 2]), sampler, zeros == 0, zeros, zeros + 99, stops)
    bad = NOT_FINITE
    assert a.token.tolist() == [[bad, N, N, N], [1, 2, bad, N], [1, N, N, N], [1, 2, N, N]]
    assert a.live.tolist() == [False, False, True, True]
    assert a.accepted.tolist() == [1, 3, 1, 2]


def test_penalties_count_the_drafts_before_a_row_and_what_was_emitted() -> None:
    # The target wants 1 again and again; what was seen twice is less wanted than 2, and what was seen thrice than 3.
    logits = jnp.tile(jnp.array([0, 5.0, 3.5, 2.5, 0, 0, 0, 0]), (2, 4, 1))
    sampler = make_sampler([SamplingParams(frequency_penalty=1.0)] * 2, 2)
    zeros, counts = jnp.zeros(2, jnp.int32), jnp.zeros((2, VOCAB), jnp.int32).at[1, 1].set(1)
    drafts = jnp.array([[1, 1, 2], [1, 1, 2]])
    a = run_accept(
        logits, drafts, zeros + 4, sampler, zeros == 0, zeros, zeros + 99, jnp.full((2, 1), -1), counts > 9, counts
    )
    # row 2 has seen 1 twice, with the one before this step row 1 has
    assert a.token.tolist() == [[1, 1, 2, 1], [1, 2, N, N]]
    assert a.counts is not None
    assert a.counts[:, :3].tolist() == [[0, 3, 1], [0, 2, 1]]
