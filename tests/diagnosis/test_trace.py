"""Traced runs: the same in every layout and order, and named where they part."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from gdnjax.cli import main
from gdnjax.diagnosis import trace
from gdnjax.diagnosis.diff import Difference, diff
from gdnjax.diagnosis.trace import read_trace
from gdnjax.diagnosis.watch import Watch
from gdnjax.state import State, init_state
from gdnjax.state.pool import StatePool
from tests.diagnosis.driving import DEEP
from tests.state.pools import MICRO, Driver, micro

pytestmark = pytest.mark.usefixtures("quick_compilation")

Edit = Callable[[State, int], State]
"""Changes what belongs to a request of the pool."""


def compared(one: str, other: str) -> Difference:
    return diff(read_trace(one), read_trace(other))


def four_steps(order: tuple[int, ...] = (0, 1, 2), edit: Edit | None = None, at: int = 2) -> None:
    """Requests 0 and 2 stay, request 1 has made room for a third, each at another length. `edit` changes the last one
    in decode step `at`, which is step 4 + `at` of the run."""
    driver = Driver(micro("twin"))
    a, gone = driver.start([1, 2, 3]), driver.start([9])
    driver.pool.release(gone)
    b, c = driver.start([7, 7, 5, 4, 4]), driver.start([6, 6])
    requests = [a, b, c]
    for number in range(4):
        if edit is not None and number == at:
            step, run = edit, driver.pool.run

            def edited(plans: Any, inner: Any, commits: bool = False, run: Any = run, step: Edit = step) -> Any:
                def both(state: State) -> Any:
                    logits, state = inner(state)
                    return logits, step(state, c)

                return run(plans, both, commits)

            driver.pool.run = edited  # type: ignore[method-assign]
        driver.step({requests[i]: i + number for i in order})
        if edit is not None and number == at:
            del driver.pool.run


def add_to(field: str, layer: int, index: Callable[[State, int], Any]) -> Edit:
    def edit(state: State, request: int) -> State:
        layers = list(getattr(state, field))
        layers[layer] = layers[layer].at[index(state, request)].add(1)
        return dataclasses.replace(state, **{field: tuple(layers)})

    return edit


def newest(state: State, request: int) -> Any:
    # The step is not committed: the position is that of its token.
    position, size = int(state.position[request]), MICRO.page_size
    return int(state.page_table[request, position // size]) * size + position % size, 0, 3


# What belongs to the request after the step, which is not committed yet.
EDITS = {
    "state": add_to("recurrent", 0, lambda state, request: (state.write_slot[request], 1, 2, 3)),
    "window": add_to("conv", 0, lambda state, request: (request + 1, state.position[request] % 4, 5)),
    "keys": add_to("keys", 0, newest),
    "values": add_to("values", 0, newest),
}


def test_the_first_step_request_layer_and_array_are_named(traced: Callable[[str], str]) -> None:
    plain = traced("plain")
    four_steps()
    (run,) = read_trace(plain)
    assert [(e.step, e.kind, e.request, e.position) for e in run.entries] == [
        (0, "prefill", 0, 3),
        (1, "prefill", 1, 1),
        (2, "prefill", 2, 5),
        (3, "prefill", 3, 2),
        *((4 + i, "decode", r, p + i + 1) for i in range(4) for r, p in ((0, 3), (2, 5), (3, 2))),
    ]
    rows = traced("rows")
    four_steps(order=(2, 0, 1))
    found = compared(plain, rows)
    assert found.equal and found.compared == len(run.entries) * 4
    for array, edit in EDITS.items():
        changed = traced(array)
        four_steps(edit=edit)
        place = compared(plain, changed).place
        assert place is not None
        layer = int(array in ("keys", "values"))
        assert (place.step, place.other_step, place.kind) == (6, 6, "decode")
        assert (place.request, place.token, place.layer, place.array) == (3, 5, layer, array)
        assert place.layer_type == MICRO.layer_types[layer]


def test_a_step_that_is_not_committed_is_not_written(traced: Callable[[str], str]) -> None:
    path = traced("pending")
    watch, state = Watch(DEEP), init_state(DEEP)
    position = jnp.array([4, 4, 0], jnp.int32)
    watch.after_step("decode", dataclasses.replace(state, position=position, pending=jnp.array([1, 0, 0], jnp.int32)))
    watch.after_step("decode", dataclasses.replace(state, position=position + 1))
    (run,) = read_trace(path)
    assert [(e.step, e.request, e.position) for e in run.entries] == [(0, 1, 4), (1, 0, 5), (1, 1, 5), (1, 2, 1)]


# The file


def written(path: Path, *lines: object) -> str:
    path.write_bytes(b"".join(line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines))
    return str(path)


BEGIN = {"gdnjax_trace": 1, "run": 0, "layers": ["linear_attention", "full_attention"]}


def entry(position: int, request: int = 0, behind: int = 0, step: int | None = None, **other: Any) -> dict[str, Any]:
    """A line whose checksums follow from request and token."""
    value = {"run": 0, "step": position if step is None else step, "kind": "decode", "request": request}
    value |= {"position": position, "behind": behind, "state": [1000 + 100 * request + position - behind]}
    value |= {name: [100 * request + position] for name in ("window", "keys", "values")}
    return value | ({"record": [7 * position + behind]} if behind else {}) | other


def test_a_state_that_lags_is_compared_with_that_of_its_token(tmp_path: Path) -> None:
    # What ran on a record, each state two tokens behind, against what did not.
    slots = written(tmp_path / "slots", BEGIN, *(entry(p) for p in (4, 6, 8)))
    record = written(tmp_path / "record", BEGIN, *(entry(p, behind=2) for p in (4, 6, 8)))
    found = compared(slots, record)
    assert found.equal and found.compared == 3 * 3 + 2
    changed = [entry(p, behind=2) for p in (4, 6, 8)]
    changed[2]["state"] = [5]
    found = compared(record, written(tmp_path / "changed", BEGIN, *changed))
    assert found.place is not None and not found.equal and found.differing == 1
    assert (found.place.step, found.place.token, found.place.array) == (8, 6, "state")
    changed[1]["record"] = [5]
    found = compared(record, written(tmp_path / "changed", BEGIN, *changed))
    assert found.place is not None and found.differing == 2
    assert (found.place.step, found.place.token, found.place.array, found.place.layer) == (6, 6, "record", 0)
    # Records of other lengths hold other rows.
    other = written(tmp_path / "other", BEGIN, entry(4, behind=2), entry(6, behind=1), entry(8, behind=2))
    assert compared(record, other).equal


def test_steps_that_one_run_lacks_part_the_runs_and_hide_nothing(tmp_path: Path) -> None:
    one = written(tmp_path / "one", BEGIN, *(entry(p) for p in (4, 5, 6, 7)))
    other = written(tmp_path / "other", BEGIN, entry(4), entry(6, step=5))
    for first, second, name in ((one, other, "first"), (other, one, "second")):
        found = compared(first, second)
        assert not found.equal and found.place is None and found.lone is not None
        assert dataclasses.astuple(found.lone) == (name, 0, 5, 0, 5)
    other = written(tmp_path / "other", BEGIN, entry(4), entry(6, step=5, keys=[1]))
    place = compared(one, other).place
    assert place is not None and (place.step, place.other_step, place.array, place.layer) == (6, 5, "keys", 1)


def test_layers_are_compared_in_the_model_s_order(tmp_path: Path) -> None:
    one = written(tmp_path / "one", BEGIN, entry(4, 1), entry(4, 0))
    other = written(tmp_path / "other", BEGIN, entry(4, 0, keys=[0]), entry(4, 1, state=[0], values=[0]))
    place = compared(one, other).place
    assert place is not None and (place.request, place.layer, place.array) == (1, 0, "state")


def test_a_layer_is_named_by_its_place_in_the_model(tmp_path: Path) -> None:
    begin = {**BEGIN, "layers": ["linear_attention", "linear_attention", "full_attention", "linear_attention"]}
    line = entry(4, state=[1, 2, 3], window=[4, 5, 6])
    one = written(tmp_path / "one", begin, line)
    for change, layer in (({"state": [1, 2, 0]}, 3), ({"window": [4, 0, 0]}, 1), ({"keys": [0]}, 2)):
        place = compared(one, written(tmp_path / "other", begin, {**line, **change})).place
        assert place is not None and (place.layer, place.array) == (layer, *change)


def test_runs_of_a_process_follow_each_other(traced: Callable[[str], str]) -> None:
    path = traced("runs")
    for _ in range(2):
        watch, state = Watch(DEEP), init_state(DEEP)
        watch.after_step("prefill", dataclasses.replace(state, position=jnp.array([0, 2, 0], jnp.int32)))
    runs = read_trace(path)
    assert [[(e.request, e.position) for e in run.entries] for run in runs] == [[(1, 2)]] * 2
    found = diff(runs, runs[:1])
    assert not found.equal and found.place is None and found.lone is None and found.runs == (2, 1)


def test_a_file_that_is_full_is_left_as_it_is(
    traced: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = traced("full")
    monkeypatch.setattr(trace, "MOST_BYTES", 1100)
    watch, state = Watch(DEEP), init_state(DEEP)
    for position in range(1, 5):
        watch.after_step("decode", dataclasses.replace(state, position=jnp.full(3, position, jnp.int32)))
    assert [e.position for e in read_trace(path)[0].entries] == [1] * 3
    assert caplog.text.count("what follows is not traced") == 1


def test_a_trace_that_cannot_be_written_is_refused_at_once(traced: Callable[[str], str]) -> None:
    path = traced("no/such/folder")
    with pytest.raises(
        ValueError, match=r"GDNJAX_TRACE = .*no/such/folder': No such file or directory; it takes a file"
    ):
        StatePool(DEEP)
    assert not Path(path).exists()


# The command


def test_the_command_says_where_runs_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = written(tmp_path / "one", BEGIN, entry(4), entry(5))
    other = written(tmp_path / "other", BEGIN, entry(4), entry(5, window=[9], step=7))
    assert main(["trace", "diff", one, other]) == 1
    assert capsys.readouterr().out == (
        "run 0, step 5 (decode) (step 7 of B), request 0 at token 5, layer 0 (linear_attention): window differs first\n"
        "8 checksums compared: 1 differ\n"
    )
    assert main(["trace", "diff", one, other, "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert (value["equal"], value["place"]["array"], value["lone"]) == (False, "window", None)
    assert main(["trace", "diff", other, written(tmp_path / "more", BEGIN, entry(4))]) == 1
    assert capsys.readouterr().out == (
        "run 0, step 7 of A: request 0 at token 5 is not in B\n4 checksums compared: 0 differ\n"
    )
    # A killed run: its last line is not whole.
    cut = written(tmp_path / "cut", BEGIN, entry(4), json.dumps(entry(5)).encode()[:-9])
    assert main(["trace", "diff", cut, written(tmp_path / "more", BEGIN, entry(4))]) == 0
    assert capsys.readouterr().out == "4 checksums compared: equal\n"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no run in it"),
        ([b"\x89PNG\r\n\x1a\n\0\0"], "line 1: "),
        ([b"[" * 100_000 + b"\n"], "line 1: "),
        ([b'{"a": 1}\n'], "line 1: gdnjax_trace = None; this version reads 1"),
        ([{**BEGIN, "gdnjax_trace": 2}], "line 1: gdnjax_trace = 2; this version reads 1"),
        ([{**BEGIN, "layers": ["recurrent"]}], "line 1: not the beginning of run 0"),
        ([BEGIN, BEGIN], "line 2: not the beginning of run 1"),
        ([BEGIN, b"{}\n"], "line 2: run = None"),
        ([BEGIN, b"[1]\n"], "line 2: not a line of a trace"),
        ([BEGIN, {**entry(4), "run": 1}], "line 2: run = 1; it takes an integer from 0 to 0"),
        ([BEGIN, {**entry(4), "kind": "\x1b[2J"}], "line 2: kind = "),
        ([BEGIN, entry(0)], "line 2: position = 0"),
        ([BEGIN, entry(4, behind=5)], "line 2: behind = 5"),
        ([BEGIN, {**entry(4), "request": True}], "line 2: request = True"),
        ([BEGIN, {**entry(4), "state": [1, 2]}], "line 2: state = [1, 2]; it takes 1 integers under 2^32"),
        ([BEGIN, {**entry(4), "keys": [2**32]}], "line 2: keys = [4294967296]; it takes 1 integers"),
        ([BEGIN, {k: v for k, v in entry(4).items() if k != "values"}], "line 2: no values"),
        ([BEGIN, {**entry(4), "x": "y" * 2**20}], "line 2: not a line of a trace"),
        ([{**BEGIN, "layers": ["full_attention"]}, {**entry(4), "state": [], "window": []}], "of other types"),
        ([BEGIN], "neither trace has a step"),
    ],
)
def test_what_is_no_trace_is_refused(
    lines: list[Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, fine = written(tmp_path / "bad", *lines), written(tmp_path / "fine", BEGIN)
    assert main(["trace", "diff", fine, path]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("gdnjax trace: ") and message in captured.err
    assert len(captured.err) < 1000 and captured.err[:-1].isprintable()


def test_files_that_cannot_be_read_or_are_too_large_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = written(tmp_path / "fine", BEGIN, entry(4))
    for path in (tmp_path / "missing", tmp_path):
        assert main(["trace", "diff", str(path), fine]) == 2
        assert str(path) in capsys.readouterr().err
    monkeypatch.setattr(trace, "MOST_BYTES", 100)
    assert main(["trace", "diff", fine, fine]) == 2
    assert "more than 100 bytes; a trace has no more" in capsys.readouterr().err
