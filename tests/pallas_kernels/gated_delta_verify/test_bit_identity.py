"""A record gives the bits of a page for every candidate row, and with a float32 state those of decoding the accepted
rows one by one: outputs, checkpoints and convolution windows over many steps of random acceptance."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Implementation
from tests.helpers import assert_same_bits
from tests.pallas_kernels.gated_delta_verify.simulation import (
    GROUPS,
    IMPLEMENTATIONS,
    KERNEL,
    ON_GPU,
    REQUESTS,
    ROWS,
    STEPS,
    Layer,
    Schedule,
    Trace,
    draw,
    only,
    run,
)

# Every head ratio, in either dtype of the state in turn.
ALL = (Layer(2, 1, jnp.float32), Layer(1, 2, jnp.bfloat16), Layer(1, 3, jnp.float32), Layer(1, 4, jnp.bfloat16))
OTHER = tuple(dataclasses.replace(x, pool=jnp.bfloat16 if x.pool == jnp.float32 else jnp.float32) for x in ALL)
# Compiling them is what takes time on a CPU, so that two layers go to either; the long form runs all.
LAYERS = {"reference": (OTHER[1], ALL[3]), "interpret": (ALL[0], OTHER[2]), "pallas": ALL}
# A reference is what a CPU runs; on a GPU XLA fuses it as it likes.
on_this_device = pytest.mark.parametrize("implementation", [KERNEL] if ON_GPU else IMPLEMENTATIONS)


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
        assert_same_bits(record.windows[i], tokens.windows[i], f"{what}: windows of tokens")
        if layer.pool == jnp.float32:
            assert_same_bits(record.outputs[i][accepted], tokens.outputs[i][accepted], f"{what}: outputs of tokens")
            assert_same_bits(record.states[i][started], tokens.states[i][started], f"{what}: states of tokens")


def assert_designs_agree(layers: tuple[Layer, ...], schedule: Schedule, implementation: Implementation) -> None:
    twin, ends = run("record", layers, schedule, implementation, twin=True)
    in_place, in_place_ends = run("record", layers, schedule, implementation, twin=False)
    pages, _ = run("pages", layers, schedule, implementation, twin=False)
    tokens, _ = run("tokens", layers, schedule, implementation, twin=True)
    assert_agree(layers, schedule, twin, pages, tokens)
    assert_agree(layers, schedule, in_place, pages, tokens)
    for one, other in zip(ends["records"], in_place_ends["records"], strict=True):
        for name in ("keys", "values", "gates"):
            assert_same_bits(getattr(one, name), getattr(other, name), f"record.{name}")
    for pool in ends["pools"]:
        assert not np.asarray(pool[0], np.float32).any(), "slot 0"


@pytest.mark.newest
@on_this_device
def test_record_is_pages_is_tokens(implementation: Implementation) -> None:
    # Rows that move, come and go, accepted counts out of range, rings whose rejected rows hold large values.
    layers = LAYERS[implementation]
    assert_designs_agree(layers, draw(layers, STEPS, seed=1), implementation)


@on_this_device
def test_equal_requests_in_lockstep_and_one_alone(implementation: Implementation) -> None:
    layers = LAYERS[implementation]
    schedule = draw(layers, STEPS, seed=2, lockstep=True)
    together, _ = run("record", layers, schedule, implementation, twin=True)
    alone, _ = run("record", layers, only(schedule, 2), implementation, twin=True)
    for i in range(len(layers)):
        outputs = together.outputs[i].reshape(STEPS, GROUPS, -1)
        lonely = alone.outputs[i].reshape(STEPS, GROUPS, -1)
        assert np.asarray(outputs, np.float32).any() and not np.asarray(lonely[:, [0, 1, 3]], np.float32).any()
        for group in range(GROUPS):
            assert_same_bits(outputs[:, group], lonely[:, 2], f"layer {i}, group {group}")
            # before the first step's rows there is no state
            assert_same_bits(together.states[i][1:, group], alone.states[i][1:, 2], f"state of layer {i}")


LONG = (
    [(KERNEL, ALL), (KERNEL, OTHER)]
    if ON_GPU
    else [*(("reference", x) for x in (ALL, OTHER)), ("interpret", LAYERS["interpret"])]
)


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "layers"), LONG)
def test_thousands_of_rows(layers: tuple[Layer, ...], implementation: Implementation) -> None:
    schedule = draw(layers, 7200, seed=3)
    # Elsewhere a request begins anew every 50 steps or so; here two go on to the end.
    schedule.restart[:, :2] = False
    rows = schedule.advance.sum(axis=0)
    assert rows.min() > 4096, f"accepted rows a request: {rows}"
    assert_designs_agree(layers, schedule, implementation)
    print(f"{rows.sum()} accepted rows over {len(layers)} layers, {KERNEL}, {'GPU' if ON_GPU else 'CPU'}")
