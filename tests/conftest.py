"""Choose JAX's platform before any test module imports it, debug mode, and hypothesis's profile."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("GDNJAX_TEST_PLATFORM", "cpu")
os.environ["GDNJAX_DEBUG"] = "1"

import jax
import pytest
from hypothesis import settings

# Compilation dominates a first example, so that a deadline would only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture(scope="module")
def quick_compilation():
    """For modules in which compiling takes longer than running."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
