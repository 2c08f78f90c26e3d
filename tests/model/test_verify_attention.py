"""A verify step's attention reads the keys of a request once for all of its rows."""

from __future__ import annotations

import jax

from gdnjax.model import verify_step
from gdnjax.state import state_shapes, verify_batch
from gdnjax.weights.declaration import abstract_params
from tests.state.pools import MICRO


def test_programs_are_of_requests_not_of_rows() -> None:
    config = MICRO.replace(kernels="interpret", head_dim=16, dtype="bfloat16", speculate=3)
    batch = verify_batch(config, {0: [1, 2, 3, 4], 1: [5]})
    traced = jax.make_jaxpr(verify_step)(abstract_params(config), state_shapes(config), batch)
    launches = [e.params for e in traced.eqns if e.primitive.name == "pallas_call"]
    grids = [p["grid_mapping"].grid for p in launches if "attention_segment" in str(p["name"])]
    segments = config.attention_pin // config.attention_segment
    assert grids == [(2 * config.num_key_value_heads, segments)] * config.layer_types.count("full_attention")
