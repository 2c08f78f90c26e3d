"""The model with its kernels forced on, interpreted: prefill, decode and commit against Hugging Face's arrays.

dense_gva's value heads of 24 dimensions are no power of two, so its gated norm runs the reference.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax.state import Batch, init_state, prefill_batch
from gdnjax.weights.packing import pack
from tests.helpers import LOGITS, assert_close, golden_arrays, jit_commit, jit_decode_step, jit_prefill, load_golden


@pytest.mark.parametrize(("name", "layout", "packed"), [("dense_tied", "in_place", True), ("dense_gva", "twin", False)])
def test_decode_with_kernels_matches_hugging_face(name: str, layout: str, packed: bool) -> None:
    config, params = load_golden(name)
    config = config.replace(
        state_layout=layout, max_length=128, page_size=16, kernels="interpret", attention_pin=64, attention_segment=32
    )
    params = pack(params, config) if packed else params
    arrays = golden_arrays(name)
    ids, start = arrays["input_ids"][0], int(arrays["prefill_len"])
    logits, state = jit_prefill(params, init_state(config), prefill_batch(config, {2: ids[:start].tolist()}))
    got = [logits[2]]
    for token in ids[start:][:8]:
        # Padding first: a row's place in the batch must not matter.
        batch = Batch(jnp.array([0, token], jnp.int32), jnp.array([-1, 2], jnp.int32))
        logits, state = jit_decode_step(params, state, batch)
        state = jit_commit(state)
        got.append(logits[1])
    assert_close(np.stack(got), arrays["decode_logits"][0, : len(got)], LOGITS)
