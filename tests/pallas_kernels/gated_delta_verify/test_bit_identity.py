"""A record gives the bits of a page for every candidate row, and with a float32 state those of decoding the accepted
rows one by one: outputs, checkpoints and convolution windows over many steps of random acceptance."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation

from pallas_kernels.gated_delta_decode.kernel import update_strip
from pallas_kernels.gated_delta_verify import gated_delta_pages, gated_delta_replay, gated_delta_verify, kernel
from tests.helpers import assert_same_bits
from tests.pallas_kernels.gated_delta_verify.simulation import (
    GROUPS,
    IMPLEMENTATIONS,
    REQUESTS,
    ROWS,
    Layer,
    Schedule,
    Trace,
    draw,
    only,
    run,
)

# Every head ratio, in either dtype of the state in turn.
LAYERS = (Layer(2, 1, jnp.float32), Layer(1, 2, jnp.bfloat16), Layer(1, 3, jnp.float32), Layer(1, 4, jnp.bfloat16))
OTHER = tuple(
    dataclasses.replace(x, pool=jnp.bfloat16 if x.pool == jnp.float32 else jnp.float32) for x in LAYERS
)
STEPS = 200
both = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def live_rows(counts: np.ndarray) -> np.ndarray:
    """`[S, G]` counts -> which of the rows `[S, G T]` they are."""
    return (np.arange(ROWS) < counts[..., None]).reshape(counts.shape[0], -1)


def by_group(schedule: Schedule, values: np.ndarray) -> np.ndarray:
    """`[S, N]` by request -> `[S, G]`; zeros for padding."""
    taken = np.take_along_axis(values, np.maximum(schedule.request, 0), axis=1)
    return np.where(schedule.request >= 0, taken, 0)


def positions(schedule: Schedule) -> np.ndarray:
    """`[S, N]`, tokens of every request before the step."""
    position, result = np.zeros(REQUESTS, int), []
    for restart, advance in zip(schedule.restart, schedule.advance, strict=True):
        position = np.where(restart, 0, position)
        result.append(position)
        position = position + advance
    return np.stack(result)


def assert_agree(layers: tuple[Layer, ...], schedule: Schedule, record: Trace, pages: Trace, tokens: Trace) -> None:
    ran, accepted = live_rows(schedule.count), live_rows(by_group(schedule, schedule.advance))
    started = by_group(schedule, positions(schedule)) > 0
    assert ran.sum() > accepted.sum() > 0.4 * ran.sum() and started.any()
    for i, layer in enumerate(layers):
        what = f"layer {i}, ratio {layer.ratio}, {jnp.dtype(layer.pool)}"
        assert np.isfinite(np.asarray(record.outputs[i][ran], np.float32)).all(), what
        assert not np.asarray(record.outputs[i][~ran], np.float32).any(), f"{what}: rows that are not live"
        assert_same_bits(record.outputs[i], pages.outputs[i], f"{what}: outputs")
        assert_same_bits(record.states[i][started], pages.states[i][started], f"{what}: checkpoints")
        assert_same_bits(record.windows[i], pages.windows[i], f"{what}: windows")
        assert_same_bits(record.windows[i], tokens.windows[i], f"{what}: windows against tokens")
        if layer.pool == jnp.float32:
            assert_same_bits(record.outputs[i][accepted], tokens.outputs[i][accepted], f"{what}: outputs of tokens")
            assert_same_bits(record.states[i][started], tokens.states[i][started], f"{what}: states of tokens")


@both
@pytest.mark.parametrize("layers", [LAYERS, OTHER], ids=["f32-first", "bf16-first"])
def test_record_is_pages_is_tokens(layers: tuple[Layer, ...], implementation: Implementation) -> None:
    schedule = draw(layers, STEPS, seed=1)
    twin, ends = run("record", layers, schedule, implementation, twin=True)
    in_place, in_place_ends = run("record", layers, schedule, implementation, twin=False)
    pages, _ = run("pages", layers, schedule, implementation, twin=False)
    tokens, _ = run("tokens", layers, schedule, implementation, twin=True)
    assert_agree(layers, schedule, twin, pages, tokens)
    assert_agree(layers, schedule, in_place, pages, tokens)
    for one, other in zip(ends["records"], in_place_ends["records"], strict=True):
        for name in ("keys", "values", "gates"):
            assert_same_bits(getattr(one, name), getattr(other, name), f"record.{name}")
