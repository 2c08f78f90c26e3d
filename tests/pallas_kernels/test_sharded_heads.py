"""Operations compose under `jit` and `shard_map` over heads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_operation_split_over_heads_equals_the_whole() -> None:
    flags = "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("sharded_heads.py")
    done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * (4 + 3 + 5)
