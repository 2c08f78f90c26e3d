"""Stand-ins for the ROCm libraries that XLA's plugin is linked to, so that it loads without ROCm.

The plugin contains the compiler; it needs the libraries only to run what it compiled. Every function of
the stand-ins returns an error, as if there were no GPU, which is the case.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile

# Libraries every Linux has, by name, and symbols they define, by version (or by name, where unversioned).
SYSTEM_LIBRARY = re.compile(r"(?:libc|libm|librt|libdl|libpthread|libgcc_s|libstdc\+\+|ld-linux[\w-]*)\.so")
SYSTEM_VERSION = re.compile(r"(?:GLIBC|GLIBCXX|CXXABI|GCC)_")
STANDARD_CPP = re.compile(r"_ZN?K?St|_ZNKSt|_ZS|_ZT[HISV]N?K?S|_ZTH|_ZGV")
# The few functions that return a text, not a number.
TEXT = re.compile(r"(?:ErrorString|ErrorName|status_string)$")

EVERYTHING = "libgdnjax_norocm.so"


def build_stubs(plugin: pathlib.Path, cache: pathlib.Path) -> pathlib.Path:
    """A folder with stand-ins for what `plugin` needs, to be named in LD_LIBRARY_PATH.

    Built once and kept in `cache` under a name made from its contents.

    Raises:
        OSError: gcc or readelf is not installed, or fails.
    """
    libraries = needed_libraries(_run("readelf", "--dynamic", "--wide", str(plugin)))
    source = stub_source(undefined_functions(_run("readelf", "--dyn-syms", "--wide", str(plugin))))
    name = hashlib.sha256("\n".join([source, *libraries]).encode()).hexdigest()[:16]
    folder = cache / f"stubs-{name}"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    building = pathlib.Path(tempfile.mkdtemp(prefix="stubs-", dir=cache))
    try:
        _build(building, source, libraries)
        building.rename(folder)
    except OSError:
        # Another process may have been faster; then its folder is as good.
        shutil.rmtree(building, ignore_errors=True)
        if not folder.is_dir():
            raise
    return folder


def needed_libraries(dynamic: str) -> list[str]:
    """From `readelf --dynamic`: the libraries to stand in for."""
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    return [name for name in needed if not SYSTEM_LIBRARY.match(name)]


def undefined_functions(symbols: str) -> list[str]:
    """From `readelf --dyn-syms`: the undefined symbols that no system library defines."""
    names = set()
    for line in symbols.splitlines():
        fields = line.split()
        if len(fields) < 8 or fields[6] != "UND" or fields[4] == "WEAK":
            continue
        name, _, version = fields[7].partition("@")
        version = version.lstrip("@")
        if SYSTEM_VERSION.match(version) or (not version and STANDARD_CPP.match(name)):
            continue
        names.add(name)
    return sorted(names)


def stub_source(functions: list[str]) -> str:
    """C in which every function returns an error."""
    lines = [
        f'const char *{name}(void) {{ return "no ROCm on this machine"; }}'
        if TEXT.search(name)
        else f"int {name}(void) {{ return 1; }}"
        for name in functions
    ]
    return "\n".join([*lines, ""])


def _build(folder: pathlib.Path, source: str, libraries: list[str]) -> None:
    (folder / "stubs.c").write_text(source)
    shared = ["gcc", "-shared", "-fPIC", "-w", "-x", "c"]
    everything = folder / EVERYTHING
    _run(*shared, str(folder / "stubs.c"), f"-Wl,-soname,{EVERYTHING}", "-o", str(everything))
    # The named libraries are empty and need the one that holds everything: the plugin asks for versioned
    # symbols, and the loader takes an unversioned one only from a library that the version doesn't name.
    for name in libraries:
        # --no-as-needed stands before the library: by default one that nothing is used of is left out.
        linked = ["/dev/null", "-x", "none", "-Wl,--no-as-needed", str(everything), "-Wl,-rpath,$ORIGIN"]
        _run(*shared, *linked, f"-Wl,-soname,{name}", "-o", str(folder / name))


def _run(*command: str) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    except FileNotFoundError:
        raise OSError(f"{command[0]} is not installed; install gcc and binutils (Debian: apt install gcc)") from None
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(command[:2])} ...: {error.stderr.strip()[-500:]}") from None
    return done.stdout
