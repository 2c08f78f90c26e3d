"""Many speculating steps of many requests through a few layers, in three designs that must agree: a record, a page
for every candidate row, and decoding one token after the other. Whole simulations compile as one scan each."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.causal_conv import causal_conv_decode, causal_conv_packed
from pallas_kernels.causal_conv.reference import ring_window
from pallas_kernels.columns import Columns
from pallas_kernels.dispatch import Implementation
from pallas_kernels.gated_delta_decode import gated_delta_decode
from pallas_kernels.gated_delta_decode.qkv import QkvLayout
from pallas_kernels.gated_delta_verify import (
    Recorded,
    after_step,
    gated_delta_pages,
    gated_delta_verify,
    record_shapes,
)
from pallas_kernels.segments import Segments

ON_GPU = jax.default_backend() != "cpu"
KERNEL: Implementation = "pallas" if ON_GPU else "interpret"
IMPLEMENTATIONS: tuple[Implementation, ...] = ("reference", KERNEL)
HEAD = 128 if ON_GPU else 16
"""Head dimensions: the real ones, where they cost nothing."""

REQUESTS, GROUPS, ROWS = 6, 4, 4
TAPS = 3
"""Inputs that the convolution looks back."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer of `key_heads` x `ratio` value heads with a pool of one dtype."""

    key_heads: int
    ratio: int
    pool: Any

    @property
    def layout(self) -> QkvLayout:
        return QkvLayout(self.key_heads, self.key_heads * self.ratio, HEAD, HEAD)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Schedule:
    """What happens, step by step (S), made on the host.

    * `request`: `[S, G]`, whose rows a group has; -1 for padding. `count`: `[S, G]`, its live rows.
    * `ran`, `accepted`: `[S, N]` by request, its live rows and how many are then accepted, the first included. Not
      clamped: any number may come.
    * `restart`: `[S, N]`, requests that begin anew before the step.
    * `poison`: `[S]`, rings of rejected rows are overwritten with large values after the step.
    * `x`, `a`, `b`: a layer `[S, G T, ...]`, what the projections give. Dead rows hold NaN.
    """

    request: Any
    count: Any
    ran: Any
    accepted: Any
    restart: Any
    poison: Any
    x: tuple[Any, ...]
    a: tuple[Any, ...]
    b: tuple[Any, ...]

    @property
    def advance(self) -> np.ndarray:
        """`[S, N]`, rows that are accepted."""
        return np.clip(self.accepted, 0, self.ran)


def draw(layers: tuple[Layer, ...], steps: int, seed: int, lockstep: bool = False) -> Schedule:
    """A random schedule: rows move, come and go, requests begin anew, accepted counts stray out of range.

    With `lockstep` the first GROUPS requests run in every step, all on the same rows and with the same counts.
    """
    rng = np.random.default_rng(seed)
    request = np.full((steps, GROUPS), -1, np.int32)
    count = np.zeros((steps, GROUPS), np.int32)
    restart = np.zeros((steps, REQUESTS), bool)
    if lockstep:
        request[:] = np.arange(GROUPS)
        count[:] = rng.integers(1, ROWS + 1, (steps, 1))
    else:
        for step in range(steps):
            live = rng.integers(1, GROUPS + 1)
            places = rng.permutation(GROUPS)[:live]
            request[step, places] = rng.permutation(REQUESTS)[:live]
            count[step, places] = np.where(rng.random(live) < 0.25, 1, rng.integers(1, ROWS + 1, live))
        restart = rng.random((steps, REQUESTS)) < 0.02
    ran = np.zeros((steps, REQUESTS), np.int32)
    row, group = np.nonzero(request >= 0)
    ran[row, request[row, group]] = count[row, group]
    accepted, stray = rng.random((2, steps, 1 if lockstep else REQUESTS))
    accepted = 1 + (accepted * ran).astype(np.int32)
    accepted = np.where(stray < 0.03, -1, np.where(stray > 0.97, ran + 5, accepted)).astype(np.int32)
    dead = (np.arange(ROWS) >= count[..., None]).reshape(steps, -1)

    def inputs(width: int) -> np.ndarray:
        x = rng.normal(size=(steps, 1 if lockstep else GROUPS, ROWS, width)).astype(np.float32)
        x = np.broadcast_to(x, (steps, GROUPS, ROWS, width)).reshape(steps, -1, width).copy()
        x[dead] = np.nan
        return x.astype(jnp.bfloat16)

    return Schedule(
        *(request, count, ran, accepted, restart, rng.random(steps) < 0.5),
        x=tuple(inputs(layer.layout.width) for layer in layers),
        a=tuple(inputs(layer.layout.value_heads) for layer in layers),
        b=tuple(inputs(layer.layout.value_heads) for layer in layers),
    )


def only(schedule: Schedule, request: int) -> Schedule:
    """The schedule with the rows of all other requests padded away."""
    mine = schedule.request == request
    numbers = np.arange(REQUESTS) == request
    return dataclasses.replace(
        schedule,
        request=np.where(mine, schedule.request, -1),
        count=np.where(mine, schedule.count, 0),
        ran=np.where(numbers, schedule.ran, 0),
    )


def weights_of(layer: Layer, number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The convolution's weight, A_log and dt_bias: memories from a few tokens to thousands."""
    rng, s = np.random.default_rng(number), layer.layout
    a_log = rng.uniform(-6, 2, s.value_heads).astype(np.float32)
    weight = rng.normal(size=(s.width, 1, TAPS + 1)).astype(jnp.bfloat16)
    return jnp.asarray(weight), jnp.asarray(a_log), jnp.asarray(rng.normal(size=s.value_heads), jnp.float32)


def packed(a: jax.Array, b: jax.Array) -> tuple[Columns, Columns]:
    """b and a as columns of one array, as a layer's product has them."""
    both, heads = jnp.concatenate([b, a], axis=1), a.shape[1]
    return Columns(both, heads, heads), Columns(both, 0, heads)


def segments_of(step: Schedule, position: jax.Array) -> tuple[Segments, jax.Array]:
    """The candidate rows as packed segments by request, and the request of every row."""
    owns = step.request[None, :] == jnp.arange(REQUESTS)[:, None]
    start = (jnp.argmax(owns, axis=1) * ROWS).astype(jnp.int32)
    live = jnp.arange(ROWS)[None, :] < step.count[:, None]
    owner = jnp.where(live, step.request[:, None], -1).reshape(-1)
    return Segments(start, step.ran, position, jnp.zeros_like(position)), owner


def poisoned(ring: jax.Array, step: Schedule, position: jax.Array) -> jax.Array:
    """The ring with large values where rejected rows stand: everywhere but the window before `position`."""
    columns = ring.shape[1]
    kept = (position[:, None] - 1 - jnp.arange(TAPS)[None, :]) % columns
    keep = jnp.any(jnp.arange(columns)[None, :, None] == kept[:, None, :], axis=2)
    hit = ~keep & step.poison
    return ring.at[1:].set(jnp.where(hit[:, :, None], jnp.asarray(1e4, ring.dtype), ring[1:]))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """What a design did: outputs `[S, G T, Hv, dv]`, a digest of each group's state before its rows `[S, G]`, and the
    convolution's last inputs of every request `[S, N, TAPS, C]`, a layer."""

    outputs: tuple[Any, ...]
    states: tuple[Any, ...]
    windows: tuple[Any, ...]


STEPS = 200
"""Steps of one compiled scan; a longer schedule takes it several times."""


def run(design: str, layers: tuple[Layer, ...], schedule: Schedule, implementation: Implementation, twin: bool) -> Any:
    """A design's `Trace` over a schedule of a multiple of STEPS, on the host, and what it ends with."""
    slots = 1 + np.arange(REQUESTS, dtype=np.int32)
    carry = _start(design, layers) | {"read": slots, "write": slots + REQUESTS if twin else slots}
    traces = []
    for first in range(0, len(schedule.request), STEPS):
        part = jax.tree.map(lambda x, first=first: x[first : first + STEPS], schedule)
        carry, trace = _run(design, layers, implementation, carry, part)
        traces.append(jax.tree.map(np.asarray, trace))
    trace = jax.tree.map(lambda *parts: np.concatenate(parts), *traces)
    return trace, jax.tree.map(np.asarray, carry)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _start(design: str, layers: tuple[Layer, ...]) -> Any:
    return _DESIGNS[design](layers, [], "reference")[0]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _run(
    design: str, layers: tuple[Layer, ...], implementation: Implementation, carry: Any, schedule: Schedule
) -> tuple[Any, Trace]:
    weights = [weights_of(*x) for x in zip(layers, range(9), strict=False)]
    return jax.lax.scan(_DESIGNS[design](layers, weights, implementation)[1], carry, schedule)


def _digest(states: jax.Array) -> jax.Array:
    """A number of all bits of each group's state: `[G, ...]` -> `[G]` uint32. One bit more or less changes it."""
    bits = jax.lax.bitcast_convert_type(states, jnp.uint16 if states.dtype == jnp.bfloat16 else jnp.uint32)
    bits = bits.reshape(states.shape[0], -1).astype(jnp.uint32)
    odd = 2 * jax.lax.iota(jnp.uint32, bits.shape[1]) * jnp.uint32(2654435761) + 1
    return jnp.sum(bits * odd, axis=1, dtype=jnp.uint32)


def _nan(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.full(shape, jnp.nan, dtype)


def _carry(layers: tuple[Layer, ...], slots: int, columns: int) -> dict[str, Any]:
    # NaN wherever nothing has been written: whoever reads it shows.
    return {
        "pools": [
            _nan(slots, s.value_heads, HEAD, HEAD, dtype=x.pool).at[0].set(0) for x in layers for s in (x.layout,)
        ],
        "rings": [_nan(REQUESTS + 1, columns, x.layout.width) for x in layers],
        "position": jnp.zeros(REQUESTS, jnp.int32),
    }


def _windows(rings: list[jax.Array], position: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(ring_window(ring, 1 + jnp.arange(REQUESTS), position, TAPS) for ring in rings)


def _record_design(layers: tuple[Layer, ...], weights: list[Any], implementation: Implementation) -> Any:
    carry = _carry(layers, 1 + 2 * REQUESTS, TAPS + ROWS)
    shapes = [record_shapes(x.layout, REQUESTS, ROWS, jnp.bfloat16) for x in layers]
    carry["records"] = [jax.tree.map(lambda s: _nan(*s.shape), shape) for shape in shapes]
    carry["recorded"] = Recorded(*(jnp.zeros(REQUESTS, jnp.int32) for _ in range(3)))

    def step(carry: dict[str, Any], step: Schedule) -> Any:
        recorded = jax.tree.map(lambda x: jnp.where(step.restart, 0, x), carry["recorded"])
        position = jnp.where(step.restart, 0, carry["position"])
        segments, owner = segments_of(step, position)
        group = jnp.maximum(step.request, 0)
        live = step.request >= 0
        source, target = (jnp.where(live, carry[name][group], 0) for name in ("read", "write"))
        has_state = (position - recorded.replayed)[group] > 0
        pools, rings, records, outputs = list(carry["pools"]), list(carry["rings"]), list(carry["records"]), []
        for i, (conv, a_log, dt_bias) in enumerate(weights):
            qkv, rings[i] = causal_conv_packed(step.x[i], conv, rings[i], segments, owner, implementation)
            out, pools[i], records[i] = gated_delta_verify(
                *(qkv, *packed(step.a[i], step.b[i]), a_log, dt_bias, pools[i], records[i], recorded),
                *(step.request, source, target, has_state, step.count, implementation),
            )
            outputs.append(out)
        states = tuple(_digest(pool[target]) for pool in pools)
        position = position + jnp.clip(step.accepted, 0, step.ran)
        rings = [poisoned(ring, step, position) for ring in rings]
        after = {
            **{"pools": pools, "rings": rings, "records": records, "position": position},
            "recorded": after_step(recorded, step.ran, step.accepted),
            "read": jnp.where(step.ran > 0, carry["write"], carry["read"]),
            "write": jnp.where(step.ran > 0, carry["read"], carry["write"]),
        }
        return after, Trace(tuple(outputs), states, _windows(rings, position))

    return carry, step


def _pages_design(layers: tuple[Layer, ...], weights: list[Any], implementation: Implementation) -> Any:
    # Two sets of pages a request, in turn: with nothing accepted a step starts again from where the last one did.
    carry = _carry(layers, 1 + 2 * REQUESTS * ROWS, TAPS + ROWS)
    carry |= {"current": jnp.zeros(REQUESTS, jnp.int32), "turn": jnp.zeros(REQUESTS, jnp.int32)}

    def step(carry: dict[str, Any], step: Schedule) -> Any:
        position = jnp.where(step.restart, 0, carry["position"])
        segments, owner = segments_of(step, position)
        group = jnp.maximum(step.request, 0)
        place = 2 * jnp.arange(REQUESTS) + carry["turn"]
        pages = (1 + ROWS * place[:, None] + jnp.arange(ROWS)[None, :]).astype(jnp.int32)
        source = carry["current"][group]
        states = tuple(_digest(pool[source]) for pool in carry["pools"])
        pools, rings, outputs = list(carry["pools"]), list(carry["rings"]), []
        for i, (conv, a_log, dt_bias) in enumerate(weights):
            qkv, rings[i] = causal_conv_packed(step.x[i], conv, rings[i], segments, owner, implementation)
            out, pools[i] = gated_delta_pages(
                *(qkv, *packed(step.a[i], step.b[i]), a_log, dt_bias, pools[i], source, pages[group]),
                *(position[group] > 0, step.count, implementation),
            )
            outputs.append(out)
        advance = jnp.clip(step.accepted, 0, step.ran)
        last = jnp.take_along_axis(pages, jnp.maximum(advance - 1, 0)[:, None], axis=1)[:, 0]
        # With nothing accepted the set that holds the current page must be left alone.
        moved = advance > 0
        position = position + advance
        rings = [poisoned(ring, step, position) for ring in rings]
        after = {
            **{"pools": pools, "rings": rings, "position": position},
            "current": jnp.where(moved, last, carry["current"]),
            "turn": jnp.where(moved, 1 - carry["turn"], carry["turn"]),
            **{"read": carry["read"], "write": carry["write"]},
        }
        return after, Trace(tuple(outputs), states, _windows(rings, position))

    return carry, step


def _tokens_design(layers: tuple[Layer, ...], weights: list[Any], implementation: Implementation) -> Any:
    carry = _carry(layers, 1 + 2 * REQUESTS, TAPS + 1)

    def step(carry: dict[str, Any], step: Schedule) -> Any:
        position = jnp.where(step.restart, 0, carry["position"])
        read, write = carry["read"], carry["write"]
        advance = jnp.clip(step.accepted, 0, step.ran)
        group = jnp.maximum(step.request, 0)
        states = tuple(_digest(pool[read[group]]) for pool in carry["pools"])

        def token(held: Any, t: jax.Array) -> Any:
            pools, rings, position, read, write = held
            pools, rings, outputs = list(pools), list(rings), []
            live = (step.request >= 0) & (t < advance[group])
            source, target, ring_row = (jnp.where(live, x, 0) for x in (read[group], write[group], group + 1))
            here = jnp.where(live, position[group], 0)
            for i, (conv, a_log, dt_bias) in enumerate(weights):
                x, a, b = (y[i].reshape(GROUPS, ROWS, -1)[:, t] for y in (step.x, step.a, step.b))
                qkv, rings[i] = causal_conv_decode(x, conv, rings[i], ring_row, here, implementation)
                out, pools[i] = gated_delta_decode(
                    *(qkv, *packed(a, b), a_log, dt_bias, pools[i], source, target, here > 0, implementation)
                )
                outputs.append(out)
            ran = t < advance
            read, write = jnp.where(ran, write, read), jnp.where(ran, read, write)
            return (pools, rings, position + ran, read, write), outputs

        held = carry["pools"], carry["rings"], position, read, write
        (pools, rings, position, read, write), rows = jax.lax.scan(token, held, jnp.arange(ROWS))
        outputs = [jnp.swapaxes(y, 0, 1).reshape(-1, *y.shape[2:]) for y in rows]
        after = {"pools": pools, "rings": rings, "position": position, "read": read, "write": write}
        return after, Trace(tuple(outputs), states, _windows(rings, position))

    return carry, step


_DESIGNS = {"record": _record_design, "pages": _pages_design, "tokens": _tokens_design}
