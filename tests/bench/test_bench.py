"""The benchmarks' logic on CPU: what is called and counted, not how fast it is."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gdnjax import platform
from gdnjax.bench import kernels, timing, traffic
from gdnjax.cli import main
from gdnjax.config import ConfigError, from_preset


@pytest.mark.parametrize("mode", traffic.MODES)
def test_traffic_moves_what_it_says(mode):
    pool = jax.random.normal(jax.random.key(0), (7, 2, 32, 16))
    slots = traffic.slot_pairs(3, twin=mode == "twin")
    sums, moved = traffic.move(pool, slots, mode, interpret=True)
    expected = np.array(pool)
    for read, write in np.asarray(slots):
        if mode == "write":
            expected[write] = 1.0
        elif mode != "read":
            expected[write] = np.asarray(pool)[read] + 1.0
    np.testing.assert_array_equal(moved, expected)
    if mode == "read":
        np.testing.assert_allclose(sums, (np.asarray(pool)[np.asarray(slots)[:, 0]] + 1).sum(-1), rtol=1e-5)


def profile(*lines):
    """A profile of one host and one GPU with the given (name of the line, [(start, duration)])."""
    events = lambda pairs: [SimpleNamespace(start_ns=s, duration_ns=d) for s, d in pairs]  # noqa: E731
    gpu = [SimpleNamespace(name=name, events=events(pairs)) for name, pairs in lines]
    host = SimpleNamespace(name="/host:CPU", lines=[SimpleNamespace(name="Stream #1", events=events([(0, 999)]))])
    return SimpleNamespace(planes=[host, SimpleNamespace(name="/device:GPU:0", lines=gpu)])


def test_a_call_takes_the_median_step_over_its_calls():
    # Three steps of two kernels each, on two streams; derived lines repeat what streams hold.
    found = timing.device_events(
        profile(
            ("Stream #13(Kernel)", [(0, 10), (200, 30), (400, 20)]),
            ("Stream #14(Memcpy)", [(500, 4), (100, 2), (300, 2)]),
            ("XLA Ops", [(0, 10)]),
        )
    )
    assert found == [(0, 10), (100, 2), (200, 30), (300, 2), (400, 20), (500, 4)]
    seen = timing.summarize(found, calls=4, repetitions=3)
    assert seen.seconds == pytest.approx(24e-9 / 4)
    assert seen.spread == pytest.approx((32 - 12) / 2 / 24)


@pytest.mark.parametrize("events", [[], [(0, 1), (1, 1)]])
def test_steps_that_the_profiler_did_not_see_whole_are_refused(events):
    with pytest.raises(RuntimeError, match=f"recorded {len(events)} kernels on GPUs in 3 equal steps"):
        timing.summarize(events, calls=1, repetitions=3)


def test_on_a_cpu_nothing_ran_on_a_gpu():
    with pytest.raises(RuntimeError, match="recorded 0 kernels"):
        timing.time_kernels(lambda x, c: (x + c, ()), jnp.zeros(()), jnp.ones(()), calls=1)


def test_every_case_runs_and_counts_its_bytes():
    config = from_preset("tiny")
    names = set()
    for case in kernels.cases(config, 2):
        mutable, constant = case.make(jax.random.key(1))
        new, out = case.call(mutable, constant)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, mutable)
        assert case.moved > 0 and jax.tree.leaves(out)
        names.add(case.kernel.split()[0])
    assert names == {
        "gated_delta_decode",
        "causal_conv_decode",
        "gated_rms_norm",
        "attention_prologue",
        "paged_attention",
    }


def test_windows_count_their_bytes_and_operations(monkeypatch):
    monkeypatch.setattr(kernels, "WINDOWS", ((3, 2),))
    (case,) = kernels.window_cases(from_preset("tiny"))
    _, rest = case.make(jax.random.key(1))
    q, keys, *_ = rest
    _, out = case.call((), rest)
    assert out.shape == q.shape and (case.kernel, case.rows) == ("paged_attention_packed 5 keys", 3)
    heads, dim, groups = q.shape[1], q.shape[2], keys.shape[1]
    assert case.operations == 2 * 2 * (3 + 4 + 5) * heads * dim
    assert case.moved == (2 * 5 * groups + 3 * 3 * heads) * dim * q.dtype.itemsize


def test_the_recommended_layout_is_written_and_read(tmp_path, monkeypatch, capsys):
    report = {
        "device": "a device",
        "copy_bytes_per_second": 10**12,
        "floor_us": 1.0,
        "cells": [{"rows": 1, "us": {"twin": 1.0}, "of_copy": {"twin": 0.5}}],
        "twin_gain": 0.2,
        "recommended_layout": "twin",
    }
    measured = []
    monkeypatch.setattr(traffic, "study", lambda config, rows: measured.append(config) or report)
    monkeypatch.setattr(platform, "current_platform", lambda: "cuda")
    path = tmp_path / "my.yaml"
    assert main(["bench", "state", "--config", "tiny", "--write", str(path)]) == 0
    assert "twin is +20.0%" in path.read_text() and f"--config {path}" in capsys.readouterr().out
    before, after = from_preset("tiny"), from_preset(str(path))
    assert (before.for_platform("cuda").state_layout, after.for_platform("cuda").state_layout) == ("in_place", "twin")
    assert after.for_platform("rocm").state_layout == "twin"  # as it was
    assert after.replace(platform_overrides=before.platform_overrides) == before
    assert main(["info", "--config", str(path), "--platform", "cuda"]) == 0
    assert "twin" in capsys.readouterr().out
    # another measurement goes on from it
    report["recommended_layout"] = "in_place"
    assert main(["bench", "state", "--config", str(path), "--write", str(tmp_path / "next.yaml")]) == 0
    assert from_preset(str(tmp_path / "next.yaml")).for_platform("cuda").state_layout == "in_place"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["my.yaml", "next.yaml"]

    measured.clear()
    for target, message in (
        (path, "exists; remove it"),
        ("my.json", "ends in .yaml"),
        (tmp_path / "no/a.yaml", "no such"),
    ):
        assert main(["bench", "state", "--config", "tiny", "--write", str(target)]) == 2
        assert message in capsys.readouterr().err
    assert not measured  # refused before the minutes are spent
    with pytest.raises(ConfigError, match=r"nobody.yaml: no such file; it takes a YAML file"):
        from_preset("nobody.yaml")


def test_a_cpu_is_refused(capsys):
    assert main(["bench", "kernels"]) == 1
    assert "this is a CPU" in capsys.readouterr().err
