"""Whether a pool's bookkeeping agrees with itself, and with the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gdnjax.state.pages import Pages
from gdnjax.state.prefix_cache import PrefixCache
from gdnjax.state.pytree import State
from gdnjax.state.requests import Requests


def check_books(requests: Requests, pages: Pages, prefixes: PrefixCache) -> None:
    """Raises AssertionError where the bookkeeping contradicts itself."""
    requests.check()
    assert set(pages.requests) == set(requests.live), "requests with pages"
    for request in requests.live:
        held, position = len(pages.held(request)), requests.get(request).position
        assert held >= pages.for_tokens(position), f"request {request}: {held} pages, {position} tokens"
    pages.check()
    prefixes.check()


def check_device(state: State, requests: Requests, page_table: Sequence[np.ndarray]) -> None:
    """Raises AssertionError where the device's small vectors are not what the books say, or where slot 0 or ring row 0
    was written. Waits for the device.

    page_table: by request, as the books have it.
    """
    ones = [requests.get(r) if r in requests.live else None for r in range(state.config.max_requests)]
    expected = {
        "position": [one.position if one else 0 for one in ones],
        "pending": [one.pending if one else 0 for one in ones],
        "read_slot": requests.read,
        "write_slot": requests.write,
        "page_table": page_table,
    }
    found = {name: getattr(state, name) for name in expected}
    if state.record is not None:
        expected["rows to replay"] = [one.lag if one else 0 for one in ones]
        found["rows to replay"] = state.record.recorded.replayed
    for name, wanted in expected.items():
        there = np.asarray(found[name])
        assert np.array_equal(there, wanted), f"{name}: {there.tolist()} on the device, {wanted} here"
    for array in (*state.recurrent, *state.conv):
        assert not np.any(np.asarray(array[0])), "slot 0 or ring row 0 was written"
