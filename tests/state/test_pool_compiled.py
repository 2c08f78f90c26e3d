"""The pool's device functions as compiled: no copy of the state, memory that does not grow, no retrace."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from gdnjax.config import Config
from gdnjax.state import device as on_device
from gdnjax.state import state_shapes
from gdnjax.state.pool import StatePool, run_commit, run_commit_verified, run_replay
from gdnjax.weights.declaration import abstract_params
from tests.model.test_compiled import config_of, copied_sizes, smallest_array, state_bytes
from tests.state.pools import Driver, micro, tokens

SNAPSHOTS = 512


def shapes(*dims: int) -> Any:
    return jax.ShapeDtypeStruct(dims, jnp.int32)


def programs(config: Config) -> dict[str, Any]:
    """Every device function, compiled; the second entry says whether it donates the state."""
    state, number, row = state_shapes(config), shapes(), shapes(config.pages_per_request)
    group = shapes(on_device.PAGES_PER_COPY)
    store = jax.eval_shape(lambda: on_device.snapshot_store(config, SNAPSHOTS))
    moment = jax.eval_shape(on_device.carried, state, number)
    kv = jax.eval_shape(on_device.read_pages, state, group)
    calls = {
        "carried": (on_device.run_carried, (state, number)),
        "read_pages": (on_device.run_read_pages, (state, group)),
        "place": (on_device.run_place, (state, number, moment, number, row)),
        "fork": (on_device.run_fork, (state, number, number, row)),
        "clear": (on_device.run_clear, (state, number)),
        "discard": (on_device.run_discard, (state,)),
        "resume": (on_device.run_resume, (state, store, number, number, number, row)),
        "write_table": (on_device.run_write_table, (state.page_table, shapes(8, 3))),
        "copy_pages": (on_device.run_copy_pages, (state, group, group)),
        "write_pages": (on_device.run_write_pages, (state, group, *kv)),
        "store": (on_device.run_store, (store, state, number, number)),
    }
    return {name: function.lower(*arguments).compile() for name, (function, arguments) in calls.items()}


@pytest.mark.newest
def test_nothing_of_the_size_of_the_state_is_copied() -> None:
    few, many = (programs(config_of("twin", requests)) for requests in (8, 512))
    config = config_of("twin", 512)
    smallest = smallest_array(config)
    moment = on_device.snapshot_bytes(config)
    for name, program in many.items():
        memory = program.memory_analysis()
        assert max(copied_sizes(program), default=0) < smallest, name
        # At most what one request carries, and a few numbers a request.
        grown = memory.temp_size_in_bytes - few[name].memory_analysis().temp_size_in_bytes
        assert memory.temp_size_in_bytes < 2 * moment + 16384, name
        assert grown <= 16 * 504, name
        if name == "store":
            assert memory.alias_size_in_bytes >= SNAPSHOTS * moment
        elif name == "write_table":
            assert memory.alias_size_in_bytes >= 4 * 512 * config.pages_per_request
        elif name not in ("carried", "read_pages"):
            # `pending` is not read by a function that only writes it, so jit drops it from the arguments.
            assert memory.alias_size_in_bytes >= state_bytes(config) - 4 * 512, name


@pytest.mark.parametrize("speculative", ["record", "slots"])
def test_speculation_copies_nothing_of_that_size_either(speculative: str) -> None:
    for requests in (8, 512):
        config = config_of("twin", requests, speculate=3, speculative_state=speculative)
        state, number, row = state_shapes(config), shapes(), shapes(config.pages_per_request)
        params: Any = abstract_params(config)
        calls = {
            "commit": (run_commit_verified, (state, shapes(requests))),
            "clear": (on_device.run_clear, (state, number)),
            "fork": (on_device.run_fork, (state, number, number, row)),
            "replay": (run_replay, (params, state, shapes(1))),
        }
        for name, (function, arguments) in calls.items():
            program = function.lower(*arguments).compile()
            memory = program.memory_analysis()
            assert max(copied_sizes(program), default=0) < smallest_array(config), name
            # What one request carries, the slots of one step, a few numbers a request.
            most = (1 + config.verify_rows) * on_device.snapshot_bytes(config) + 16384 + 16 * requests
            assert memory.temp_size_in_bytes < most, (name, memory.temp_size_in_bytes)
            assert memory.alias_size_in_bytes >= state_bytes(config) - 4 * requests, name


def test_one_compiled_shape_each() -> None:
    functions = {name: f for name, f in vars(on_device).items() if name.startswith("run_")}
    functions["run_commit"] = run_commit
    for function in functions.values():
        function.clear_cache()
    d = Driver(micro())
    for i in range(3):
        prompt = tokens(8 + 4 * (i % 2), i)
        r = d.start(prompt)
        d.pool.remember(r, prompt)
        child = d.pool.fork(r)
        third = d.pool.acquire(30, prompt=[*prompt, 1])
        d.step({child: 2, r: 1})
        d.pool.release(third)
        again = d.pool.restore(d.pool.snapshot(child), 30)
        d.feed(r, tokens(5))
        d.step({again: 3}, commit=False)
        d.pool.discard()
        d.pool.reset(r)
        for request in d.pool.live:
            d.pool.release(request)
        # half a page shared, and copied when it is written
        r = d.start(tokens(6))
        d.step({d.pool.fork(r): 1, r: 2})
        for request in d.pool.live:
            d.pool.release(request)
    assert {name: f._cache_size() for name, f in functions.items()} == dict.fromkeys(functions, 1)


def test_every_array_of_a_pool_is_one_of_its_own() -> None:
    pool = StatePool(micro())
    leaves = [*jax.tree.leaves(pool.state), *jax.tree.leaves(pool._store)]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
