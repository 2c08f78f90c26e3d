"""The model with its kernels forced on: prefill, decode and commit against Hugging Face's arrays.

Compiled on a GPU, interpreted elsewhere.

dense_gva's value heads have 24 dimensions, which no kernel takes; zeros make them 32 here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.amd.lower import lower
from gdnjax.config import Config
from gdnjax.model import prefill
from gdnjax.state import init_state, prefill_batch, state_shapes
from gdnjax.weights.declaration import Params
from gdnjax.weights.packing import pack
from pallas_kernels import dispatch
from tests.helpers import LOGITS, Server, assert_close, assert_states, golden_arrays, load_golden

HEAD = 32
"""Value head dimension of the padded dense_gva."""
ROWS = 208
"""Of every prefill here, so that one program is compiled a model."""
KERNELS = "pallas" if jax.default_backend() != "cpu" else "interpret"
SETTINGS: dict[str, Any] = dict(max_length=256, page_size=16, kernels=KERNELS, attention_pin=64, attention_segment=64)


@pytest.fixture(autouse=True)
def no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where an operation would take its reference instead of its kernel."""

    def refuse(op: str, reason: str) -> None:
        raise AssertionError(f"{op}: {reason}")

    monkeypatch.setattr(dispatch, "_say_once", refuse)


def with_zeros(array: Any, config: Config, axis: int, start: int = 0) -> np.ndarray:
    """Fills the value heads' channels, those from `start` on along an axis, with zeros up to HEAD a head."""
    moved = np.moveaxis(np.asarray(array), axis, 0)
    rest = moved.shape[1:]
    heads = moved[start:].reshape(config.linear_num_value_heads, config.linear_value_head_dim, *rest)
    filled = np.zeros((len(heads), HEAD, *rest), moved.dtype)
    filled[:, : heads.shape[1]] = heads
    return np.moveaxis(np.concatenate([moved[:start], filled.reshape(-1, *rest)]), 0, axis)


@functools.cache
def padded_model() -> tuple[Config, Params]:
    """dense_gva with zeros in its value heads: the same function, for the kernels' sizes.

    Zeros lower the mean of squares of the gated norm, so its weight and every norm's epsilon are lowered
    too; elsewhere an epsilon is too small beside its mean to matter.
    """
    config, params = load_golden("dense_gva")
    shrunk, keys = config.linear_value_head_dim / HEAD, 2 * config.key_channels

    def padded(p: Any, name: str, axis: int, start: int = 0) -> dict[str, Any]:
        return {"weight": jnp.asarray(with_zeros(p[name]["weight"], config, axis, start))}

    layers = dict(params["model"]["layers"])
    for number in config.gdn_layers:
        p = layers[number]["linear_attn"]
        norm = jnp.pad(p["norm"]["weight"], (0, HEAD - config.linear_value_head_dim)) * shrunk**0.5
        p = {
            **p,
            "in_proj_qkv": padded(p, "in_proj_qkv", 0, keys),
            "conv1d": padded(p, "conv1d", 0, keys),
            "in_proj_z": padded(p, "in_proj_z", 0),
            "norm": {"weight": norm},
            "out_proj": padded(p, "out_proj", 1),
        }
        layers[number] = {**layers[number], "linear_attn": p}
    params = {**params, "model": {**params["model"], "layers": layers}}
    return config.replace(linear_value_head_dim=HEAD, rms_norm_eps=config.rms_norm_eps * shrunk), params


def padded_arrays(file: str) -> Mapping[str, np.ndarray]:
    """A golden file of dense_gva with zeros where `padded_model` has them."""
    config, _ = load_golden("dense_gva")
    arrays = dict(golden_arrays("dense_gva", file))
    for name, array in arrays.items():
        if "rec_state_" in name:  # [B, Hv, dk, dv]
            arrays[name] = np.pad(array, [(0, 0)] * 3 + [(0, HEAD - array.shape[3])])
        elif "conv_state_" in name:  # [B, C, 4]
            arrays[name] = with_zeros(array, config, 1, 2 * config.key_channels)
    return arrays


@functools.cache
def padded_server() -> Server:
    config, params = padded_model()
    return Server(config.replace(state_layout="twin", **SETTINGS), params)


@pytest.fixture
def server() -> Server:
    """The padded dense_gva with an empty state."""
    server = padded_server()
    server.state = init_state(server.config)
    return server


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129, 200])
def test_prefill_lengths(length: int, server: Server) -> None:
    golden = padded_arrays("lengths")
    logits = server.prefill({3: golden["input_ids"][0, :length]}, ROWS)[3]
    assert_close(logits, golden[f"L{length}_logits_last"][0], LOGITS, "logits")
    assert_states(server.state, 3, golden, f"L{length}_")


@pytest.mark.parametrize("pieces", [(64, 64, 72), (1, 199), (3, 2, 195), (100, 100), (65, 1, 134), (37, 64, 99)])
def test_prefill_in_windows(pieces: tuple[int, ...], server: Server) -> None:
    golden = padded_arrays("chunked_prefill")
    start = 0
    for size in pieces:
        logits = server.prefill({2: golden["input_ids"][0, start : start + size]}, ROWS)[2]
        start += size
    assert_close(logits, golden["logits_last"][0], LOGITS, "logits")
    assert_states(server.state, 2, golden, "")


def test_prefill_of_three_requests_then_decode(server: Server) -> None:
    golden = padded_arrays("batch_left_pad")
    mask = golden["attention_mask"] == 1
    prompts = {request: golden["input_ids"][i][mask[i]] for i, request in enumerate((3, 0, 2))}
    # A first window of each, then the rest: the second call's segments have states already.
    server.prefill({request: ids[:3] for request, ids in prompts.items()}, ROWS)
    logits = server.prefill({request: ids[3:] for request, ids in prompts.items()}, ROWS)
    for i, request in enumerate(prompts):
        assert_close(logits[request], golden["logits"][i, -1], LOGITS, f"prompt {i}")
        assert_states(server.state, request, golden, "", row=i)
    greedy = server.greedy(logits, golden["greedy_ids"].shape[1])
    for i, request in enumerate(prompts):
        assert_close(greedy[request], golden["greedy_logits"][i], LOGITS, f"greedy logits of prompt {i}")


def test_packed_weights_and_tied_head() -> None:
    config, params = load_golden("dense_tied")
    golden = golden_arrays("dense_tied")
    ids, start = golden["input_ids"][0], int(golden["prefill_len"])
    server = Server(config.replace(state_layout="in_place", **SETTINGS), pack(params, config))
    logits = [server.prefill({2: ids[:start]}, ROWS)[2]]
    logits += [server.decode({2: int(token)})[2] for token in ids[start:]]
    assert_close(np.stack(logits), golden["decode_logits"][0], LOGITS)
    assert_states(server.state, 2, golden, "prefill_")


def test_prefill_launches_the_kernels() -> None:
    config, params = padded_model()
    config = config.replace(**SETTINGS)
    batch = prefill_batch(config, {0: [1, 2]}, 2)
    traced = str(jax.make_jaxpr(prefill)(params, state_shapes(config), batch))
    for name, layers in [
        ("gated_delta_build", config.gdn_layers),
        ("gated_delta_solve", config.gdn_layers),
        ("gated_delta_advance", config.gdn_layers),
        ("causal_conv_packed", config.gdn_layers),
        ("gated_rms_norm", config.gdn_layers),
        ("attention_prologue", config.attention_layers),
        ("attention_packed", config.attention_layers),
    ]:
        assert len(re.findall(rf"\bname={name}\b", traced)) == len(layers), name


def test_prefill_for_a_gpu_has_no_loop() -> None:
    """A loop outside a kernel is driven by the host, which waits for the device before every iteration."""
    config, params = padded_model()
    config = config.replace(**SETTINGS | {"kernels": "pallas"})
    batch = prefill_batch(config, {0: [1, 2], 3: [4] * 70}, 80)
    module = str(lower(prefill, (params, state_shapes(config), batch), "gfx942"))
    assert "attention_packed" in module and "gated_delta_advance" in module
    assert "stablehlo.while" not in module
