"""Choose JAX's platform before any test module imports it, debug mode, and hypothesis's profile."""

import gc
import os
import pathlib

os.environ["JAX_PLATFORMS"] = os.environ.get("GDNJAX_TEST_PLATFORM", "cpu")
os.environ["GDNJAX_DEBUG"] = "1"

import jax
import pytest
from hypothesis import settings

# Compilation dominates a first example, so that a deadline would only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


QUICK = "jax_disable_most_optimizations"
MOST_MAPS = 25_000
"""Memory maps of a process after which compiled programs are dropped: each has some, and at 65,530 Linux gives no more,
which ends the process in the middle of a compilation."""


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules in which compiling takes longer than running."""
    # Compiled with and without optimizations a program gives other bits, and JAX would take one for the other.
    jax.clear_caches()
    before = jax.config.read(QUICK)
    jax.config.update(QUICK, True)
    yield
    jax.config.update(QUICK, before)
    jax.clear_caches()


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Keeps a worker that runs many modules within what the system gives it."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()
