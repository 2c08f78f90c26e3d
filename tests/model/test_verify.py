"""Verify steps in all four layouts: what decoding the accepted rows gives, and records the bits of slots."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config
from gdnjax.model import decode_step, prefill, verify_step
from gdnjax.state import (
    State,
    commit_verified,
    prefill_batch,
    state_shapes,
    verify_batch,
)
from gdnjax.state.device import discard
from gdnjax.state.record import replay
from gdnjax.weights.declaration import Params, abstract_params, init_params
from tests.helpers import (
    KV,
    LAYOUTS,
    LOGITS,
    STATES,
    Server,
    assert_close,
    assert_same_bits,
    decode_batch,
    difference,
    host_copy,
)
from tests.state.pools import MICRO

pytestmark = pytest.mark.usefixtures("quick_compilation")

DRAFTS, GROUPS, PREFILL_ROWS = 3, 4, 32
STATES_OF_DRAFTS = ("record", "slots")
designs = pytest.mark.parametrize("design", [(x, y) for x in LAYOUTS for y in STATES_OF_DRAFTS], ids="-".join)

jit_verify = jax.jit(verify_step, donate_argnames="state")
jit_commit_verified = jax.jit(commit_verified, donate_argnames="state")
jit_replay = jax.jit(replay)
jit_discard = jax.jit(discard, donate_argnames="state")

PLAIN = MICRO.replace(
    num_hidden_layers=3,
    layer_types=("linear_attention", "full_attention", "linear_attention"),
    max_length=80,
    prefill_tokens=PREFILL_ROWS,
    prefix_cache_bytes=0,
)


def config_of(design: tuple[str, str]) -> Config:
    return PLAIN.replace(state_layout=design[0], speculate=DRAFTS, speculative_state=design[1])


@functools.cache
def params() -> Params:
    return host_copy(jax.jit(init_params, static_argnums=0)(PLAIN, jax.random.key(5)))


class Verifier(Server):
    """A state that speculates, by request number."""

    def verify(self, pieces: Mapping[int, Sequence[int]], rows: int = DRAFTS + 1) -> dict[int, np.ndarray]:
        """Logits `[rows of the request, V]`; the step is left pending."""
        batch = verify_batch(self.config, pieces, GROUPS, rows)
        logits, hidden, self.state = jit_verify(self.params, self.state, batch)
        assert logits.shape == (GROUPS, rows, self.config.vocab_size)
        assert hidden.shape == (GROUPS, rows, self.config.hidden_size)
        return {r: np.asarray(logits[i, : len(ids)]) for i, (r, ids) in enumerate(pieces.items())}

    def accept(self, accepted: Mapping[int, int]) -> None:
        vector = np.zeros(self.config.max_requests, np.int32)
        vector[list(accepted)] = list(accepted.values())
        self.state = jit_commit_verified(self.state, vector)

    def poison(self) -> None:
        """NaN wherever a committed state has nothing that may be read again."""
        s, c = host_copy(self.state), self.config
        for request in range(c.max_requests):
            position = int(s.position[request])
            kept = np.arange(max(0, position - c.linear_conv_kernel_dim + 1), position) % c.ring_columns
            dead = np.setdiff1d(np.arange(c.ring_columns), kept)
            places = (s.page_table[request][:, None] * c.page_size + np.arange(c.page_size)).reshape(-1)[position:]
            for ring in s.conv:
                ring[request + 1, dead] = np.nan
            for cache in (*s.keys, *s.values):
                cache[places] = np.nan
        read = [0, *(int(slot) for slot, n in zip(s.read_slot, s.position, strict=True) if n)]
        for pool in s.recurrent:
            pool[np.setdiff1d(np.arange(c.slots), read)] = np.nan
        if s.record is not None:
            recorded = s.record.recorded
            alive = np.arange(c.verify_rows) < np.clip(recorded.advance, 0, recorded.live)[:, None]
            half = np.arange(2)[None, :, None] == recorded.parity[:, None, None]
            for array in jax.tree.leaves(s.record.layers):
                array[~(half & alive[:, None, :])] = np.nan
        self.state = jax.tree.map(jnp.asarray, s)


def contents(state: State) -> dict[str, np.ndarray]:
    """What every request's state means, its record replayed. By hand: every length would compile its own gather."""
    s, c, found = host_copy(jit_replay(params(), state)), state.config, {}
    for request, position in enumerate(s.position):
        # Without the oldest input of a window, which is not read again: a step that was dropped may be written over it.
        window = np.arange(max(0, position - c.linear_conv_kernel_dim + 1), position)
        places = (s.page_table[request][:, None] * c.page_size + np.arange(c.page_size)).reshape(-1)[:position]
        for layer in range(len(c.gdn_layers)):
            slot = s.read_slot[request] if position else 0
            found[f"state {layer} of {request}"] = s.recurrent[layer][slot]
            found[f"window {layer} of {request}"] = s.conv[layer][request + 1][window % c.ring_columns]
        found[f"keys of {request}"], found[f"values of {request}"] = s.keys[0][places], s.values[0][places]
    return found


@dataclasses.dataclass(frozen=True)
class Event:
    """What a run does next: reads `prompts`, or verifies `pieces` (in this order of rows) and accepts some."""

    prompts: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    pieces: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    accepted: dict[int, int] = dataclasses.field(default_factory=dict)


@functools.cache
def schedule() -> tuple[Event, ...]:
    """Prompts of three requests, then steps of some of them with random drafts and acceptance, and prefills between."""
    rng = np.random.default_rng(7)

    def ids(count: int) -> list[int]:
        return [int(i) for i in rng.integers(0, PLAIN.vocab_size, count)]

    events = [Event({0: ids(5), 1: ids(9)})]  # request 2 begins with a verify step
    for step in range(22):
        if step in (6, 13, 14):
            # some that have rows to replay, one that has not read anything for a while
            events.append(Event({int(r): ids(int(rng.integers(1, 5))) for r in rng.permutation(3)[: 1 + step % 2]}))
        requests = [int(r) for r in rng.permutation(3)[: rng.integers(1, 4)]]
        counts = {r: int(rng.integers(1, DRAFTS + 2)) for r in requests}
        accepted = {r: int(rng.integers(1, n + 1)) for r, n in counts.items()}
        if step < 3:
            # all drafts taken, no drafts at all, drafts again: of every request
            counts = dict.fromkeys((2, 0, 1), (DRAFTS + 1, 1, DRAFTS + 1)[step])
            accepted = counts
        if step in (8, 9):
            accepted = dict.fromkeys(accepted, DRAFTS + 6 if step == 8 else -1)  # taken for the nearest that can be
        events.append(Event(pieces={r: ids(n) for r, n in counts.items()}, accepted=accepted))
    return tuple(events)


@functools.cache
def speculated(design: tuple[str, str]) -> tuple[list[dict[int, np.ndarray]], list[dict[str, np.ndarray]]]:
    """The schedule: logits of every event, and what the states meant after every third."""
    server, seen, states = Verifier(config_of(design), params()), [], []
    for number, event in enumerate(schedule()):
        if event.prompts:
            seen.append(server.prefill(event.prompts, PREFILL_ROWS))
        else:
            if design[0] == "twin" and number % 3 == 0:
                # A step that is dropped, of the same requests and of another one.
                server.verify({r: [1] * (DRAFTS + 1) for r in range(3)})
                server.state = jit_discard(server.state)
            seen.append(server.verify(event.pieces))
            server.accept(event.accepted)
        server.poison()
        if number % 3 == 0:
            states.append(contents(server.state))
    return seen, states


@functools.cache
def decoded() -> tuple[list[dict[int, np.ndarray]], list[dict[str, np.ndarray]]]:
    """The same with plain steps of the accepted rows, one after the other."""
    server, seen, states = Server(PLAIN, params()), [], []
    for number, event in enumerate(schedule()):
        if event.prompts:
            seen.append(server.prefill(event.prompts, PREFILL_ROWS))
        rows: dict[int, list[np.ndarray]] = {r: [] for r in event.pieces}
        taken = {r: ids[: max(1, event.accepted[r])] for r, ids in event.pieces.items()}
        for t in range(DRAFTS + 1):
            step = {r: ids[t] for r, ids in taken.items() if t < len(ids)}
            for r, logits in server.decode(step, GROUPS).items() if step else ():
                rows[r].append(logits)
        if event.pieces:
            seen.append({r: np.stack(logits) for r, logits in rows.items()})
        if number % 3 == 0:
            states.append(contents(server.state))
    return seen, states


@designs
def test_accepted_rows_are_decoded_rows(design: tuple[str, str]) -> None:
    (found, states), (wanted, plain) = speculated(design), decoded()
    off = 0.0
    for number, (logits, expected) in enumerate(zip(found, wanted, strict=True)):
        assert logits.keys() == expected.keys()
        for request, rows in expected.items():
            taken = logits[request][: len(rows)] if rows.ndim == 2 else logits[request]
            assert_close(taken, rows, LOGITS, f"logits of request {request}, event {number}")
            np.testing.assert_array_equal(taken.argmax(-1), rows.argmax(-1))
            off = max(off, difference(taken, rows))
    for event, (state, expected) in enumerate(zip(states, plain, strict=True)):
        for name, array in expected.items():
            assert_close(state[name], array, KV if name[0] in "kv" else STATES, f"{name}, event {3 * event}")
    print(f"{'-'.join(design)}: logits off by {off:.2g}")


def test_records_and_slots_have_the_same_bits() -> None:
    wanted, plain = speculated(("in_place", "slots"))
    for design in (("in_place", "record"), ("twin", "slots"), ("twin", "record")):
        found, states = speculated(design)
        for number, (logits, expected) in enumerate(zip(found, wanted, strict=True)):
            for request, rows in expected.items():
                assert_same_bits(logits[request], rows, f"{design}: logits of {request}, event {number}")
        for state, expected in zip(states, plain, strict=True):
            for name, array in expected.items():
                assert_same_bits(state[name], array, f"{design}: {name}")


def test_fewer_rows_than_the_state_takes_and_rows_behind_the_end() -> None:
    config = config_of(("in_place", "record"))
    server, other = Verifier(config, params()), Verifier(config, params())
    prompt = [int(i) for i in np.random.default_rng(1).integers(0, config.vocab_size, config.max_length - 3)]
    for one in (server, other):
        for start in range(0, len(prompt), PREFILL_ROWS):
            one.prefill({2: prompt[start : start + PREFILL_ROWS]}, PREFILL_ROWS)
    before = host_copy((server.state.keys, server.state.values))
    # Two rows, of which one counts, and the rest: three rows are left of a request that asks for four.
    first, narrow = server.verify({2: [3, 4]}), other.verify({2: [3, 4]}, rows=2)
    assert_close(narrow[2], first[2], LOGITS)
    for one in (server, other):
        one.accept({2: 1})
        one.verify({2: [5, 6, 7, 8], 0: [1, 2, 3, 4]})
        assert one.state.pending.tolist() == [4, 0, 2]
        one.accept({2: 4, 0: 4})
        assert one.state.position.tolist() == [4, 0, config.max_length]
    for name, array in contents(server.state).items():
        assert_close(contents(other.state)[name], array, STATES, name)
    # Nothing but their own places was written.
    own = [server.state.page_table[0, 0] * config.page_size + np.arange(4)]
    own += [server.state.page_table[2, -1] * config.page_size + np.arange(1, config.page_size)]
    for cache, kept in zip((*server.state.keys, *server.state.values), [x for y in before for x in y], strict=True):
        changed = np.flatnonzero((np.asarray(cache) != kept).any(axis=(1, 2)))
        np.testing.assert_array_equal(changed, np.sort(np.concatenate(own)))


def test_padding_stores_nothing() -> None:
    for design in (("in_place", "record"), ("twin", "slots")):
        server = Verifier(config_of(design), params())
        server.prefill({0: [1, 2, 3], 1: [4], 2: [5, 6]}, PREFILL_ROWS)
        server.verify({r: [1, 2, 3] for r in range(3)})
        server.accept({0: 2, 1: 3, 2: 1})
        kept = host_copy(server.state)
        # A group without rows is padding as one without a request is: its checkpoint stays behind.
        batch = verify_batch(server.config, {1: [7, 8]}, GROUPS)
        batch = dataclasses.replace(batch, request=jnp.asarray([1, 0, -1, 2]), count=jnp.asarray([2, 0, 3, -1]))
        _, _, server.state = jit_verify(server.params, server.state, batch)
        assert server.state.pending.tolist() == [0, 2, 0]
        server.accept({0: 1, 1: 2, 2: 1})
        assert server.state.position.tolist() == [5, 6, 3]
        found, wanted = contents(server.state), contents(jax.tree.map(jnp.asarray, kept))
        for name in (n for n in found if n.endswith(("of 0", "of 2"))):
            assert_same_bits(found[name], wanted[name], name)
        for pool in server.state.recurrent:
            assert not np.any(pool[0])


@pytest.mark.parametrize("design", [("twin", "record"), ("twin", "slots")], ids="-".join)
def test_a_step_launches_one_kernel_of_the_rule_a_layer(design: tuple[str, str]) -> None:
    config = config_of(design).replace(kernels="interpret", head_dim=16)  # the least that attention takes
    kernels = {"record": "gated_delta_verify", "slots": "gated_delta_pages"}

    def launched(traced: Any) -> dict[str, int]:
        names = re.findall(r"\bname=(gated_delta_\w+|causal_conv_\w+|attention_\w+)", str(traced))
        return dict(Counter(names))

    shapes, state = abstract_params(config), state_shapes(config)
    traced = jax.make_jaxpr(verify_step)(shapes, state, verify_batch(config, {0: [1]}, 1))
    assert launched(traced) == {
        "causal_conv_packed": 2, kernels[design[1]]: 2,
        "attention_prologue": 1, "attention_segment": 1, "attention_combine": 1,
    }  # fmt: skip
    replays = launched(jax.make_jaxpr(prefill)(shapes, state, prefill_batch(config, {0: [1]}))).get(
        "gated_delta_replay"
    )
    assert replays == (2 if config.records else None)


def test_what_does_not_fit_is_refused() -> None:
    config, batch = config_of(("twin", "record")), verify_batch(PLAIN.replace(speculate=4), {0: [1]}, 1)
    shapes = abstract_params(config)
    with pytest.raises(ValueError, match="5 rows of a request with speculate = 3; it takes 1 to 4"):
        jax.eval_shape(verify_step, shapes, state_shapes(config), batch)
    with pytest.raises(ValueError, match="5 rows of a request with speculate = 0; it takes decode_step, or a config"):
        jax.eval_shape(verify_step, shapes, state_shapes(PLAIN), batch)
    with pytest.raises(ValueError, match="speculate = 3: the state takes verify_step"):
        jax.eval_shape(decode_step, shapes, state_shapes(config), decode_batch({0: 1}, 2))
    for pieces, arguments, message in (
        ({3: [1]}, {}, "request 3; it takes 0 to max_requests - 1 = 2"),
        ({0: []}, {}, "request 0 has 0 candidate rows; it takes 1 to 4"),
        ({0: [1] * 5}, {}, "request 0 has 5 candidate rows; it takes 1 to 4"),
        ({0: [32]}, {}, "token id 32; it takes 0 to"),
        ({0: [1], 1: [2]}, {"groups": 1}, "2 requests in 1 groups; raise groups or leave some out"),
    ):
        with pytest.raises(ValueError, match=message):
            verify_batch(config, pieces, **arguments)
