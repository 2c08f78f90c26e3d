"""The compiled programs of an engine's steps: no copies of the state at any width, and sampling allocates nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from gdnjax.engine import programs, speculation
from gdnjax.state import init_state
from gdnjax.weights.declaration import abstract_params
from tests.generation.test_compiled import HARMLESS, SPECULATING, pools, whole_pool_operations


@pytest.mark.parametrize("width", [1, 3])
def test_a_verify_step_copies_no_pool(width: int) -> None:
    # Width 1 fills the draft head's cache without drafting.
    state, drafting = init_state(SPECULATING), speculation.new_drafting(SPECULATING, "mtp")
    rows = jnp.zeros(SPECULATING.max_requests, jnp.int32)
    params = abstract_params(SPECULATING)
    compiled = speculation.run_verify.lower(params, state, drafting, rows, rows, rows, width=width).compile()
    for name, elements in pools(state).items():
        found = whole_pool_operations(compiled, elements)
        assert found.keys() <= HARMLESS, f"{name}: {dict(found)}"
        # A record's step stores the checkpoint, the ring and the rows' keys and values.
        assert found["scatter"] >= 1, f"{name}: no update of {elements} elements is found, so nothing is tested"
    donated = compiled.memory_analysis().alias_size_in_bytes
    assert donated >= sum(leaf.nbytes for leaf in jax.tree.leaves((state, drafting)))


@pytest.mark.parametrize("mode", programs.MODES)
def test_a_draw_takes_no_memory(mode: programs.Mode) -> None:
    rows, vocab = SPECULATING.max_requests, SPECULATING.vocab_size
    slate, spent = programs.new_slate(SPECULATING), jnp.zeros((2, rows), jnp.int32)
    logits, request = jnp.zeros((rows, vocab)), jnp.zeros(rows, jnp.int32)
    compiled = programs.run_draw.lower(slate, logits, request, spent, mode=mode).compile()
    donated = compiled.memory_analysis().alias_size_in_bytes
    assert donated >= sum(leaf.nbytes for leaf in jax.tree.leaves((slate, spent)))
