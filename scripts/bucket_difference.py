"""How much the number of rows that a step is compiled for moves a request's logits.

    python scripts/bucket_difference.py
    python scripts/bucket_difference.py --config 0.8b --platform cuda

Within one number of rows a request's logits are the same bits whatever the other rows hold. With another number the
compiler may sum in another order. This feeds one request the same tokens through decode steps of 1, 2, 4, ... rows, and
through prefill windows padded to 16, 64, ... tokens, each from a state of its own, and compares the logits with those
of the largest: largest difference, and where another token is the best one, by how much the two differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

from gdnjax.config import Config
from gdnjax.engine import programs
from gdnjax.engine.scheduler import row_buckets, token_buckets
from gdnjax.state.batch import Batch
from gdnjax.state.pytree import State, init_state
from gdnjax.weights.declaration import Params


def read(params: Params, state: State, ids: Sequence[int], rows: int) -> tuple[np.ndarray, State]:
    """Reads a prompt in windows of at most `rows` tokens, padded to `rows`: logits `[V]` behind it, and the state."""
    logits: Any = None
    for start in range(0, len(ids), rows):
        piece = ids[start : start + rows]
        tokens, request = np.zeros(rows, np.int32), np.full(rows, -1, np.int32)
        tokens[: len(piece)], request[: len(piece)] = piece, 0
        arrays: Any = (tokens, request, np.array([len(piece) - 1], np.int32))
        logits, state = programs.run_prefill(params, state, Batch(*arrays))
    return np.asarray(logits)[0], state


def decode_logits(params: Params, config: Config, prompt: Sequence[int], ids: Sequence[int], rows: int) -> np.ndarray:
    """Logits `[T, V]` of steps of `rows` rows that feed one request `ids`; the other rows feed token 0 to others."""
    state, logits = init_state(config), jax.numpy.zeros((rows, config.vocab_size), jax.numpy.float32)
    _, state = read(params, state, prompt, config.prefill_tokens)
    request, found = np.arange(rows, dtype=np.int32), []
    for token in ids:
        fed = np.zeros(config.max_requests, np.int32)
        fed[0] = token
        logits, state = programs.run_decode(params, state, logits, jax.numpy.asarray(fed), request)
        found.append(np.asarray(logits)[0])
    return np.stack(found)


def window_logits(params: Params, config: Config, prompt: Sequence[int], rows: int, lengths: Sequence[int]) -> Any:
    """Logits `[T, V]` behind beginnings of a prompt, each read in windows of at most `rows` tokens."""
    return np.stack([read(params, init_state(config), prompt[:length], rows)[0] for length in lengths])


def compare(found: np.ndarray, wanted: np.ndarray) -> dict[str, Any]:
    """Logits `[T, V]` of one bucket against another's: `largest` difference, `flips` (rows whose best token is another
    one) and `gaps`: of those, by how much `wanted` prefers its own."""
    best, other = wanted.argmax(-1), found.argmax(-1)
    rows = np.flatnonzero(best != other)
    gaps = wanted[rows, best[rows]] - wanted[rows, other[rows]]
    return {
        "largest": float(np.abs(found - wanted).max()),
        "flips": len(rows),
        "gaps": [round(float(gap), 8) for gap in gaps],
    }


def study(params: Params, config: Config, steps: int, seed: int = 0) -> dict[str, Any]:
    """`decode` and `prefill`: by number of rows, `compare` with the largest one, over `steps` tokens."""
    rng = np.random.default_rng(seed)
    longest = config.max_length - steps
    prompt = rng.integers(0, min(250, config.vocab_size), longest).tolist()
    ids = rng.integers(0, min(250, config.vocab_size), steps).tolist()
    lengths = sorted({max(1, longest * (i + 1) // min(8, steps)) for i in range(min(8, steps))})
    decoded = {rows: decode_logits(params, config, prompt, ids, rows) for rows in row_buckets(config.max_requests)}
    windows = {
        rows: window_logits(params, config, prompt, rows, lengths) for rows in token_buckets(config.prefill_tokens)
    }
    return {
        name: {str(rows): compare(logits, by_rows[max(by_rows)]) for rows, logits in by_rows.items()}
        for name, by_rows in (("decode", decoded), ("prefill", windows))
    }


def main() -> int:
    from gdnjax.cli.source import add_source, load_model

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_source(parser)
    parser.add_argument("--rows", type=int, default=64, help="largest decode step (64)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps (64)")
    args = parser.parse_args()
    lm = load_model(args)
    config = lm.config.replace(max_requests=args.rows, max_length=args.max_length or 320, kv_tokens=None)
    report = {"device": jax.devices()[0].device_kind, "dtype": config.dtype}
    print(json.dumps({**report, **study(lm.params, config, args.steps)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
