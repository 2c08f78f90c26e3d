"""The state pytree, batches, and the pure functions over them."""

from gdnjax.state.batch import Batch, VerifyBatch, prefill_batch, verify_batch
from gdnjax.state.pytree import State, cached_kv, commit, conv_window, init_state, recurrent_state, state_shapes
from gdnjax.state.speculation import commit_verified

__all__ = [
    "Batch",
    "State",
    "VerifyBatch",
    "cached_kv",
    "commit",
    "commit_verified",
    "conv_window",
    "init_state",
    "prefill_batch",
    "recurrent_state",
    "state_shapes",
    "verify_batch",
]
