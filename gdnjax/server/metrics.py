"""What Prometheus reads: counts and gauges as the engine has them, and times that are taken as tokens come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gdnjax.engine import Engine

_FIRST = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
REASONS = ("stop", "length", "cancelled", "deadline", "error")

_COUNTERS = {
    "prompt_tokens": "Prompt tokens of ended requests",
    "prefill_tokens": "Prompt tokens read, those read again after a preemption included",
    "generated_tokens": "Tokens generated",
    "decode_steps": "Decode steps",
    "drafted_tokens": "Drafts that decode steps verified",
    "accepted_tokens": "Drafts that became tokens",
    "preemptions": "Requests that were sent back to wait for KV pages",
    "prefix_hits": "Requests that resumed from a shared prefix",
    "prefix_tokens": "Prompt tokens that were not read, being a shared prefix",
}


class Metrics:
    """The metrics of one server, in a registry of their own."""

    def __init__(self, engine: Engine, time_of: Callable[[], float] = time.monotonic):
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine))
        self._time = time_of
        self.first = Histogram(
            "gdnjax_time_to_first_token_seconds",
            "From a request's arrival to its first token",
            buckets=_FIRST,
            registry=self.registry,
        )
        self.between = Histogram(
            "gdnjax_inter_token_latency_seconds",
            "Between two tokens of a request",
            buckets=_BETWEEN,
            registry=self.registry,
        )
        self.refused = Counter(
            "gdnjax_requests_refused", "Requests answered with an error", ["status"], registry=self.registry
        )
        self.step_errors = Counter("gdnjax_step_errors", "Steps of the engine that failed", registry=self.registry)

    def clock(self) -> Clock:
        """The times of a request that arrives now."""
        return Clock(self, self._time)

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)


class Clock:
    """Takes the times of one request's tokens."""

    def __init__(self, metrics: Metrics, time_of: Callable[[], float]):
        self._metrics, self._time, self._last, self._began = metrics, time_of, time_of(), False

    def tick(self) -> None:
        """A token has come."""
        now = self._time()
        (self._metrics.between if self._began else self._metrics.first).observe(now - self._last)
        self._last, self._began = now, True


class _EngineCollector(Collector):
    def __init__(self, engine: Engine):
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        pages, requests = engine.pool.pages, engine.config.max_requests
        for name, text, value in (
            ("requests_running", "Requests that have been admitted", engine.running),
            ("requests_waiting", "Requests that wait to be admitted", engine.waiting),
            ("requests_limit", "Requests that can run at once", requests),
            ("requests_free", "Requests that could be admitted beside those that run", engine.pool.requests.free),
            ("kv_pages_used", "KV pages that requests or prefixes hold", pages.count - pages.free),
            ("kv_pages_idle", "KV pages that only prefixes hold, free when needed", pages.idle),
            ("kv_pages_limit", "KV pages there are", pages.count),
        ):
            yield GaugeMetricFamily(f"gdnjax_{name}", text, value=value)
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"gdnjax_{name}", text, value=engine.counters[name])
        finished = CounterMetricFamily("gdnjax_requests_finished", "Ended requests by reason", labels=["reason"])
        for reason in REASONS:
            finished.add_metric([reason], engine.counters[f"finished_{reason}"])
        yield finished
