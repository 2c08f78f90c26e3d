"""Guards: they lie between what requests own, every one is looked at, and a broken operation is named."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.config import Config, ConfigError
from gdnjax.diagnosis import guard
from gdnjax.diagnosis.guard import StrayWriteError, check_guards, guarded, spaced
from gdnjax.diagnosis.watch import Watch
from gdnjax.model import step as model_step
from gdnjax.state import State, init_state
from gdnjax.state import device as on_device
from tests.diagnosis.driving import DEEP, deep
from tests.helpers import LAYOUTS

pytestmark = pytest.mark.usefixtures("quick_compilation")

# In decode steps, and in verify steps on records and on slots.
OPERATIONS = {
    "recurrent": ("gated_delta_decode", "gated_delta_verify", "gated_delta_pages"),
    "conv": ("causal_conv_decode", "causal_conv_packed", "causal_conv_packed"),
    "keys": ("attention_prologue",) * 3,
    "values": ("attention_prologue",) * 3,
    "record": ("", "gated_delta_verify", ""),
}
ROWS = {
    "recurrent": "recurrent slot",
    "conv": "ring row",
    "keys": "page of keys",
    "values": "page of values",
    "record": "record",
}

layouts = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def guards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNJAX_GUARD", "1")


@functools.cache
def pattern(layout: str, design: str | None) -> State:
    """A guarded state as it begins, on the host."""
    config = DEEP.replace(state_layout=layout, mtp_num_hidden_layers=1, draft_kv=True)
    if design is not None:
        config = config.replace(speculate=2, speculative_state=design)
    return jax.device_get(guarded(init_state(spaced(config), [5, 0, 9])))


def owned(state: State) -> dict[str, set[int]]:
    """Rows that belong to the requests which are somebody's, and the reserved ones, by field."""
    requests = range(0, state.config.max_requests, 2)
    first = {int(slots[r]) for slots in (state.read_slot, state.write_slot) for r in requests}
    slots = {0} | {slot + i for slot in first for i in range(state.config.step_slots)}
    pages = set(range(1, state.config.kv_pages + 1, 2)) | {0}
    return {
        "recurrent": slots,
        "conv": {0} | {r + 1 for r in requests},
        "keys": pages,
        "values": pages,
        "record": set(requests),
    }


def arrays(state: State) -> list[tuple[str, int, Any, Callable[[Any], State]]]:
    """(field, index, array, what puts another array in its place) of all that is watched."""
    found: list[tuple[str, int, Any, Callable[[Any], State]]] = []
    for field in ("recurrent", "conv", "keys", "values"):
        layers = getattr(state, field)
        for i, array in enumerate(layers):

            def put(new: Any, field: str = field, layers: Any = layers, i: int = i) -> State:
                return dataclasses.replace(state, **{field: (*layers[:i], new, *layers[i + 1 :])})

            found.append((field, i, array, put))
    if state.record is not None:
        leaves, tree = jax.tree.flatten(state.record.layers)
        for i, array in enumerate(leaves):

            def put_record(new: Any, i: int = i) -> State:
                layers = jax.tree.unflatten(tree, [*leaves[:i], new, *leaves[i + 1 :]])
                return dataclasses.replace(state, record=dataclasses.replace(state.record, layers=layers))

            found.append(("record", i // 3, array, put_record))
    return found


@pytest.mark.parametrize(("design", "kind"), [(None, "decode"), ("record", "verify"), ("slots", "verify")])
@layouts
def test_every_row_that_nobody_owns_is_a_guard_and_no_other_is(layout: str, design: str | None, kind: str) -> None:
    state = pattern(layout, design)
    check_guards(state, 0, kind)
    for field, index, array, put in arrays(state):
        size = DEEP.page_size if field in ("keys", "values") else 1
        for row in range(array.shape[0] // size):
            changed = np.array(array)
            changed.reshape(-1, size, *array.shape[1:])[row, -1].reshape(-1)[-1] = 0.5
            changed = put(changed)
            if row in owned(state)[field] and (row or field == "record"):
                check_guards(changed, 0, kind)
                continue
            with pytest.raises(StrayWriteError, match=rf" {row} of ") as error:
                check_guards(changed, 7, kind)
            layer = (*DEEP.gdn_layers,) if field in ("recurrent", "conv", "record") else (*DEEP.attention_layers, None)
            where = "the draft head" if layer[index] is None else f"layer {layer[index]}"
            operation = OPERATIONS[field][(None, "record", "slots").index(design)]
            assert f"step 7 ({kind}): {operation} wrote {ROWS[field]} {row} of {where}, " in str(error.value)


# What steps and the pool do


def off_by_one(op: str, layer: int, shift: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes one layer's call of an operation of the model write elsewhere."""
    right, calls = getattr(model_step, op), []

    def broken(*arguments: Any) -> Any:
        calls.append(op)
        return right(*(shift(*arguments) if len(calls) == layer + 1 else arguments))

    monkeypatch.setattr(model_step, op, broken)


def behind(place: Any) -> Any:
    return jnp.where(place > 0, place + 1, place)


# Of a config that nobody has compiled for: initializer_range, which no step reads, is part of it.
def unseen(number: int) -> Config:
    return DEEP.replace(initializer_range=0.25 + number / 1000)


def decode_until_it_is_found(config: Config, steps: int) -> str:
    driver = deep(config)
    requests = [driver.pool.acquire(limit=12) for _ in range(2)]
    for _ in range(steps - 1):
        driver.step({requests[1]: 5})
    with pytest.raises(StrayWriteError) as error:
        driver.step({requests[1]: 5})
    return str(error.value)


@pytest.mark.usefixtures("guards")
def test_a_rule_that_writes_the_next_slot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(*arguments: Any) -> Any:
        *before, read_slot, write_slot, has_state, implementation = arguments
        return *before, read_slot, behind(write_slot), has_state, implementation

    off_by_one("gated_delta_decode", 1, shift, monkeypatch)
    # Request 2 of twelve slots writes 1 + 6 + 2 first.
    assert decode_until_it_is_found(unseen(1), 1) == (
        "step 0 (decode): gated_delta_decode wrote recurrent slot 10 of layer 2, a guard behind 9, which nobody owns"
    )


@pytest.mark.usefixtures("guards")
def test_a_convolution_that_writes_the_next_ring_row_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(x: Any, weight: Any, ring: Any, row: Any, *rest: Any) -> Any:
        return x, weight, ring, behind(row), *rest

    off_by_one("causal_conv_decode", 0, shift, monkeypatch)
    message = decode_until_it_is_found(unseen(2), 1)
    assert "causal_conv_decode wrote ring row 4 of layer 0, " in message


@pytest.mark.usefixtures("guards")
def test_keys_written_one_place_too_far_are_named_at_the_page_s_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(*arguments: Any) -> Any:
        *before, slot, keys, values, eps, implementation = arguments
        return *before, behind(slot), keys, values, eps, implementation

    off_by_one("attention_prologue", 1, shift, monkeypatch)
    message = decode_until_it_is_found(unseen(3), DEEP.page_size)
    assert message.startswith("step 3 (decode): attention_prologue wrote page of keys 2 of layer 3, ")


@pytest.mark.usefixtures("guards")
def test_a_prefill_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(*arguments: Any) -> Any:
        *before, segments, implementation = arguments
        return *before, dataclasses.replace(segments, slot=behind(segments.slot)), implementation

    off_by_one("gated_delta_prefill", 0, shift, monkeypatch)
    driver = deep(unseen(4))
    with pytest.raises(StrayWriteError, match=r"\(prefill\): gated_delta_prefill wrote recurrent slot 2 of layer 0, "):
        driver.start([1, 2, 3])


@pytest.mark.usefixtures("guards")
def test_a_call_of_the_pool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = deep()
    request, right = driver.pool.acquire(limit=4), on_device.run_clear
    monkeypatch.setattr(on_device, "run_clear", lambda state, request: right(state, request + 1))
    with pytest.raises(StrayWriteError, match=r"^step 0 \(release\): release of the pool wrote recurrent slot 2 of "):
        driver.pool.release(request)


# Limits and settings


def test_limits_that_leave_no_room_for_guards_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_requests = 80000; it takes an integer from 1 to 65,536"):
        spaced(DEEP.replace(max_requests=40000))


def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNJAX_GUARD", "yes")
    with pytest.raises(ValueError, match="GDNJAX_GUARD = 'yes'; it takes 0 or 1"):
        Watch(DEEP)


@pytest.mark.parametrize("value", ["", "0"])
def test_without_guards_nothing_is_looked_at(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDNJAX_GUARD", value)
    monkeypatch.delattr(guard, "_changed")
    watch, state = Watch(DEEP), init_state(DEEP)
    assert watch.config is DEEP and watch.begin(state) is state and not watch.on
    watch.after_step("decode", state)
    watch.after_call("release", state)
