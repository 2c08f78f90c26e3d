"""The stand-in libraries, built for a library that needs what isn't there."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from gdnjax.amd.stubs import build_stubs, needed_libraries, stub_source, undefined_functions

pytestmark = pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("readelf")), reason="needs gcc and readelf")

PLUGIN = """
extern int hipInit(void);
extern const char *hipGetErrorString(int);
extern double floor(double);
int call(void) { return hipInit(); }
const char *text(void) { return hipGetErrorString(0); }
double system_function(double x) { return floor(x); }
"""


def gcc(*arguments: str, cwd: pathlib.Path) -> None:
    subprocess.run(["gcc", "-shared", "-fPIC", *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A library that asks for a versioned function of a library that doesn't exist any more."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "hip.c").write_text('int hipInit(void) { return 0; }\nconst char *hipGetErrorString(int e) { return "";}')
    (folder / "hip.map").write_text("hip_4.2 { global: *; };")
    gcc("hip.c", "-Wl,--version-script=hip.map", "-Wl,-soname,libhip.so.7", "-o", "libhip.so", cwd=folder)
    (folder / "plugin.c").write_text(PLUGIN)
    gcc("plugin.c", "libhip.so", "-lm", "-o", "plugin.so", cwd=folder)
    (folder / "libhip.so").unlink()
    return folder / "plugin.so"


def load(plugin: pathlib.Path, stubs: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import ctypes, sys\n"
        "lib = ctypes.CDLL(sys.argv[1])\n"
        "lib.text.restype, lib.system_function.restype = ctypes.c_char_p, ctypes.c_double\n"
        "lib.system_function.argtypes = [ctypes.c_double]\n"
        "print(lib.call(), lib.text().decode(), lib.system_function(1.5))\n"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": stubs}
    return subprocess.run([sys.executable, "-c", code, str(plugin)], env=environment, capture_output=True, text=True)


def test_a_library_loads_with_stand_ins_and_not_without(plugin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert "libhip.so.7" in load(plugin, "").stderr
    stubs = build_stubs(plugin, tmp_path / "cache")
    ran = load(plugin, str(stubs))
    assert ran.stdout.strip() == "1 no ROCm on this machine 1.0", ran.stderr


def test_stand_ins_are_built_once(plugin: pathlib.Path, tmp_path: pathlib.Path) -> None:
    stubs = build_stubs(plugin, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in stubs.iterdir()}
    assert {path.name for path in before} == {"stubs.c", "libgdnjax_norocm.so", "libhip.so.7"}
    assert build_stubs(plugin, tmp_path) == stubs
    assert {path: path.stat().st_mtime_ns for path in stubs.iterdir()} == before
    assert list(tmp_path.iterdir()) == [stubs]


def test_a_failing_compiler_says_so(
    plugin: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "gcc").write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    (fake / "gcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    with pytest.raises(OSError, match=r"gcc.*no space left"):
        build_stubs(plugin, tmp_path / "cache")
    # nothing half-built is taken for the whole next time
    assert list((tmp_path / "cache").iterdir()) == []


def test_what_is_stood_in_for() -> None:
    dynamic = """
 0x01 (NEEDED)             Shared library: [libamdhip64.so.7]
 0x01 (NEEDED)             Shared library: [libm.so.6]
 0x01 (NEEDED)             Shared library: [libMIOpen.so.1]
 0x01 (NEEDED)             Shared library: [libstdc++.so.6]
 0x01 (NEEDED)             Shared library: [ld-linux-x86-64.so.2]
 0x0e (SONAME)             Library soname: [xla.so]
"""
    assert needed_libraries(dynamic) == ["libamdhip64.so.7", "libMIOpen.so.1"]
    symbols = """
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND hipInit@hip_4.2 (3)
     2: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND malloc@GLIBC_2.2.5 (2)
     3: 0000000000000000     0 NOTYPE  GLOBAL DEFAULT  UND _ZN13hipblaslt_ext4GemmD1Ev
     4: 0000000000000000     0 NOTYPE  GLOBAL DEFAULT  UND _ZNKSt6vectorIiE4sizeEv
     5: 0000000000000000     0 OBJECT  GLOBAL DEFAULT  UND _ZTISt11regex_error
     6: 0000000000000000     0 NOTYPE  WEAK   DEFAULT  UND ZSTD_trace
     7: 0000000000001000     0 FUNC    GLOBAL DEFAULT   12 GetPjrtApi
"""
    assert undefined_functions(symbols) == ["_ZN13hipblaslt_ext4GemmD1Ev", "hipInit"]
    assert stub_source(["hipInit"]) == "int hipInit(void) { return 1; }\n"
