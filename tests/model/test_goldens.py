"""The whole model against what Hugging Face computed for the same random weights."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdnjax.state import conv_window, recurrent_state
from gdnjax.weights.packing import pack
from tests.helpers import (
    KV,
    LAYOUTS,
    LOGITS,
    STATES,
    Server,
    assert_close,
    assert_states,
    golden_arrays,
    jit_forward,
    jit_forward_with_intermediates,
    load_golden,
)

MODELS = ("dense_tied", "dense_gva")
PAGE_SIZES = (1, 16, 64)
# One shape for everything that fits, so that few programs are compiled.
ROWS = 96
LONG_ROWS = 208


def server(name: str, layout: str = "in_place", page_size: int = 16, packed: bool = False) -> Server:
    config, params = load_golden(name)
    weights = pack(params, config) if packed else params
    return Server(config.replace(state_layout=layout, page_size=page_size), weights)


def assert_greedy(logits: np.ndarray, golden: dict[str, np.ndarray], row: int = 0, prefix: str = "") -> None:
    """The same choices wherever the gap allows to tell; all gaps of these files do."""
    ids = golden[f"{prefix}greedy_ids"][row]
    chosen = golden["greedy_logits"][row] if not prefix else logits
    top = np.sort(chosen, axis=-1)
    gap = top[:, -1] - top[:, -2]
    assert (gap > LOGITS).all(), "a gap within the tolerance: compare only up to there"
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), ids)


# Whole sequences


@pytest.mark.newest
@pytest.mark.parametrize("packed", [False, True], ids=["unpacked", "packed"])
@pytest.mark.parametrize("name", MODELS)
def test_forward(name: str, packed: bool) -> None:
    config, params = load_golden(name)
    golden = golden_arrays(name)
    weights = pack(params, config) if packed else params
    logits, seen = jit_forward_with_intermediates(weights, config, golden["input_ids"])
    assert logits.dtype == jnp.float32
    assert_close(logits, golden["logits"], LOGITS, "logits")
    assert_close(logits, golden["logits_f64"], LOGITS, "logits against float64")

    assert len(seen.hidden_states) == len(golden["hidden_states"]) == config.num_hidden_layers + 1
    for layer, (hidden, expected) in enumerate(zip(seen.hidden_states, golden["hidden_states"], strict=True)):
        assert_close(hidden[0], expected, LOGITS, f"hidden state {layer}")
    for index, layer in enumerate(config.gdn_layers):
        golden_state = golden[f"prefill_rec_state_{layer}"].swapaxes(-1, -2)
        assert_close(seen.recurrent[index], golden_state, STATES, f"state {layer}")
    for index, layer in enumerate(config.attention_layers):
        assert_close(seen.keys[index].swapaxes(1, 2), golden[f"prefill_k_{layer}"], KV, "keys")
        assert_close(seen.values[index].swapaxes(1, 2), golden[f"prefill_v_{layer}"], KV, "values")


def test_forward_returns_the_same_logits_without_intermediates() -> None:
    config, params = load_golden("dense_gva")
    golden = golden_arrays("dense_gva")
    assert_close(jit_forward(params, config, golden["input_ids"]), golden["logits_f64"], LOGITS)


# Prefill and decode

STATEFUL = [("dense_gva", layout, page_size, False) for layout in LAYOUTS for page_size in PAGE_SIZES]
STATEFUL += [("dense_gva", "twin", 16, True)]
STATEFUL += [("dense_tied", "in_place", 16, False), ("dense_tied", "twin", 64, True)]
NEWEST = [("dense_gva", "twin", 16, False), ("dense_tied", "in_place", 16, False)]


@pytest.mark.parametrize(
    ("name", "layout", "page_size", "packed"),
    [pytest.param(*case, marks=pytest.mark.newest if case in NEWEST else ()) for case in STATEFUL],
)
def test_prefill_and_decode(name: str, layout: str, page_size: int, packed: bool) -> None:
    golden = golden_arrays(name)
    ids = golden["input_ids"][0]

    # all tokens at once, in request 1
    run = server(name, layout, page_size, packed)
    logits = run.prefill_all({1: ids}, ROWS)[1]
    assert_close(logits, golden["logits"][0], LOGITS, "prefill logits")
    assert_close(logits, golden["logits_f64"][0], LOGITS, "prefill logits against float64")
    assert_states(run.state, 1, golden, "prefill_")

    # then greedy tokens
    logits = run.greedy({1: logits[-1]}, golden["greedy_ids"].shape[1])[1]
    assert_close(logits, golden["greedy_logits"][0], LOGITS, "greedy logits")
    assert_greedy(logits, golden)
    assert_states(run.state, 1, golden, "final_")

    # a part of the tokens at once and the others one at a time, in request 2 of the same state
    start = int(golden["prefill_len"])
    decoded = [run.prefill_all({2: ids[:start]}, ROWS)[2][-1]]
    decoded += [run.decode({2: int(token)})[2] for token in ids[start:]]
    assert_close(np.stack(decoded), golden["decode_logits"][0], LOGITS, "decode logits")
    assert_close(np.stack(decoded), golden["logits_f64"][0, start - 1 :], LOGITS, "decode logits against float64")
    assert_states(run.state, 2, golden, "prefill_")


LENGTHS = (1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200)


def test_all_golden_lengths_are_tested() -> None:
    assert tuple(golden_arrays("dense_gva", "lengths")["lengths"]) == LENGTHS


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, layout: str) -> None:
    golden = golden_arrays("dense_gva", "lengths")
    ids = golden["input_ids"][0, :length]
    run = server("dense_gva", layout)
    # 208 rows whatever the length: most of them are padding, which must not reach any state
    logits = run.prefill({3: ids}, LONG_ROWS)[3]
    assert_close(logits, golden[f"L{length}_logits_last"][0], LOGITS, "logits")
    assert_states(run.state, 3, golden, f"L{length}_")


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_prompts_shorter_than_the_convolution(length: int) -> None:
    config, params = load_golden("dense_gva")
    ids = golden_arrays("dense_gva", "lengths")["input_ids"][0]
    full = np.asarray(jit_forward(params, config, ids[None, :9]))[0]
    run = server("dense_gva")
    found = [run.prefill_all({0: ids[:length]}, ROWS)[0][-1]] + [
        run.decode({0: int(i)})[0] for i in ids[length : length + 5]
    ]
    assert_close(np.stack(found), full[length - 1 : length + 5], LOGITS)


GOLDEN_PIECES = [(64, 64, 72), (1, 199), (3, 2, 195), (100, 100), (65, 1, 134)]
OTHER_PIECES = [(37, 64, 99), (1,) * 200]


def pieces_id(pieces: tuple[int, ...]) -> str:
    return "token_by_token" if set(pieces) == {1} else "_".join(map(str, pieces))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pieces", GOLDEN_PIECES + OTHER_PIECES, ids=pieces_id)
def test_prefill_in_windows(pieces: tuple[int, ...], layout: str) -> None:
    golden = golden_arrays("dense_gva", "chunked_prefill")
    run = server("dense_gva", layout)
    start = 0
    for size in pieces:
        logits = run.prefill({2: golden["input_ids"][0, start : start + size]}, LONG_ROWS)[2]
        start += size
    assert_close(logits, golden["logits_last"][0], LOGITS, "logits")
    name = f"pieces_{pieces_id(pieces)}_logits_last"
    assert (name in golden) == (pieces in GOLDEN_PIECES)
    if name in golden:
        assert_close(logits, golden[name][0], LOGITS, "logits against the same pieces")
    assert_states(run.state, 2, golden, "")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_of_a_long_prompt(layout: str) -> None:
    golden = golden_arrays("dense_gva", "chunked_prefill")
    run = server("dense_gva", layout)
    for token in golden["input_ids"][0]:
        logits = run.decode({2: int(token)})[2]
    assert_close(logits, golden["logits_last"][0], LOGITS, "logits")
    assert_states(run.state, 2, golden, "")


# Several requests together


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch(layout: str, page_size: int) -> None:
    golden = golden_arrays("dense_gva", "batch_left_pad")
    mask = golden["attention_mask"] == 1
    # request 3 comes first, request 1 stays empty
    prompts = {request: golden["input_ids"][i][mask[i]] for i, request in enumerate((3, 0, 2))}
    run = server("dense_gva", layout, page_size)
    logits = run.prefill_all(prompts, ROWS)
    for i, request in enumerate(prompts):
        np.testing.assert_array_equal(prompts[request], golden[f"alone{i}_input_ids"][0])
        assert_close(logits[request], golden["logits"][i][mask[i]], LOGITS, f"prompt {i} in a batch")
        assert_close(logits[request], golden[f"alone{i}_logits"][0], LOGITS, f"prompt {i} alone")
        assert_states(run.state, request, golden, "", row=i)
        assert_states(run.state, request, golden, f"alone{i}_")

    greedy = run.greedy({request: logits[request][-1] for request in prompts}, golden["greedy_ids"].shape[1])
    for i, request in enumerate(prompts):
        assert_close(greedy[request], golden["greedy_logits"][i], LOGITS, f"greedy logits of prompt {i}")
        assert_greedy(greedy[request], golden, row=i)
        assert_greedy(greedy[request], golden, prefix=f"alone{i}_")


@st.composite
def packed_calls(draw: st.DrawFn) -> list[dict[int, int]]:
    """Windows of the three prompts (5, 17 and 70 tokens), some of them in the same call."""
    left, calls = {0: 5, 1: 17, 2: 70}, []
    while any(left.values()):
        open_requests = [r for r in left if left[r]]
        chosen = draw(st.lists(st.sampled_from(open_requests), min_size=1, unique=True))
        call, room = {}, ROWS
        for r in chosen:
            if room:
                call[r] = draw(st.integers(1, min(left[r], room)))
                room -= call[r]
                left[r] -= call[r]
        calls.append(call)
    return calls


@settings(max_examples=15)
@given(calls=packed_calls())
def test_any_packing_gives_the_same_states(calls: list[dict[int, int]]) -> None:
    golden = golden_arrays("dense_gva", "batch_left_pad")
    prompts = [golden[f"alone{i}_input_ids"][0] for i in range(3)]
    run = server("dense_gva")
    start, last = [0, 0, 0], {}
    for call in calls:
        windows = {r: prompts[r][start[r] : start[r] + size] for r, size in call.items()}
        last |= run.prefill_all(windows, ROWS)
        for r, size in call.items():
            start[r] += size
    for i in range(3):
        assert_close(last[i][-1], golden[f"alone{i}_logits"][0, -1], LOGITS, f"prompt {i}")
        assert_states(run.state, i, golden, f"alone{i}_")


# bfloat16


def assert_bf16_error(ours: np.ndarray, theirs: np.ndarray, truth: np.ndarray, what: str) -> None:
    """At most 1.5 times Hugging Face's error on the same positions, in the mean and the 99th percentile."""
    our_error, their_error = np.abs(ours - truth), np.abs(theirs - truth)
    for name, measure in (("mean", np.mean), ("99th percentile", lambda x: np.percentile(x, 99))):
        found, reference = float(measure(our_error)), float(measure(their_error))
        print(f"bfloat16 {what}: {name} error {found:.4f}, Hugging Face {reference:.4f}")
        assert found <= 1.5 * reference, f"{what}: {name} of the error {found:.4f}, Hugging Face has {reference:.4f}"


def test_bfloat16_is_as_exact_as_hugging_face() -> None:
    config, params = load_golden("dense_gva", "bfloat16")
    golden, golden32 = golden_arrays("dense_gva", "bf16"), golden_arrays("dense_gva")
    ids, truth = golden["input_ids"], golden32["logits_f64"][0]
    np.testing.assert_array_equal(ids, golden32["input_ids"])

    logits = np.asarray(jit_forward(params, config, ids))[0]
    assert_bf16_error(logits, golden["logits"][0], truth, "forward")

    run = Server(config, params)
    assert_bf16_error(run.prefill_all({1: ids[0]}, ROWS)[1], golden["logits"][0], truth, "prefill")
    for index, layer in enumerate(config.gdn_layers):
        found, theirs = recurrent_state(run.state, index, 1), golden[f"prefill_rec_state_{layer}"][0].swapaxes(1, 2)
        assert found.dtype == jnp.float32
        exact = golden32[f"prefill_rec_state_{layer}"][0].swapaxes(1, 2)
        assert_bf16_error(np.asarray(found), theirs, exact, f"recurrent state of layer {layer}")
        window = conv_window(run.state, index, 1)
        assert window.dtype == jnp.bfloat16
        theirs, exact = (file[f"prefill_conv_state_{layer}"][0] for file in (golden, golden32))
        assert_bf16_error(np.asarray(window, np.float32), theirs, exact, f"conv window of layer {layer}")

    start = int(golden32["prefill_len"])
    decoded = [run.prefill_all({2: ids[0, :start]}, ROWS)[2][-1]] + [run.decode({2: int(i)})[2] for i in ids[0, start:]]
    assert_bf16_error(np.stack(decoded), golden["decode_logits"][0], truth[start - 1 :], "decode")


def test_bfloat16_chooses_otherwise_only_near_ties() -> None:
    config, params = load_golden("dense_gva", "bfloat16")
    config32, params32 = load_golden("dense_gva")
    golden, golden32 = golden_arrays("dense_gva", "bf16"), golden_arrays("dense_gva")
    ids = np.concatenate([golden["input_ids"], golden["f32_greedy_ids"]], axis=1)
    gap = golden["f32_teacher_forced_gap"][0]
    exact = np.asarray(jit_forward(params32, config32, ids))[0]
    top = np.sort(exact, axis=-1)
    assert_close(top[:, -1] - top[:, -2], gap, 2 * LOGITS, "gaps")
    exact = np.argmax(exact, axis=-1)

    # A tie is what the logits of Hugging Face's own run cannot tell apart: 1 % of them are off by more.
    tie = np.percentile(np.abs(golden["logits"][0] - golden32["logits_f64"][0]), 99)
    theirs = golden["bf16_teacher_forced_argmax"][0]

    whole = np.argmax(np.asarray(jit_forward(params, config, ids))[0], axis=-1)
    run = Server(config, params)
    start = golden["input_ids"].shape[1]
    walked = list(np.argmax(run.prefill_all({0: ids[0, :start]}, ROWS)[0], axis=-1))
    walked += [np.argmax(run.decode({0: int(i)})[0]) for i in ids[0, start:]]
    walked = np.array(walked)
    pairs = {
        "forward, float32": (whole, exact),
        "prefill and decode, float32": (walked, exact),
        "prefill and decode, forward": (walked, whole),
        "Hugging Face, float32": (theirs, exact),
    }
    for what, (one, other) in pairs.items():
        differs = one != other
        print(f"{what}: {differs.sum()} of {differs.size} choices differ, at float32 gaps {np.sort(gap[differs])}")
        assert gap[differs].max(initial=0.0) <= tie, what
        assert differs.mean() <= 0.1, what
