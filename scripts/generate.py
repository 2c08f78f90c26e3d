"""Greedy generation as a plain loop on the pure functions: copy it and change it.

python scripts/generate.py "It was a fine morning" --tokens 40
"""

from __future__ import annotations

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np

import gdnjax

# Donated: every step updates the state where it lies.
jit_with_state = functools.partial(jax.jit, donate_argnames="state")


@jit_with_state
def start(params: gdnjax.Params, state: gdnjax.State, batch: gdnjax.Batch) -> tuple[jax.Array, gdnjax.State]:
    """Runs the prompts; the first new token of every request."""
    logits, state = gdnjax.prefill(params, state, batch)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), state


@jit_with_state
def step(params: gdnjax.Params, state: gdnjax.State, tokens: jax.Array) -> tuple[jax.Array, gdnjax.State]:
    """Feeds one token of every request; the next one of each."""
    requests = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    logits, state = gdnjax.decode_step(params, state, gdnjax.Batch(tokens, requests))
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), gdnjax.commit(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tokens", type=int, default=40)
    args = parser.parse_args()
    lm = gdnjax.load(args.model, max_requests=len(args.prompts))
    assert lm.tokenizer is not None
    params = gdnjax.pack(lm.params, lm.config)  # fewer, larger products; params itself works too
    prompts = {i: lm.tokenizer.encode(text) for i, text in enumerate(args.prompts)}

    state = gdnjax.init_state(lm.config)
    tokens, state = start(params, state, gdnjax.prefill_batch(lm.config, prompts))
    new = [tokens]
    for _ in range(args.tokens - 1):
        tokens, state = step(params, state, tokens)
        new.append(tokens)
    for i, text in enumerate(args.prompts):
        print(text + lm.tokenizer.decode(np.stack(new)[:, i].tolist()))


if __name__ == "__main__":
    main()
