"""How many drafts the steps of an engine verify, from how many are accepted and from how long steps take.

All requests share a step, and how many rows each has in it, its *width*, is one number: 1 is plain decoding. More rows
give more tokens, as far as drafts are accepted, and take longer, by how much depends on the device, the model and the
number of requests. So both are measured, and the width with the most tokens a second is taken.

* Tokens: with drafts accepted at rate a, a request that takes k of them is expected to get 1 + a + ... + a^k
  (Leviathan et al., 2023, equation 1). The rate is the request's own (`Fate`).
* Seconds: the median of the last steps of the shape. A step counts while nothing but its own work is in its time.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

from gdnjax.generation.adapt import FADING, GUESS

ENOUGH = 3
"""Timed steps of a shape before it is judged."""
KEPT = 5
"""Timed steps of a shape that are remembered."""
PATIENCE = 16
"""Steps of a shape after which it is judged by what has been timed, as prompts between them may spoil all of them."""
REVISIT = 256
"""Steps of so many rows after which a width that was not taken is timed once more."""


@dataclasses.dataclass
class Fate:
    """How a request's drafts have fared of late: fading counts, as in `gdnjax.generation.adapt`."""

    accepted: float = 0.0
    judged: float = 0.0

    def note(self, drafted: int, accepted: int) -> None:
        """After a step that verified `drafted` drafts and accepted `accepted` of them."""
        self.accepted = FADING * self.accepted + accepted
        self.judged = FADING * self.judged + min(accepted + 1, drafted)

    @property
    def rate(self) -> float:
        """Of drafts behind none that was rejected, those that are accepted."""
        return (self.accepted + GUESS[0]) / (self.judged + GUESS[1])


@dataclasses.dataclass
class _Timing:
    seconds: collections.deque[float] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=KEPT))
    begun: int = 0
    last: int = 0


class Pace:
    """Chooses the width of each step.

    Args:
        most: most drafts of a request, at least 1.
        clock: seconds.

    Attributes:
        widths: what there is to choose from, in order: each is a program of its own.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.perf_counter):
        self.widths = widths_of(most)
        self._clock = clock
        self._timings: dict[tuple[int, int], _Timing] = {}
        self._steps: collections.Counter[int] = collections.Counter()
        self._running: tuple[_Timing, float] | None = None

    def choose(self, rows: int, wishes: Sequence[tuple[int, float]]) -> int:
        """The width of the next step.

        Args:
            rows: requests that the step's program has room for.
            wishes: of each request of the step, the most drafts that it may take and its `Fate.rate`.
        """
        widest = max(drafts for drafts, _ in wishes)
        widths = [width for i, width in enumerate(self.widths) if i == 0 or self.widths[i - 1] <= widest]
        timings = {width: self._timings.get((rows, width), _Timing()) for width in widths}
        for width, timing in timings.items():
            if len(timing.seconds) < ENOUGH and timing.begun < PATIENCE:
                return width
        for width, timing in timings.items():
            if self._steps[rows] - timing.last > REVISIT:
                return width
        known = [width for width in widths if timings[width].seconds]
        if not known:
            return widths[-1]
        return max(known, key=lambda width: tokens(width, wishes) / statistics.median(timings[width].seconds))

    def begin(self, rows: int, width: int) -> None:
        """A step is about to be launched."""
        timing = self._timings.setdefault((rows, width), _Timing())
        self._steps[rows] += 1
        timing.begun += 1
        timing.last = self._steps[rows]
        self._running = timing, self._clock()

    def disturb(self) -> None:
        """Something else runs on the device beside the step, whose time is not noted therefore."""
        self._running = None

    def end(self) -> None:
        """The step has ended."""
        if self._running is not None:
            timing, begun = self._running
            timing.seconds.append(self._clock() - begun)
        self._running = None


def widths_of(most: int) -> list[int]:
    """1, 2, 4, and room for `most` drafts: few enough to compile a program for each number of requests and width."""
    return sorted({width for width in (1, 2, 4) if width < 1 + most} | {1 + most})


def tokens(width: int, wishes: Sequence[tuple[int, float]]) -> float:
    """What a step of this width is expected to give all requests; `wishes` as in `Pace.choose`."""
    return sum(rate**i for most, rate in wishes for i in range(1 + min(most, width - 1)))
