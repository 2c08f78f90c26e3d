"""This package's own functions over the state, as a pool and the engine bind them."""

from __future__ import annotations

from gdnjax.model.step import decode_step, prefill
from gdnjax.model.verify import verify_step
from gdnjax.state.backend import Backend

BACKEND = Backend("gdnjax", prefill, decode_step, verify_step)
"""They take every layout: what the pool and the engine step with unless told otherwise."""
