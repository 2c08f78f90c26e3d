"""Clients that ask, listen, leave and come back for as long as you like; then nothing may be left of them.

    python scripts/soak.py --minutes 10 --out docs/results/soak_cpu.json
    python scripts/soak.py --config 0.8b --max-requests 64 --clients 96 --minutes 10
    python scripts/soak.py --burst 200 --max-requests 8 --max-waiting 16
    python scripts/soak.py --url http://127.0.0.1:8000 --pid PID --near-tie 0.001 --minutes 10

Every answer is greedy and must be the one that the same request gets alone, up to a near-tie of the two best tokens,
whose gap is reported. At the end no slot, page or array may be left (of a server: what its /metrics say), and memory
must not have grown. One JSON object with everything that was found goes to --out, else to stdout; exit code 0 means
that nothing failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from soak_targets import Answer, Ask, EngineTarget, ServerTarget, Target

NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.25}
"""Log-probabilities of two greedy choices that differ by less are a tie that rounding decides."""
GROWTH = 32 * 2**20
"""Bytes that the resident memory may grow by after the first quarter: allocators keep some of what was free."""


def asks(count: int, longest: int, new_tokens: int, seed: int) -> list[Ask]:
    """Requests with prompts of 1 to `longest` tokens, some with a beginning in common."""
    rng = random.Random(seed)
    draw = lambda n: tuple(rng.randrange(250) for _ in range(n))  # noqa: E731
    shared = draw(longest // 2)
    found = []
    for number in range(count):
        length = max(1, int(longest * rng.random() ** 2))  # many are short
        prompt = (shared + draw(length // 2 + 1))[:longest] if number % 4 == 0 else draw(length)
        found.append(Ask(prompt, rng.randint(1, new_tokens)))
    return found


@dataclasses.dataclass
class Findings:
    """What clients have found so far; `note` and `fail` may be called from any thread."""

    counts: Counter[str] = dataclasses.field(default_factory=Counter)
    near_ties: list[float] = dataclasses.field(default_factory=list)
    failures: list[str] = dataclasses.field(default_factory=list)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def note(self, answer: Answer, alone: Answer, near_tie: float) -> None:
        """Counts an answer, and compares it with what the same request gets alone."""
        with self._lock:
            self.counts[answer.outcome] += 1
            self.counts["tokens"] += len(answer.tokens)
            for place, ((a, p), (b, q)) in enumerate(zip(answer.tokens, alone.tokens, strict=False)):
                if a != b:
                    gap = abs(p - q)
                    self.near_ties.append(gap)
                    if not gap < near_tie:
                        self.failures.append(f"token {place} is {a!r}, alone {b!r}, gap {gap:.3g}")
                    return
            if answer.outcome == "complete" and len(answer.tokens) != len(alone.tokens):
                self.failures.append(f"{len(answer.tokens)} tokens, alone {len(alone.tokens)}")

    def fail(self, failure: BaseException) -> None:
        with self._lock:
            self.failures.append(f"{type(failure).__name__}: {failure}")


def soak(
    target: Target, requests: Sequence[Ask], clients: int, seconds: float, near_tie: float, seed: int = 0
) -> dict[str, Any]:
    """Runs clients against a target for so long. Returns the report; `failures` is empty if all went well."""
    alone = [target.ask(ask) for ask in requests]
    findings, end = Findings(), time.monotonic() + seconds

    def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end and not findings.failures:
            which = rng.randrange(len(requests))
            leave_after = rng.randrange(requests[which].new_tokens) if rng.random() < 0.25 else None
            answer = target.ask(requests[which], leave_after)
            findings.note(answer, alone[which], near_tie)
            if answer.outcome == "refused" or rng.random() < 0.1:
                time.sleep(rng.random() * 0.1)

    memory: list[tuple[float, dict[str, int]]] = []
    start = time.monotonic()
    threads = _start([client] * clients, findings)
    while any(thread.is_alive() for thread in threads):
        memory.append((time.monotonic() - start, target.memory()))
        time.sleep(min(1.0, seconds / 40))
    for thread in threads:
        thread.join()
    return _report(target, findings, memory, time.monotonic() - start)


def burst(target: Target, requests: Sequence[Ask], clients: int, near_tie: float) -> dict[str, Any]:
    """So many clients send one request each at the same moment: each gets its answer, or a clean refusal."""
    alone = [target.ask(ask) for ask in requests]
    findings, together = Findings(), threading.Barrier(clients)

    def client(number: int) -> None:
        which = number % len(requests)
        together.wait()
        findings.note(target.ask(requests[which]), alone[which], near_tie)

    start = time.monotonic()
    for thread in _start([client] * clients, findings):
        thread.join()
    report = _report(target, findings, [], time.monotonic() - start)
    answered = findings.counts["complete"] + findings.counts["refused"]
    if answered != clients and not report["failures"]:
        report["failures"].append(f"{clients} asked, {answered} were answered")
    return report


def _start(clients: Sequence[Callable[[int], None]], findings: Findings) -> list[threading.Thread]:
    def run(client: Callable[[int], None], number: int) -> None:
        try:
            client(number)
        except Exception as failure:
            findings.fail(failure)

    threads = [threading.Thread(target=run, args=(client, number)) for number, client in enumerate(clients)]
    for thread in threads:
        thread.start()
    return threads


def _report(
    target: Target, findings: Findings, memory: Sequence[tuple[float, dict[str, int]]], seconds: float
) -> dict[str, Any]:
    grown = {}
    for what in memory[0][1] if memory else ():
        early = [m[what] for at, m in memory if seconds / 4 <= at < seconds / 2]
        late = [m[what] for at, m in memory if at >= seconds * 3 / 4]
        if early and late:
            grown[what] = {"second_quarter": statistics.median(early), "last_quarter": statistics.median(late)}
            if grown[what]["last_quarter"] - grown[what]["second_quarter"] > GROWTH:
                findings.failures.append(f"{what} grew: {grown[what]}")
    try:
        idle = target.check_idle()
    except AssertionError as failure:
        findings.fail(failure)
        idle = {}
    return {
        "seconds": round(seconds, 1),
        **{name: findings.counts[name] for name in ("complete", "left", "refused", "tokens")},
        "near_ties": [round(gap, 8) for gap in findings.near_ties[:20]],
        "near_ties_count": len(findings.near_ties),
        "memory": grown,
        **idle,
        "failures": findings.failures[:20],
    }


def main() -> int:
    from gdnjax.cli.source import add_source

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_source(parser)
    parser.add_argument("--url", help="a server, in place of an engine here; takes token ids under 250")
    parser.add_argument("--pid", type=int, help="the server's process, whose memory is watched")
    parser.add_argument("--clients", type=int, default=16, help="threads (16)")
    parser.add_argument("--minutes", type=float, default=10.0, help="(10)")
    parser.add_argument("--burst", type=int, help="so many clients at once, once, in place of a soak")
    parser.add_argument("--max-requests", type=int, default=8, help="of the engine (8)")
    parser.add_argument("--max-waiting", type=int, default=1024, help="of the engine (1024)")
    parser.add_argument("--longest-prompt", type=int, default=300, help="tokens (300)")
    parser.add_argument("--new-tokens", type=int, default=64, help="most of an answer (64)")
    parser.add_argument("--near-tie", type=float, help="gap of log-probabilities (1e-3 in float32, 0.25 in bfloat16)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; stdout without it")
    args = parser.parse_args()
    requests = asks(24, args.longest_prompt, args.new_tokens, args.seed)
    clients = args.burst or args.clients
    if args.url:
        near_tie = args.near_tie or NEAR_TIE["bfloat16"]
        target, head = ServerTarget(args.url, clients, args.pid), {"target": args.url}
    else:
        engine = make_engine(args)
        engine.warm_up()
        target, head = EngineTarget(engine), describe(engine)
        near_tie = args.near_tie or NEAR_TIE[engine.config.dtype]
    with target.running():
        report = {**head, **_run(args, target, requests, near_tie), "clients": clients}
    text = json.dumps(report, indent=1) + "\n"
    if args.out is None:
        print(text, end="")
    else:
        args.out.write_text(text, encoding="utf-8")
    return 1 if report["failures"] else 0


def _run(args: argparse.Namespace, target: Target, requests: Sequence[Ask], near_tie: float) -> dict[str, Any]:
    if args.burst:
        return burst(target, requests, args.burst, near_tie)
    return soak(target, requests, args.clients, args.minutes * 60, near_tie, args.seed)


def make_engine(args: argparse.Namespace) -> Any:
    """The engine that the arguments describe: it keeps prefixes, and has half the pages that its requests can need."""
    from gdnjax.cli.source import load_model
    from gdnjax.engine import Engine
    from gdnjax.state.device import snapshot_bytes

    lm = load_model(args)
    length = args.longest_prompt + args.new_tokens
    config = lm.config.replace(max_length=args.max_length or length, prefix_interval=64)
    config = config.replace(prefix_cache_bytes=8 * snapshot_bytes(config), kv_tokens=None)
    pages = max(config.pages_per_request, args.max_requests * config.pages_per_request // 2)
    return Engine(
        dataclasses.replace(lm, config=config),
        max_requests=args.max_requests,
        kv_tokens=pages * config.page_size,
        max_waiting=args.max_waiting,
        overcommit=True,
    )


def describe(engine: Any) -> dict[str, Any]:
    """What ran where."""
    import jax

    c = engine.config
    keys = ("dtype", "state_layout", "max_requests", "max_length", "kv_tokens", "page_size", "prefill_tokens")
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "config": {key: getattr(c, key) for key in (*keys, "hidden_size", "num_hidden_layers", "vocab_size")},
    }


if __name__ == "__main__":
    sys.exit(main())
