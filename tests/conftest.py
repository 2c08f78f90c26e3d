"""Choose JAX's platform before any test module imports it, debug mode, and hypothesis's profile."""

import os

os.environ["JAX_PLATFORMS"] = os.environ.get("GDNJAX_TEST_PLATFORM", "cpu")
os.environ["GDNJAX_DEBUG"] = "1"

from hypothesis import settings

# Compilation dominates a first example, so that a deadline would only measure the machine.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
