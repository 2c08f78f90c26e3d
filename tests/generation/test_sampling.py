"""Sampling against numpy: the kept set, the frequencies, the penalties, and what a draw depends on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

from gdnjax.config import ConfigError
from gdnjax.generation.sampling import Sampler, SamplingParams, make_sampler, penalize, sample

VOCAB = 24
ROWS = 2048
LOGITS = np.random.default_rng(7).normal(size=VOCAB).astype(np.float32)

jit_sample = jax.jit(sample)


def reference(logits: np.ndarray, p: SamplingParams) -> np.ndarray:
    """The distribution of the next token: temperature, top-k, top-p, min-p, in Hugging Face's order."""
    order = np.argsort(-logits, kind="stable")
    scaled = logits[order].astype(np.float64) / p.temperature
    probs = np.exp(scaled - scaled.max())
    if p.top_k:
        probs[p.top_k :] = 0
    probs /= probs.sum()
    before = np.cumsum(probs) - probs
    probs[(before >= p.top_p) & (np.arange(len(probs)) > 0)] = 0
    probs[probs < p.min_p * probs[0]] = 0
    full = np.zeros(len(probs))
    full[order] = probs / probs.sum()
    return full


def draws(params: SamplingParams, logits: np.ndarray = LOGITS, candidates: int | None = 0) -> np.ndarray:
    """One token for each of `ROWS` rows that differ in their seeds; `candidates` None is what `params` needs.

    One shape, so that few programs are compiled: a short vocabulary is padded with what can't be drawn.
    """
    one = make_sampler([params], 1)
    arrays = {
        f.name: jnp.broadcast_to(getattr(one, f.name), ROWS)
        for f in dataclasses.fields(one)
        if isinstance(getattr(one, f.name), jax.Array)
    }
    arrays["seed"] = jnp.arange(ROWS, dtype=jnp.uint32)
    sampler = dataclasses.replace(one, **arrays, candidates=one.candidates if candidates is None else candidates)
    padded = np.pad(logits, (0, VOCAB - len(logits)), constant_values=-np.inf)
    tokens = jit_sample(jnp.tile(jnp.asarray(padded), (ROWS, 1)), sampler, jnp.zeros(ROWS, jnp.int32))
    return np.asarray(tokens)


def assert_frequencies(tokens: np.ndarray, expected: np.ndarray) -> None:
    """Nothing outside the support, and a chi-square that chance exceeds once in a million."""
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any(), f"tokens outside the kept set: {np.flatnonzero(counts * (expected == 0))}"
    kept = expected > 0
    wanted = expected[kept] * len(tokens)
    assert (wanted > 5).all(), "too rare a token for a chi-square"
    assert (counts[kept] > 0).all()
    statistic = ((counts[kept] - wanted) ** 2 / wanted).sum()
    bound = chi2.ppf(1 - 1e-6, max(1, kept.sum() - 1))
    assert statistic < bound, f"chi-square {statistic:.1f}, at most {bound:.1f}"


@pytest.mark.newest
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=9),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1.0, top_k=5),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.7),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.0, min_p=0.2),
        SamplingParams(temperature=1.3, top_k=7, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=7, min_p=0.3),
        SamplingParams(temperature=1.7, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.8, top_k=12, top_p=0.9, min_p=0.15),
    ],
    ids=lambda p: "-".join(f"{k}{v}" for k, v in dataclasses.asdict(p).items() if v not in (0, 1.0) or k[0] == "t"),
)
def test_frequencies(params: SamplingParams) -> None:
    assert_frequencies(draws(params, candidates=None), reference(LOGITS, params))


def test_top_p_counts_what_top_k_left() -> None:
    # 0.4, 0.3, 0.2, 0.1: of the first two's mass, 0.55 is reached by the first alone
    logits = np.log(np.array([0.2, 0.4, 0.1, 0.3], np.float32))
    assert set(draws(SamplingParams(temperature=1.0, top_k=2, top_p=0.55), logits)) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.55), logits)) == {1, 3}


def test_temperature_comes_before_top_p_and_min_p() -> None:
    logits = np.log(np.array([0.6, 0.4], np.float32))
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.55), logits)) == {0}
    assert set(draws(SamplingParams(temperature=100.0, top_p=0.55), logits)) == {0, 1}
    assert set(draws(SamplingParams(temperature=1.0, min_p=0.8), logits)) == {0}
    assert set(draws(SamplingParams(temperature=100.0, min_p=0.8), logits)) == {0, 1}


@functools.cache
def mixed() -> list[SamplingParams]:
    """Rows of every kind, greedy among them."""
    return [
        SamplingParams(temperature=1.0, seed=11),
        SamplingParams(seed=5),
        SamplingParams(temperature=0.7, top_k=3, seed=2**32 - 1),
        SamplingParams(temperature=1.5, top_p=0.6, seed=0),
        SamplingParams(temperature=1.1, min_p=0.4, seed=12),
        SamplingParams(temperature=2.0, top_k=20, top_p=0.95, min_p=0.01, seed=3),
    ]


def sequence(params: list[SamplingParams], logits: np.ndarray, count: int = 40) -> np.ndarray:
    """`count` draws of each row, `[rows, count]`."""
    sampler = make_sampler(params, len(params))
    rows = [jit_sample(jnp.asarray(logits), sampler, jnp.full(len(params), i, jnp.int32)) for i in range(count)]
    return np.stack([np.asarray(r) for r in rows], axis=1)


def test_draws_depend_on_the_seed_and_the_count_alone() -> None:
    params, logits = mixed(), np.random.default_rng(1).normal(size=(6, VOCAB)).astype(np.float32)
    all_rows = sequence(params, logits)
    np.testing.assert_array_equal(sequence(params, logits), all_rows)
    order = [3, 0, 5, 1, 4, 2]
    np.testing.assert_array_equal(sequence([params[i] for i in order], logits[order]), all_rows[order])
    for row in range(6):
        # alone, where `candidates` is another
        np.testing.assert_array_equal(sequence(params[row : row + 1], logits[row : row + 1]), all_rows[row : row + 1])
    np.testing.assert_array_equal(all_rows[1], np.full(40, logits[1].argmax()))
    assert all(len(set(all_rows[row])) > 1 for row in (0, 2, 3, 4, 5))


def test_another_seed_and_another_count_draw_differently() -> None:
    logits = np.tile(LOGITS, (2, 1))
    first, second = sequence([SamplingParams(temperature=1.0, seed=s) for s in (0, 1)], logits, 200)
    # independent draws agree in sum(p^2) of the places
    p = reference(LOGITS, SamplingParams(temperature=1.0))
    agree = (p**2).sum()
    spread = 5 * np.sqrt(agree * (1 - agree) / 200)
    assert abs(np.mean(first == second) - agree) < spread
    assert abs(np.mean(first[1:] == first[:-1]) - agree) < spread


def test_frequencies_over_the_draws_of_one_seed() -> None:
    sampler = make_sampler([SamplingParams(temperature=1.0, top_k=8, seed=9)] * ROWS, ROWS)
    logits = jnp.tile(jnp.asarray(LOGITS), (ROWS, 1))
    tokens = np.asarray(jit_sample(logits, sampler, jnp.arange(ROWS, dtype=jnp.int32)))
    assert_frequencies(tokens, reference(LOGITS, SamplingParams(temperature=1.0, top_k=8)))


@pytest.mark.parametrize("params", [SamplingParams(temperature=1.0, top_k=3), SamplingParams(temperature=0.9, top_k=7)])
def test_draws_do_not_depend_on_the_number_of_candidates(params: SamplingParams) -> None:
    chosen = draws(params, candidates=None)
    for candidates in (8, 64, 0):
        np.testing.assert_array_equal(draws(params, candidates=candidates), chosen)


def test_candidates_is_a_power_of_two_and_enough() -> None:
    def candidates(*top_k: int, temperature: float = 1.0) -> int:
        return make_sampler([SamplingParams(temperature=temperature, top_k=k) for k in top_k], 4).candidates

    assert [candidates(k) for k in (1, 2, 3, 20, 64, 65)] == [1, 2, 4, 32, 64, 128]
    assert candidates(3, 50) == 64
    assert candidates(3, 0) == 0
    # a greedy row needs none
    assert make_sampler([SamplingParams(top_k=0), SamplingParams(temperature=1.0, top_k=4)], 2).candidates == 4
    assert candidates(5, 0, temperature=0.0) == 0
    assert make_sampler([SamplingParams(top_k=5)], 2).greedy
    assert not make_sampler([SamplingParams(), SamplingParams(temperature=0.1)], 2).greedy


def test_equal_logits_take_the_lowest_id() -> None:
    logits = np.array([0.0, 3.0, 1.0, 3.0, 3.0, 2.0], np.float32)
    assert set(draws(SamplingParams(), logits)) == {1}
    # top-k cuts between equals by id
    assert set(draws(SamplingParams(temperature=1.0, top_k=1), logits)) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_k=2), logits)) == {1, 3}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.2), logits)) == {1}
    # all equal: uniform
    equal = np.zeros(8, np.float32)
    assert_frequencies(draws(SamplingParams(temperature=1.0), equal), np.pad(np.full(8, 1 / 8), (0, VOCAB - 8)))
    # half of the mass is exactly four of them
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.5), equal)) == {0, 1, 2, 3}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-30, 1e-44, 1e-300])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert set(draws(SamplingParams(temperature=temperature))) == {LOGITS.argmax()}
    large = np.array([-3e38, 1e30, 1.1e30, 0.0], np.float32)
    assert set(draws(SamplingParams(temperature=temperature), large)) == {2}


def test_a_huge_temperature_is_uniform() -> None:
    assert_frequencies(draws(SamplingParams(temperature=1e30)), np.full(VOCAB, 1 / VOCAB))


@pytest.mark.parametrize("top_k", [VOCAB, 2**31 - 1])
def test_top_k_of_the_whole_vocabulary_and_more(top_k: int) -> None:
    np.testing.assert_array_equal(
        draws(SamplingParams(temperature=1.0, top_k=top_k), candidates=None), draws(SamplingParams(temperature=1.0))
    )


def test_a_masked_token_is_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[::2] = -np.inf
    assert not set(draws(SamplingParams(temperature=5.0), logits)) & set(range(0, VOCAB, 2))


def test_greedy_is_argmax() -> None:
    logits = np.random.default_rng(3).normal(size=(64, VOCAB)).astype(np.float32)
    sampler = make_sampler([SamplingParams(seed=s) for s in range(64)], 64)
    chosen = sample(jnp.asarray(logits), sampler, jnp.zeros(64, jnp.int32))
    assert chosen.dtype == jnp.int32
    np.testing.assert_array_equal(chosen, logits.argmax(-1))


@given(
    temperature=st.floats(0.05, 5), top_k=st.integers(0, 12), top_p=st.floats(0.01, 1), min_p=st.floats(0, 0.95),
    seed=st.integers(0, 2**32 - 1), scale=st.floats(0.1, 20),
)  # fmt: skip
def test_support(temperature: float, top_k: int, top_p: float, min_p: float, seed: int, scale: float) -> None:
    logits = np.random.default_rng(seed).normal(scale=scale, size=12).astype(np.float32)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    tokens = set(draws(params, logits).tolist())
    # rounding may decide at the very edge of top-p and min-p
    wider = dataclasses.replace(params, top_p=min(1.0, top_p + 1e-4), min_p=max(0.0, min_p - 1e-4))
    assert tokens <= set(np.flatnonzero(reference(logits, wider)).tolist())
    narrower = dataclasses.replace(params, top_p=max(1e-6, top_p - 1e-4), min_p=min(0.99, min_p + 1e-4))
    likely = reference(logits, narrower) > 0.01  # missed by all 2,048 rows with a chance of 1e-9
    assert set(np.flatnonzero(likely).tolist()) <= tokens


# Penalties


def penalized(params: SamplingParams, logits: np.ndarray, prompt: list[int], output: list[int]) -> np.ndarray:
    """`penalize` for one row that has this prompt and this output."""
    vocab = len(logits)
    in_prompt, counts = np.zeros((1, vocab), bool), np.zeros((1, vocab), np.int32)
    in_prompt[0, prompt] = True
    np.add.at(counts[0], output, 1)
    sampler = make_sampler([params], 1)
    return np.asarray(penalize(jnp.asarray(logits)[None], sampler, jnp.asarray(in_prompt), jnp.asarray(counts)))[0]


def test_repetition_penalty_covers_prompt_and_output() -> None:
    logits = np.array([2.0, -2.0, 3.0, -3.0, 1.0, -1.0, 0.0], np.float32)
    got = penalized(SamplingParams(repetition_penalty=1.25), logits, prompt=[0, 1, 6, 0], output=[2, 3, 3])
    np.testing.assert_allclose(got, [1.6, -2.5, 2.4, -3.75, 1.0, -1.0, 0.0], rtol=1e-6)
    # below 1 it favours what was seen
    got = penalized(SamplingParams(repetition_penalty=0.5), logits, prompt=[0, 1], output=[])
    np.testing.assert_allclose(got, [4.0, -1.0, 3.0, -3.0, 1.0, -1.0, 0.0], rtol=1e-6)


def test_presence_and_frequency_penalties_cover_the_output_alone() -> None:
    logits = np.array([2.0, -2.0, 3.0, -3.0], np.float32)
    got = penalized(SamplingParams(presence_penalty=0.5), logits, prompt=[0, 0, 1], output=[2, 3, 3])
    np.testing.assert_allclose(got, [2.0, -2.0, 2.5, -3.5])
    got = penalized(SamplingParams(frequency_penalty=0.5), logits, prompt=[0, 0, 1], output=[2, 3, 3])
    np.testing.assert_allclose(got, [2.0, -2.0, 2.5, -4.0])
    got = penalized(SamplingParams(frequency_penalty=-1.0, presence_penalty=-2.0), logits, prompt=[], output=[3, 3])
    np.testing.assert_allclose(got, [2.0, -2.0, 3.0, 1.0])


def test_all_penalties_together() -> None:
    logits = np.array([2.0, -2.0, 3.0, -3.0], np.float32)
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    got = penalized(params, logits, prompt=[0, 1], output=[1, 2, 2])
    np.testing.assert_allclose(got, [1.0, -4.0 - 0.25 - 0.5, 1.5 - 0.25 - 1.0, -3.0])


def test_penalties_of_one_row_leave_the_others() -> None:
    logits = np.tile(np.array([2.0, -2.0, 3.0], np.float32), (3, 1))
    sampler = make_sampler([SamplingParams(), SamplingParams(repetition_penalty=2.0)], 3)
    assert sampler.penalized
    everything = jnp.ones((3, 3), bool), jnp.ones((3, 3), jnp.int32)
    got = np.asarray(penalize(jnp.asarray(logits), sampler, *everything))
    np.testing.assert_array_equal(got[[0, 2]], logits[[0, 2]])
    np.testing.assert_array_equal(got[1], [1.0, -4.0, 1.5])


# Refusals


@pytest.mark.parametrize(
    ("key", "value", "takes"),
    [
        ("temperature", -0.1, "a number >= 0"),
        ("temperature", float("nan"), "a finite number"),
        ("temperature", float("inf"), "a finite number"),
        ("temperature", "hot", "a finite number"),
        ("top_k", -1, "an integer >= 0"),
        ("top_k", 1.5, "an integer"),
        ("top_k", True, "an integer"),
        ("top_k", 2**31, "an integer"),
        ("top_p", 0.0, r"a number in \(0, 1\]"),
        ("top_p", 1.01, r"a number in \(0, 1\]"),
        ("min_p", -0.1, r"a number in \[0, 1\)"),
        ("min_p", 1.0, r"a number in \[0, 1\)"),
        ("repetition_penalty", 0.0, "a number > 0"),
        ("repetition_penalty", 1e-31, "a number from 1e-30 to 1e30"),
        ("repetition_penalty", 1e31, "a number from 1e-30 to 1e30"),
        ("temperature", 1e31, "a number up to 1e30"),
        ("presence_penalty", -1e31, "a number up to 1e30"),
        ("frequency_penalty", 1e300, "a number up to 1e30"),
        ("repetition_penalty", float("nan"), "a finite number"),
        ("presence_penalty", float("inf"), "a finite number"),
        ("frequency_penalty", None, "a finite number"),
        ("seed", -1, "an integer from 0 to 2\\^32 - 1"),
        ("seed", 2**32, "an integer from 0 to 2\\^32 - 1"),
        ("seed", 0.5, "an integer"),
    ],
)
def test_refusals(key: str, value: Any, takes: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key} = .*; it takes {takes}") as error:
        SamplingParams(**{key: value})
    assert f"{key} = {value!r};" in str(error.value)


@pytest.mark.parametrize("key", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_every_penalty_switches_penalties_on(key: str) -> None:
    assert SamplingParams(**{key: 1.5}).penalized
    assert not SamplingParams(temperature=1.0, top_k=3).penalized
    # a sampler with one such row tracks tokens
    made: Sampler = make_sampler([SamplingParams(), SamplingParams(**{key: 1.5})], 2)
    assert made.penalized
