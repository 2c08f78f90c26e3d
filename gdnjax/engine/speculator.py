"""The launcher of an engine that speculates: its decode steps verify drafts.

How many tokens a step gives, only the device knows; and a plan needs positions. So before a step is planned, `settle`
waits for the one before it. Prompts are read, and tokens handed out, while the device works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from gdnjax.engine import speculation
from gdnjax.engine.handle import Handle
from gdnjax.engine.launcher import Fetch, Launcher, VerifyFlight, masks_of_all
from gdnjax.engine.pace import Pace
from gdnjax.engine.programs import MODES, Mode
from gdnjax.engine.scheduler import row_buckets, smallest
from gdnjax.engine.speculation import Verdict
from gdnjax.generation.accept import NOTHING
from gdnjax.generation.drafting import Source
from gdnjax.generation.prompts import prefill_with_head
from gdnjax.state.batch import Batch
from gdnjax.state.pool import StatePool
from gdnjax.state.pytree import State
from gdnjax.state.requests import Plan
from gdnjax.weights.declaration import Params


class Speculator(Launcher):
    """A `Launcher` over a pool whose config has `speculate`.

    Args:
        params, pool: as `Launcher` takes them.
        source: where drafts come from; `mtp` takes a config with `draft_kv`.
        pace: chooses how many drafts a step verifies; None verifies all that requests may take.
    """

    def __init__(self, params: Params, pool: StatePool, source: Source, pace: Pace | None = None):
        super().__init__(params, pool)
        config = pool.config
        # A step holds all that decode: the pool has one step at a time that is not committed.
        self.row_buckets = row_buckets(pool.requests.most, pool.requests.most)
        self._source: Source = source
        self._drafting = speculation.new_drafting(config, source)
        self._everything = masks_of_all([*self.row_buckets, self.pieces], config.vocab_size)
        self._pace = pace
        self._widths = [config.verify_rows] if pace is None else pace.widths
        self._silent = {
            (rows, width): speculation.new_verdict(rows, width) for rows in self.row_buckets for width in self._widths
        }
        self._unsettled: tuple[Plan, VerifyFlight] | None = None

    def _plain_rows(self) -> Sequence[int]:
        return ()

    def admit(self, handle: Handle) -> None:
        super().admit(handle)
        if self._source == "ngram":
            assert handle.request is not None
            text = np.zeros(self.pool.config.max_length, np.int32)
            text[: len(handle.to_read)] = handle.to_read
            self._drafting = speculation.run_admit_history(self._drafting, np.int32(handle.request), text)

    def plan(self, requests: Sequence[int], handles: Mapping[int, Handle]) -> list[Plan]:
        """One step of all of them: the drafts that each may take, but none behind its last token, and no more than are
        worth their time."""
        most = {r: min(h.speculate, h.max_new_tokens - h.sent - 1) for r in requests for h in [handles[r]]}
        width = self._widths[-1]
        if self._pace is not None:
            rows = smallest(self.row_buckets, len(requests))
            width = self._pace.choose(rows, [(drafts, handles[r].fate.rate) for r, drafts in most.items()])
        return [self.pool.plan_verify({r: 1 + min(drafts, width - 1) for r, drafts in most.items()})]

    def read(self, plan: Plan, handles: Mapping[int, Handle]) -> None:
        if self._pace is not None:
            self._pace.disturb()
        super().read(plan, handles)

    def settle(self, fetch: Fetch) -> None:
        """Waits for the last step, and notes how many tokens it gave to those who still run."""
        if self._unsettled is None:
            return
        (plan, flight), self._unsettled = self._unsettled, None
        tokens, drafted = fetch(flight.verdict.token, flight.drafted)
        if self._pace is not None:
            self._pace.end()
        accepted = {}
        for request, handle, row, drafts in zip(plan.requests, flight.handles, tokens, drafted, strict=False):
            if request in self.pool.pending:
                accepted[request] = sum(token != NOTHING for token in row)
                handle.sent += accepted[request]
                handle.fate.note(drafts, max(0, accepted[request] - 1))
        self.pool.commit(accepted, on_device=True)

    def receives_first(self, handles: Iterable[Handle]) -> bool:
        # A step is judged as it runs, so that nothing can be drawn behind it.
        return any(handle.matcher is not None for handle in handles)

    def decode(self, plan: Plan, handles: Mapping[int, Handle]) -> None:
        """Candidate rows of each of the plan's requests, of which the device takes what it accepts."""
        rows, width = smallest(self.row_buckets, len(plan.requests)), smallest(self._widths, max(plan.counts))
        owners = tuple(handles[request] for request in plan.requests)
        numbers = [*plan.requests, *[-1] * (rows - len(owners))]
        counts = [*plan.counts, *[0] * (rows - len(owners))]
        modes: dict[Mode, list[int]] = {
            mode: [request if i < len(owners) and owners[i].mode == mode else -1 for i, request in enumerate(numbers)]
            for mode in (*MODES, "constrained")
            if any(handle.mode == mode for handle in owners)
        }

        def step(state: State) -> tuple[tuple[Verdict, jax.Array], State]:
            return self._step(state, numbers, counts, modes, width, owners)

        if self._pace is not None:
            self._pace.begin(rows, width)
        verdict, drafted = self.pool.run(plan, step, commits="some")
        for array in (verdict.token, verdict.logprob, drafted):
            array.copy_to_host_async()
        flight = VerifyFlight(verdict, drafted, owners)
        self.flights.append(flight)
        self._unsettled = plan, flight

    def _step(
        self,
        state: State,
        numbers: Sequence[int],
        counts: Sequence[int],
        modes: Mapping[Mode, Sequence[int]],
        width: int,
        owners: Sequence[Handle],
    ) -> tuple[tuple[Verdict, jax.Array], State]:
        request, count = self._on_device(numbers), self._on_device(counts)
        (found, self._drafting), state = speculation.run_verify(
            self.params, state, self._drafting, self.slate.token, request, count, width=width
        )
        verdict = self._silent[len(numbers), width]
        for mode, theirs in modes.items():
            program, allowed = self._program(mode, owners, len(numbers))
            self.slate, verdict = speculation.run_judge(
                self.slate, found, verdict, self._on_device(theirs), mode=program, allowed=allowed
            )
        self._drafting, state = speculation.run_keep(self.params, state, self._drafting, found, verdict, request)
        return (verdict, found.drafted), state

    def _prefill(self, state: State, batch: Batch, behind: Mapping[int, int | None]) -> tuple[jax.Array, State]:
        if self._source == "ngram":
            return super()._prefill(state, batch, behind)
        (logits, newest), state = prefill_with_head(self.params, state, batch, self._following(behind))
        self._keep_hidden(newest, behind)
        return logits, state

    def _score(
        self, state: State, batch: Batch, targets: np.ndarray, behind: Mapping[int, int | None]
    ) -> tuple[tuple[jax.Array, jax.Array], State]:
        if self._source == "ngram":
            return super()._score(state, batch, targets, behind)
        (logits, newest, scores), state = speculation.run_score_with_head(
            self.params, state, batch, targets, self._following(behind)
        )
        self._keep_hidden(newest, behind)
        return (logits, scores), state

    def _following(self, behind: Mapping[int, int | None]) -> np.ndarray:
        # By request; -1 where the token behind is not known yet: the first drafts do that row.
        following = np.full(self.pool.config.max_requests, -1, np.int32)
        for request, token in behind.items():
            following[request] = -1 if token is None else token
        return following

    def _keep_hidden(self, newest: jax.Array, behind: Mapping[int, int | None]) -> None:
        complete = [request if token is None else -1 for request, token in behind.items()]
        complete += [-1] * (self.pieces - len(complete))
        self._drafting = speculation.run_keep_hidden(self._drafting, newest, self._on_device(complete))

    def warming(self) -> Iterator[Callable[[], Any]]:
        yield from self._warm_reading()
        # The first token behind a prompt is drawn, and all others are judged.
        for rows in self.row_buckets:
            for width in self._widths:
                yield lambda rows=rows, width=width: self._warm_verify(rows, width)

    def _warm_admission(self) -> None:
        super()._warm_admission()
        if self._source == "ngram":
            text = np.zeros(self.pool.config.max_length, np.int32)
            self._drafting = speculation.run_admit_history(self._drafting, np.int32(0), text)

    def _warm_verify(self, rows: int, width: int) -> None:
        nobody = [-1] * rows
        modes = dict.fromkeys(MODES, nobody)
        self.pool.run((), lambda state: self._step(state, nobody, [0] * rows, modes, width, ()))
