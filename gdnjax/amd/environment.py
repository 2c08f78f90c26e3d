"""What must be installed for the AMD check, and the environment of its processes."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import shutil

from gdnjax.amd.rocm_compiler import plugin_library
from gdnjax.amd.stubs import build_stubs

PLUGIN_PACKAGE = "jax-rocm7-pjrt"
# Settings of the caller's that would change what is compiled, or keep XLA from compiling at all.
DROPPED = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR", "TRITON_DEFAULT_FP_FUSION")


def prepare() -> dict[str, str]:
    """The environment of the compiling processes; builds the stand-in libraries it names.

    Raises:
        OSError: a package or tool is missing, or versions do not fit; says what to install.
    """
    problems = missing()
    if problems:
        raise OSError("; ".join(problems))
    cache = cache_folder()
    environment = {key: value for key, value in os.environ.items() if key not in DROPPED}
    inherited = os.environ.get("LD_LIBRARY_PATH")
    stubs = str(build_stubs(plugin_library(), cache))
    return {
        **environment,
        "LD_LIBRARY_PATH": f"{stubs}:{inherited}" if inherited else stubs,
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        # Stated because its default changes between releases of triton: multiply and add become one.
        "TRITON_DEFAULT_FP_FUSION": "1",
    }


def missing() -> list[str]:
    """What to install, one sentence each; empty if nothing is missing."""
    problems = []
    jax = _version("jax") or ""
    plugin, triton = _version(PLUGIN_PACKAGE), _version("triton")
    if plugin is None or triton is None:
        absent = [name for name, found in ((PLUGIN_PACKAGE, plugin), ("triton", triton)) if found is None]
        problems.append(f"{' and '.join(absent)} not installed: pip install 'gdnjax[amd]' '{PLUGIN_PACKAGE}=={jax}'")
    elif plugin.split(".post")[0] != jax:
        problems.append(f"{PLUGIN_PACKAGE} {plugin} with jax {jax}: pip install '{PLUGIN_PACKAGE}=={jax}'")
    for tool, package in (("gcc", "gcc"), ("readelf", "binutils")):
        if shutil.which(tool) is None:
            problems.append(f"{tool} not found: install {package} (Debian, Ubuntu: apt install {package})")
    return problems


def cache_folder() -> pathlib.Path:
    """Where stand-in libraries and Triton's results are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "gdnjax" / "amd"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
