"""Golden files, the jitted functions that tests share, and comparisons against stated tolerances."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import safe_open

from gdnjax.config import Config, from_directory
from gdnjax.model import decode_step, forward, forward_with_intermediates, prefill
from gdnjax.state import Batch, State, cached_kv, commit, conv_window, init_state, prefill_batch, recurrent_state
from gdnjax.weights.declaration import Params, abstract_params, from_tensor_names, tensor_names
from pallas_kernels.columns import Columns, split

GOLDENS = Path(__file__).resolve().parent / "goldens"

# Absolute, from what Hugging Face's own paths differ by among each other (goldens/README.md).
LOGITS = 5e-4
STATES = 1e-4
KV = 2e-4
DELTA_OUT = 2e-6
DELTA_STATE = 5e-6
DELTA_EXTREME = 5e-5

LAYOUTS = ("in_place", "twin")

# Shared, so that one process compiles each shape once.
jit_forward = jax.jit(forward, static_argnames="config")
jit_forward_with_intermediates = jax.jit(forward_with_intermediates, static_argnames="config")
jit_prefill = jax.jit(prefill, donate_argnames="state")
jit_decode_step = jax.jit(decode_step, donate_argnames="state")
jit_commit = jax.jit(commit, donate_argnames="state")


def difference(actual: Any, desired: Any) -> float:
    """Largest absolute difference in float64; NaN anywhere is infinite."""
    a, d = np.asarray(actual, np.float64), np.asarray(desired, np.float64)
    assert a.shape == d.shape, f"shapes {a.shape} and {d.shape}"
    return float(np.nan_to_num(np.abs(a - d), nan=np.inf).max(initial=0.0))


def assert_close(actual: Any, desired: Any, tolerance: float, what: str = "") -> None:
    """Fails unless every element is within `tolerance`, absolutely."""
    found = difference(actual, desired)
    assert found <= tolerance, f"{what}: off by {found:.3g}, at most {tolerance:.3g} allowed"


def assert_same_bits(actual: Any, desired: Any, what: str = "") -> None:
    """Fails unless both arrays hold the same bytes (NaNs and signs of zero included)."""
    a, d = np.asarray(actual), np.asarray(desired)
    assert a.dtype == d.dtype and a.shape == d.shape, f"{what}: {a.dtype}{a.shape} and {d.dtype}{d.shape}"
    assert a.tobytes() == d.tobytes(), f"{what}: bytes differ"


def assert_rounded_once(actual: Any, exact: Any, tolerance: float, what: str = "") -> None:
    """Fails unless bfloat16 `actual` is float32 `exact` rounded: half a step, and `tolerance` for `exact` itself."""
    assert actual.dtype == jnp.bfloat16 and exact.dtype == jnp.float32
    off = np.abs(np.asarray(actual, np.float64) - np.asarray(exact, np.float64))
    allowed = 2.0**-8 * np.abs(np.asarray(exact, np.float64)) + tolerance
    assert (off <= allowed).all(), f"{what}: off by {off.max():.3g}"


def host_copy(tree: Any) -> Any:
    """The arrays of a pytree as numpy arrays of their own, which outlive a donation."""
    return jax.tree.map(lambda leaf: np.array(leaf), tree)


# Goldens


@functools.cache
def golden_arrays(name: str, file: str = "golden") -> Mapping[str, np.ndarray]:
    """All arrays of `goldens/NAME/FILE.npz`; integers as int32, as tokens are."""
    with np.load(GOLDENS / name / f"{file}.npz") as arrays:
        return {k: arrays[k].astype(np.int32) if arrays[k].dtype == np.int64 else arrays[k] for k in arrays.files}


@functools.cache
def components() -> Mapping[str, np.ndarray]:
    """All arrays of `goldens/components.npz`."""
    with np.load(GOLDENS / "components.npz") as arrays:
        return {k: arrays[k] for k in arrays.files}


@functools.cache
def load_golden(name: str, dtype: str = "float32") -> tuple[Config, Params]:
    """Config and weights of a golden model: projections in `dtype`, what is declared float32 in float32."""
    config = from_directory(GOLDENS / name, dtype=dtype, max_length=256, max_requests=4)
    with safe_open(GOLDENS / name / "model.safetensors", framework="flax") as file:
        stored = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    declared = tensor_names(abstract_params(config))
    tensors = {key.replace("model.language_model.", "model."): value for key, value in stored.items()}
    assert tensors.keys() == declared.keys()
    tensors = {key: value.astype(declared[key].dtype) for key, value in tensors.items()}
    return config, from_tensor_names(config, tensors)


# Driving a state


class Server:
    """One state and the steps over it, by request number. `logits` come back by request number too."""

    def __init__(self, config: Config, params: Params, lengths: Sequence[int] | None = None):
        self.config, self.params = config, params
        self.state: State = init_state(config, lengths)

    def prefill(self, pieces: Mapping[int, Sequence[int]], rows: int) -> dict[int, np.ndarray]:
        batch = prefill_batch(self.config, {r: [int(i) for i in ids] for r, ids in pieces.items()}, rows)
        logits, self.state = jit_prefill(self.params, self.state, batch)
        logits = np.asarray(logits)
        return {r: logits[r] for r in pieces}

    def prefill_all(self, pieces: Mapping[int, Sequence[int]], rows: int) -> dict[int, np.ndarray]:
        """Logits of every token, `[tokens, V]` a request."""
        batch = prefill_batch(self.config, {r: [int(i) for i in ids] for r, ids in pieces.items()}, rows)
        logits, self.state = jit_prefill(self.params, self.state, Batch(batch.tokens, batch.request))
        logits, request = np.asarray(logits), np.asarray(batch.request)
        return {r: logits[request == r] for r in pieces}

    def decode(self, tokens: Mapping[int, int], rows: int = 4) -> dict[int, np.ndarray]:
        """One token for each request, committed; the first rows are padding."""
        logits, self.state = jit_decode_step(self.params, self.state, decode_batch(tokens, rows))
        self.state = jit_commit(self.state)
        logits = np.asarray(logits)
        return {r: logits[rows - len(tokens) + i] for i, r in enumerate(tokens)}

    def greedy(self, first: Mapping[int, np.ndarray], count: int, rows: int = 4) -> dict[int, np.ndarray]:
        """`count` greedy tokens of each request, all of them fed: the logits that chose them, `[count, V]`."""
        chosen, latest = {r: [] for r in first}, dict(first)
        for _ in range(count):
            for r, logits in latest.items():
                chosen[r].append(logits)
            latest = self.decode({r: int(np.argmax(logits)) for r, logits in latest.items()}, rows)
        return {r: np.stack(all_logits) for r, all_logits in chosen.items()}


def decode_batch(tokens: Mapping[int, int], rows: int) -> Batch:
    """A batch of one token a request, behind rows of padding."""
    ids, request = np.full(rows, 1, np.int32), np.full(rows, -1, np.int32)
    ids[rows - len(tokens) :] = list(tokens.values())
    request[rows - len(tokens) :] = list(tokens)
    return Batch(jnp.asarray(ids), jnp.asarray(request))


def assert_states(state: State, request: int, arrays: Mapping[str, np.ndarray], prefix: str, row: int = 0) -> None:
    """A request's conv windows, recurrent states and cached keys and values against golden arrays.

    `row` is the golden arrays' batch row; arrays that the file lacks (keys and values, mostly) are left out.
    """
    for index, layer in enumerate(state.config.gdn_layers):
        found = recurrent_state(state, index, request)
        assert found.dtype == jnp.float32
        # Hugging Face keeps keys before values
        golden = arrays[f"{prefix}rec_state_{layer}"][row].transpose(0, 2, 1)
        assert_close(found, golden, STATES, f"recurrent state of layer {layer}")
        window = conv_window(state, index, request)
        assert_close(window, arrays[f"{prefix}conv_state_{layer}"][row], STATES, f"conv window of layer {layer}")
    for index, layer in enumerate(state.config.attention_layers):
        if f"{prefix}k_{layer}" in arrays:
            keys, values = cached_kv(state, index, request)
            assert_close(keys, arrays[f"{prefix}k_{layer}"][row].transpose(1, 0, 2), KV, f"keys of layer {layer}")
            assert_close(values, arrays[f"{prefix}v_{layer}"][row].transpose(1, 0, 2), KV, f"values of layer {layer}")


# The delta rule in float64


def gated_delta_float64(q, k, v, g, beta, initial_state=None):
    """The rule token by token in float64, written apart from the code under test.

    q, k `[b, t, Hk, dk]` raw, v `[b, t, Hv, dv]`, g and beta `[b, t, Hv]`, state `[b, Hv, dv, dk]` -> all
    outputs `[b, t, Hv, dv]` and the state after every token `[b, t, Hv, dv, dk]`.
    """
    q, k, v, g, beta = (np.asarray(x, np.float64) for x in (q, k, v, g, beta))
    repeats, dk = v.shape[2] // k.shape[2], k.shape[3]
    q = q / np.sqrt((q**2).sum(-1, keepdims=True) + 1e-6) / np.sqrt(dk)
    k = k / np.sqrt((k**2).sum(-1, keepdims=True) + 1e-6)
    q, k = q.repeat(repeats, axis=2), k.repeat(repeats, axis=2)
    shape = (v.shape[0], v.shape[2], v.shape[3], dk)
    state = np.zeros(shape) if initial_state is None else np.asarray(initial_state, np.float64)
    outputs, states = [], []
    for t in range(v.shape[1]):
        state = np.exp(g[:, t])[..., None, None] * state
        memory = np.einsum("bhvk,bhk->bhv", state, k[:, t])
        write = beta[:, t, :, None] * (v[:, t] - memory)
        state = state + np.einsum("bhv,bhk->bhvk", write, k[:, t])
        outputs.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        states.append(state)
    return np.stack(outputs, 1), np.stack(states, 1)


def raw_gates(g: np.ndarray, beta: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Projections a, b and weights A_log, dt_bias from which `gates` makes g and beta (to float32 rounding)."""
    g, beta = np.asarray(g, np.float64), np.asarray(beta, np.float64)
    with np.errstate(divide="ignore"):
        # softplus^-1(-g) and logit(beta); ends of the ranges map to infinities, which `gates` maps back.
        a = np.where(g < -30, -g, np.log(np.expm1(np.minimum(-g, 700.0))))
        b = np.log(beta) - np.log1p(-beta)
    heads = np.zeros(g.shape[-1], np.float32)
    return a.astype(np.float32), b.astype(np.float32), heads, heads


def rule_inputs(q: Any, k: Any, v: Any, a: Any, b: Any) -> tuple[jax.Array, Columns, Columns]:
    """What the rule takes of q, k `[R, Hk, dk]`, v `[R, Hv, dv]` and a, b `[R, Hv]`: rows with all q, all k, all v,
    and a and b as columns of packed rows."""
    rows = v.shape[0]
    b, a = columns_of(b, a)
    return jnp.concatenate([jnp.reshape(x, (rows, -1)) for x in (q, k, v)], axis=1), a, b


def columns_of(*arrays: Any) -> list[Columns]:
    """Arrays `[R, ...]` of one dtype as columns of packed rows, among columns of NaN."""
    arrays = tuple(jnp.asarray(array) for array in arrays)
    other = jnp.full((*arrays[0].shape[:-1], 3), jnp.nan, arrays[0].dtype)
    joined = [other, *(part for array in arrays for part in (array, other))]
    packed = jnp.concatenate(joined, axis=-1)
    return split(packed, [part.shape[-1] for part in joined])[1::2]


def random_delta_inputs(seed: int, batch: int, length: int, key_heads: int, ratio: int, dk: int, dv: int) -> dict:
    """q, k, v, g, beta as numpy float32: ordinary gates, `ratio` value heads a key head."""
    rng = np.random.default_rng(seed)
    heads = key_heads * ratio
    return {
        "q": rng.normal(size=(batch, length, key_heads, dk)).astype(np.float32),
        "k": rng.normal(size=(batch, length, key_heads, dk)).astype(np.float32),
        "v": rng.normal(size=(batch, length, heads, dv)).astype(np.float32),
        "g": -rng.uniform(0.01, 2.0, size=(batch, length, heads)).astype(np.float32),
        "beta": rng.uniform(0.02, 0.98, size=(batch, length, heads)).astype(np.float32),
    }
