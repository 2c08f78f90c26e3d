"""The compiled programs of a speculating engine's step: no copies of the state at any width."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from gdnjax.engine import speculation
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
