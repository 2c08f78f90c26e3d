"""Jobs in processes of their own: what they find, and what becomes of one that fails."""

from __future__ import annotations

import json
import os
import pathlib
import sys

import pytest

from gdnjax.amd import jobs
from gdnjax.amd.environment import missing
from gdnjax.amd.jobs import Findings, Job, make_jobs, read_results, run_job, run_jobs
from gdnjax.amd.kernels import KERNELS
from gdnjax.amd.programs import PROGRAMS, serving_config, state_sizes

JOB = Job("kernel", "gated_rms_norm", "gfx942", 64)
ROW = {"name": "k", "arch": "gfx942"}


def worker(folder: pathlib.Path, body: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the worker's process by a script, in which `report` is at hand."""
    script = folder / "python"
    prelude = "import json, os, sys\ndef report(**v): open(sys.argv[-1], 'a').write(json.dumps(v) + chr(10))\n"
    script.write_text(f"#!{sys.executable}\n{prelude}{body}\n")
    script.chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(script))


def test_every_kernel_and_program_has_a_job() -> None:
    made = make_jobs(["gfx942", "gfx1201"], ["0.8b", "9b"], 64)
    assert {(j.kind, j.name) for j in made} == {("program", n) for n in PROGRAMS} | {("kernel", n) for n in KERNELS}
    assert len(made) == len(set(made)) == 4 * len(PROGRAMS) + 2 * len(KERNELS)
    assert {j.rows for j in made} == {64}


def test_a_quick_check_leaves_out_the_loop() -> None:
    made = make_jobs(["gfx942"], ["0.8b"], 64, quick=True)
    assert {j.name for j in made} == set(PROGRAMS) - {"decode_loop"} | set(KERNELS)
    assert all(j.quick for j in made if j.kind == "kernel")


def test_results_are_sorted_by_kind() -> None:
    text = "\n".join(map(json.dumps, [{"kernel": ROW}, {"failure": "it spills"}, {"program": {"rows": 1}}]))
    assert read_results(text) == Findings([ROW], [{"rows": 1}], ["it spills"])


def test_a_process_that_dies_leaves_what_it_found(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(
        tmp_path, f"report(kernel={ROW})\nprint('LLVM ERROR: no', file=sys.stderr, flush=True)\nos.abort()", monkeypatch
    )
    found = run_job(JOB, dict(os.environ))
    assert found.kernels == [ROW]
    assert found.failures == ["gated_rms_norm, gfx942: the compiler's process ended with signal 6: LLVM ERROR: no"]


def test_a_process_that_hangs_is_a_failure(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worker(tmp_path, "import time\ntime.sleep(60)", monkeypatch)
    assert run_job(JOB, dict(os.environ), timeout=1.0).failures == ["gated_rms_norm, gfx942: did not end within 1 s"]


def test_findings_come_in_the_order_of_the_jobs(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import time\nname = json.loads(sys.argv[-2])['name']\ntime.sleep(float(name))\nreport(failure=name)"
    worker(tmp_path, body, monkeypatch)
    several = [Job("kernel", name, "gfx942", 1) for name in ("0.3", "0.1", "0.0")]
    done: list[Job] = []
    assert run_jobs(several, dict(os.environ), done.append).failures == ["0.3", "0.1", "0.0"]
    assert sorted(map(str, done)) == sorted(map(str, several))


def test_programs_have_the_shapes_of_a_served_model() -> None:
    config = serving_config("0.8b", 64)
    assert (config.max_requests, config.state_layout, config.kernels) == (64, "twin", "pallas")
    programs = {name: build(config) for name, build in PROGRAMS.items()}
    rows = {name: program.rows for name, program in programs.items()}
    assert rows == {"decode_step": 64, "prefill": config.prefill_tokens, "verify_step": 64 * 4, "decode_loop": 64}
    for name, program in programs.items():
        assert state_sizes(program.state) == {
            config.slots * 16 * 128 * 128,
            65 * (7 if name == "verify_step" else 4) * config.conv_channels,
            (1 + config.kv_pages) * config.page_size * 2 * 256,
        }
    assert programs["verify_step"].state.config.records


@pytest.mark.skipif(bool(missing()), reason="needs the extra `amd` and gcc")
@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_the_compilers_compile(arch: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdnjax.amd.environment import prepare

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    environment = prepare()
    found = run_job(Job("kernel", "gated_rms_norm", arch, 4), environment)
    assert found.failures == []
    assert {row["shape"] for row in found.kernels} >= {"0.8B", "27B"}
    assert all(0 < row["vgprs"] <= 256 and row["spills"] == 0 and row["wide_loads"] >= 0 for row in found.kernels)

    found = run_job(Job("program", "decode_step", arch, 4, "tiny"), environment)
    assert found.failures == []
    (row,) = found.programs
    assert row["pool_copies"] == 0 and row["kernels_per_step"] > 50 and row["alias_bytes"] > row["temp_bytes"]
