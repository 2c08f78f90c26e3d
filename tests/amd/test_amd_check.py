"""The command: exit codes, its JSON, and what it says when something isn't installed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from gdnjax.amd import environment
from gdnjax.amd.jobs import Findings, Job
from gdnjax.cli import main

Capture = pytest.CaptureFixture[str]

KERNEL = {
    "name": "k", "arch": "gfx942", "shape": "9B", "vgprs": 72, "spills": 0, "lds_bytes": 0, "occupancy": 7,
    "wide_loads": 2, "wide_stores": 1,
}  # fmt: skip
PROGRAM = {
    "program": "prefill", "config": "0.8b", "arch": "gfx942", "rows": 1024, "kernels_per_step": 7, "pool_copies": 0,
    "alias_bytes": 2**30, "temp_bytes": 2**20,
}  # fmt: skip


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replaces the compilations: `jobs` holds what was asked for, `findings` is what comes of it."""
    seen: dict[str, Any] = {"findings": Findings([KERNEL], [PROGRAM], [])}

    def run_jobs(jobs: list[Job], environment: dict[str, str], done: Callable[[Job], None]) -> Findings:
        seen["jobs"] = jobs
        for job in jobs:
            done(job)
        return seen["findings"]

    monkeypatch.setattr("gdnjax.amd.environment.prepare", dict)
    monkeypatch.setattr("gdnjax.amd.jobs.run_jobs", run_jobs)
    return seen


def test_json(ran: dict[str, Any], capsys: Capture) -> None:
    assert main(["amd-check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kernels": [KERNEL], "programs": [PROGRAM], "failures": []}
    assert {(job.arch, job.rows) for job in ran["jobs"]} == {("gfx942", 64), ("gfx1201", 64)}
    assert {job.config for job in ran["jobs"]} == {"", "0.8b"} and not any(job.quick for job in ran["jobs"])
    assert main(["amd-check", "--quick", "--json"]) == 0
    assert {job.quick for job in ran["jobs"] if job.kind == "kernel"} == {True}


def test_tables(ran: dict[str, Any], capsys: Capture) -> None:
    assert main(["amd-check", "--arch", "gfx950, gfx90a", "--config", "9b,27b", "--rows", "4"]) == 0
    out = capsys.readouterr().out
    assert "nothing was run on one" in out and "| k " in out and "| prefill " in out
    assert {(job.arch, job.rows) for job in ran["jobs"]} == {("gfx950", 4), ("gfx90a", 4)}
    assert {job.config for job in ran["jobs"]} == {"", "9b", "27b"}


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_broken_rule_ends_with_1(ran: dict[str, Any], flags: list[str], capsys: Capture) -> None:
    ran["findings"].failures.append("k, 9B, gfx942: spills 3 registers")
    assert main(["amd-check", *flags]) == 1
    captured = capsys.readouterr()
    assert "spills 3 registers" in (captured.out if flags else captured.err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--arch", "gfx942,gfx000"], "--arch 'gfx000': it takes a list of gfx90a, gfx942"),
        (["--arch", ""], "--arch ''"),
        (["--config", "8b"], "--config '8b': it takes a list of 0.8b, "),
        (["--rows", "0"], "--rows 0: it takes an integer >= 1"),
    ],
)
def test_usage(ran: dict[str, Any], flags: list[str], message: str, capsys: Capture) -> None:
    assert main(["amd-check", *flags]) == 2
    assert message in capsys.readouterr().err
    assert "jobs" not in ran


def versions(**installed: str | None) -> Callable[[str], str | None]:
    return lambda package: {"jax": "0.12.0", "jax-rocm7-pjrt": "0.12.0", "triton": "3.9.0", **installed}[package]


@pytest.mark.parametrize(
    ("installed", "path", "message"),
    [
        ({"triton": None}, None, "triton not installed: pip install 'gdnjax[amd]' 'jax-rocm7-pjrt==0.12.0'"),
        ({"triton": None, "jax-rocm7-pjrt": None}, None, "jax-rocm7-pjrt and triton not installed: pip install"),
        ({"jax-rocm7-pjrt": "0.11.2"}, None, "jax-rocm7-pjrt 0.11.2 with jax 0.12.0: pip install 'jax-rocm7-pjrt=="),
        ({}, "", "gcc not found: install gcc (Debian, Ubuntu: apt install gcc); readelf not found: install binutils"),
    ],
)
def test_what_is_missing_is_named(
    installed: dict[str, str | None],
    path: str | None,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
) -> None:
    monkeypatch.setattr(environment, "_version", versions(**installed))
    if path is not None:
        monkeypatch.setenv("PATH", path)
    assert main(["amd-check"]) == 1
    assert message in capsys.readouterr().err


def test_a_fix_of_the_plugin_is_of_jaxs_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_version", versions(**{"jax-rocm7-pjrt": "0.12.0.post1"}))
    monkeypatch.setattr(environment.shutil, "which", lambda tool: tool)
    assert environment.missing() == []
