"""What importing costs, what a wheel holds, and what must not be in the repository."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Each is optional, or takes long to import; `import gdnjax` needs none of them.
HEAVY = ("torch", "starlette", "uvicorn", "prometheus_client", "matplotlib", "optax", "jupytext", "orbax", "llguidance")


def run_python(*args: str, cwd: Path, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, *args], cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.newest
def test_import_is_light(tmp_path: Path) -> None:
    code = f"import sys, gdnjax; print([name for name in {HEAVY!r} if name in sys.modules])"
    assert run_python("-c", code, cwd=tmp_path).strip() == "[]"


@pytest.mark.newest
def test_resources_of_the_source_tree() -> None:
    from gdnjax import resources

    assert resources.configs_dir() == ROOT / "configs"
    assert resources.checkpoints_dir() == ROOT / "checkpoints"


def test_resources_name_both_places_when_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gdnjax import resources

    # A top-level folder of that name, but no source tree of gdnjax around it.
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(resources, "_PACKAGE", tmp_path / "gdnjax")
    with pytest.raises(FileNotFoundError, match=r"no configs folder: .*_configs .*reinstall"):
        resources.configs_dir()


@pytest.mark.slow
def test_wheel_holds_configs_and_small_checkpoint(tmp_path: Path) -> None:
    run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT), cwd=tmp_path)
    (wheel,) = tmp_path.glob("gdnjax-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())

    configs = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    assert configs
    assert {f"gdnjax/_configs/{name}" for name in configs} <= names
    tiny = ROOT / "checkpoints" / "tiny"
    checkpoint = {path.relative_to(tiny).as_posix() for path in tiny.rglob("*") if path.is_file()}
    assert "config.json" in checkpoint
    assert {f"gdnjax/_checkpoints/tiny/{name}" for name in checkpoint} <= names
    assert "pallas_kernels/__init__.py" in names
    assert {name.split("/")[0] for name in names} == {"gdnjax", "pallas_kernels", names_dist_info(names)}

    target = tmp_path / "installed"
    pip = ("-m", "pip", "install", "-q", "--no-input", "--no-index", "--no-deps", "--target", str(target), str(wheel))
    run_python(*pip, cwd=tmp_path)
    code = (
        "from gdnjax import resources as r\n"
        "print(r.configs_dir().parent.parent)\n"
        "print(*sorted(p.name for p in r.configs_dir().glob('*.yaml')))\n"
        "print((r.checkpoints_dir() / 'tiny' / 'config.json').is_file())\n"
    )
    # PYTHONPATH comes before the editable install's path, so that the wheel's copy is imported.
    found, listed, has_checkpoint = run_python("-c", code, cwd=tmp_path, PYTHONPATH=str(target)).splitlines()
    assert Path(found) == target.resolve()
    assert set(listed.split()) == configs
    assert has_checkpoint == "True"


def names_dist_info(names: set[str]) -> str:
    return next(name.split("/")[0] for name in names if ".dist-info/" in name)


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing says which files are tracked")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = [path for name in listing.split("\0") if name and (path := ROOT / name).is_file()]
    assert files

    # Homes of any machine, and this one's checkout and home. What precedes must not make it a URL or a longer path.
    places = [rb"/(?:home|Users)/[\w.-]+/", rb"[A-Z]:\\Users\\"]
    places += [re.escape(os.fsencode(place)) + b"/" for place in (ROOT, Path.home()) if place != Path(place.anchor)]
    pattern = re.compile(rb"(?<![\w.~-])(?:" + b"|".join(places) + b")")
    found = {str(path.relative_to(ROOT)): match[0] for path in files if (match := pattern.search(path.read_bytes()))}
    assert not found
