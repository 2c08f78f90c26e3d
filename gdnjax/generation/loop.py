"""The decode loop: one step as a pure function, driven from Python or inside one `while_loop`.

Both drive the same step. The Python loop calls one jitted step whose state is donated; the device loop
never returns to the host. On ROCm a `while_loop` is driven by the host anyway and its command buffers
have crashed, so the Python loop is the choice there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.diagnosis.watch import Watch
from gdnjax.generation.accept import NOTHING, Acceptance, accept
from gdnjax.generation.sampling import Sampler
from gdnjax.model.step import decode_and_commit
from gdnjax.state.batch import Batch
from gdnjax.state.pytree import State
from gdnjax.weights.declaration import Params

Loop = Literal["python", "device"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decoding:
    """Everything a decode step reads and writes; row i belongs to request i.

    * `token`: `[R]`, the token that each row feeds next. `live`: `[R]` bool. `emitted`: `[R]`, tokens
      emitted so far. `limit`: `[R]`, most tokens to emit.
    * `stop_ids`: `[R, S]`, padded with -1.
    * `in_prompt`, `counts`: `[R, V]` for the penalties, or None.
    """

    state: State
    token: jax.Array
    live: jax.Array
    emitted: jax.Array
    limit: jax.Array
    stop_ids: jax.Array
    sampler: Sampler
    in_prompt: jax.Array | None
    counts: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emission:
    """What a step emits: `token` `[R]` (or `NOTHING`, `NOT_FINITE`) and `logprob` `[R]`, the log-probability
    of the token under the model itself, before penalties, temperature and truncation."""

    token: jax.Array
    logprob: jax.Array


D = TypeVar("D", bound=Decoding)


def emit(decoding: Decoding, logits: jax.Array) -> tuple[Decoding, Emission]:
    """Samples from logits `[R, V]`, and retires rows that stop. Rows that are not live emit nothing."""
    d = decoding
    drafts, count = jnp.zeros((logits.shape[0], 0), jnp.int32), jnp.ones(logits.shape[0], jnp.int32)
    a = accept(logits[:, None], drafts, count, d.sampler, d.live, d.emitted, d.limit, d.stop_ids, d.in_prompt, d.counts)
    return advanced(d, a), Emission(a.token[:, 0], a.logprob[:, 0])


def advanced(decoding: D, a: Acceptance) -> D:
    """The decoding after a step that emitted `a`."""
    return dataclasses.replace(
        decoding,
        token=jnp.where(decoding.live, a.last, decoding.token),
        live=a.live,
        emitted=decoding.emitted + a.accepted,
        counts=a.counts,
    )


def step(params: Params, decoding: Decoding) -> tuple[Decoding, Emission]:
    """Feeds every live row's token, commits, and samples the next one."""
    rows = decoding.token.shape[0]
    request = jnp.where(decoding.live, jnp.arange(rows, dtype=jnp.int32), -1)
    logits, state = decode_and_commit(params, decoding.state, Batch(decoding.token, request))
    return emit(dataclasses.replace(decoding, state=state), logits)


# Unread inputs are kept: inputs are paired with outputs in order, and one that is dropped shifts all behind it,
# each into a copy.
jitted_step = jax.jit(step, donate_argnames="decoding", keep_unused=True)
jitted_emit = jax.jit(emit, donate_argnames="decoding")


@functools.partial(jax.jit, static_argnames="steps", donate_argnames="decoding")
def device_loop(params: Params, decoding: Decoding, steps: int) -> tuple[Decoding, Emission]:
    """Up to `steps` steps on the device, fewer if every row has stopped.

    Returns:
        The decoding, and emissions `[steps, R]`; steps that did not run emit `NOTHING`.
    """
    rows = decoding.token.shape[0]
    emissions = Emission(jnp.full((steps, rows), NOTHING, jnp.int32), jnp.zeros((steps, rows), jnp.float32))

    def more(carry: tuple[jax.Array, Decoding, Emission]) -> jax.Array:
        index, decoding, _ = carry
        return (index < steps) & jnp.any(decoding.live)

    def body(carry: tuple[jax.Array, Decoding, Emission]) -> tuple[jax.Array, Decoding, Emission]:
        index, decoding, emissions = carry
        decoding, emission = step(params, decoding)
        emissions = jax.tree.map(lambda all_, one: all_.at[index].set(one), emissions, emission)
        return index + 1, decoding, emissions

    _, decoding, emissions = jax.lax.while_loop(more, body, (jnp.int32(0), decoding, emissions))
    return decoding, emissions


class PythonLoop(Generic[D]):
    """The Python loop. Iterating yields each step's emission as numpy arrays, one step behind the device.

    `stop(row)` retires a row from outside (a stop string); the step that is already running may still
    emit for it. `decoding` holds the current state; nothing else may donate it. `step` is jitted, and emits for every
    row one token or more while it is live. `watch` sees the state after every step.
    """

    def __init__(
        self,
        params: Params,
        decoding: D,
        step: Callable[[Params, D], tuple[D, Emission]] = jitted_step,
        watch: Watch | None = None,
    ):
        self.params = params
        self.decoding = decoding
        self.watch = watch
        self._step = step
        self._retired = np.zeros(decoding.token.shape[0], bool)
        self._changed = False

    def stop(self, row: int) -> None:
        self._retired[row] = True
        self._changed = True

    def __iter__(self) -> Iterator[Emission]:
        remaining = int(jnp.max(self.decoding.limit - self.decoding.emitted))
        behind: Emission | None = None
        for _ in range(remaining):
            if self._changed:
                live = self.decoding.live & ~jnp.asarray(self._retired)
                self.decoding = dataclasses.replace(self.decoding, live=live)
                self._changed = False
            self.decoding, emission = self._step(self.params, self.decoding)
            if self.watch is not None:
                kind = "verify" if self.decoding.state.config.speculate else "decode"
                self.watch.after_step(kind, self.decoding.state)
            if behind is not None:
                # Waits for the step before, while the device already works on this one.
                arrays = jax.tree.map(np.asarray, behind)
                yield arrays
                silent = (arrays.token == NOTHING).reshape(self._retired.size, -1).all(axis=1)
                if np.all(silent | self._retired):
                    return
            behind = emission
        if behind is not None:
            yield jax.tree.map(np.asarray, behind)


def default_loop(platform: str) -> Loop:
    """The loop for a platform (`rocm`, `cuda`, `cpu`) when nothing needs the host at every step."""
    return "python" if platform == "rocm" else "device"


def make_decoding(
    state: State,
    sampler: Sampler,
    limits: list[int],
    stop_ids: tuple[int, ...],
    prompts: list[list[int]],
) -> Decoding:
    """The decoding of `len(prompts)` requests in a state whose `max_requests` is the number of rows.

    limits: tokens that each may emit; 0 is a row that takes no part.
    """
    rows, vocab = state.config.max_requests, state.config.vocab_size
    used = len(prompts)
    limit = np.zeros(rows, np.int32)
    limit[:used] = limits
    stops = np.full((rows, max(1, len(stop_ids))), -1, np.int32)
    stops[:, : len(stop_ids)] = stop_ids
    in_prompt: Any = None
    counts: Any = None
    if sampler.penalized:
        mask = np.zeros((rows, vocab), bool)
        for row, ids in enumerate(prompts):
            mask[row, ids] = True
        in_prompt, counts = jnp.asarray(mask), jnp.zeros((rows, vocab), jnp.int32)
    return Decoding(
        state=state,
        token=jnp.zeros(rows, jnp.int32),
        live=jnp.asarray(limit > 0),
        emitted=jnp.zeros(rows, jnp.int32),
        limit=jnp.asarray(limit),
        stop_ids=jnp.asarray(stops),
        sampler=sampler,
        in_prompt=in_prompt,
        counts=counts,
    )
