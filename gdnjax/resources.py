"""Find the files that ship with the package: model configurations and the small trained checkpoint.

A wheel holds them inside the package (pyproject.toml maps them there); a source tree, and hence an editable
install, holds them at its top level.
"""

import tomllib
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def configs_dir() -> Path:
    """Return the folder of model configurations, one `NAME.yaml` each."""
    return _find("configs")


def checkpoints_dir() -> Path:
    """Return the folder of shipped checkpoints, one folder each."""
    return _find("checkpoints")


def _find(name: str) -> Path:
    installed = _PACKAGE / f"_{name}"
    if installed.is_dir():
        return installed
    root = _PACKAGE.parent
    in_tree = root / name
    if in_tree.is_dir() and _is_source_tree(root):
        return in_tree
    raise FileNotFoundError(
        f"no {name} folder: neither {installed} (an installed wheel) nor {in_tree} (a source tree of gdnjax) is one; "
        "reinstall gdnjax, or run from a complete checkout"
    )


def _is_source_tree(root: Path) -> bool:
    # In site-packages a top-level folder of the same name would belong to some other package.
    try:
        project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError):
        return False
    return project.get("project", {}).get("name") == "gdnjax"
