"""`gdnjax doctor`: versions, devices, and what does not fit together."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
from typing import Any

from gdnjax.cli import add_json_flag, print_json
from gdnjax.cli.source import add_platform

PACKAGES = ("gdnjax", "jax", "jaxlib", "flax", "orbax-checkpoint", "numpy", "safetensors", "tokenizers")
PLUGINS = tuple(
    f"jax-{name}-{part}" for name in ("rocm7", "rocm10", "rocm60", "cuda12", "cuda13") for part in ("plugin", "pjrt")
)


def add_parser(commands: Any) -> None:
    parser: argparse.ArgumentParser = commands.add_parser("doctor", help="check versions and devices")
    add_platform(parser)
    add_json_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    report = examine(args.platform)
    if args.json:
        print_json(report)
    else:
        for name, version in report["versions"].items():
            print(f"{name:<20} {version}")
        for device in report["devices"]:
            print(f"{'device':<20} {device}")
        print(f"{'platform':<20} {report['platform']}")
        for problem in report["problems"]:
            print(f"{'PROBLEM':<20} {problem}")
        if not report["problems"]:
            print("no problems found")
    return 1 if report["problems"] else 0


def examine(wanted: str | None) -> dict[str, Any]:
    """Versions, devices and problems.

    Args:
        wanted: the platform that is asked for (`rocm`, `cuda`, `cpu`), or None.
    """
    versions = {"python": platform.python_version(), **installed(PACKAGES)}
    plugins = installed(PLUGINS)
    problems = plugin_problems(versions.get("jax", ""), versions.get("jaxlib", ""), plugins)
    devices, found = find_devices(problems)
    problems += platform_problems(wanted, found, plugins, os.environ.get("JAX_PLATFORMS", ""))
    return {
        "versions": {**versions, **plugins},
        "devices": devices,
        "platform": found,
        "problems": problems,
    }


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def plugin_problems(jax: str, jaxlib: str, plugins: dict[str, str]) -> list[str]:
    """Versions that do not belong together. A plugin must be of jax's version; `.postN` is a fix of it."""
    problems = []
    if jaxlib != jax:
        problems.append(f"jaxlib {jaxlib} with jax {jax}: install jaxlib=={jax}")
    for name, version in plugins.items():
        if version.split(".post")[0] != jax:
            problems.append(f"{name} {version} with jax {jax}: install {name}=={jax}")
        pair = name.replace("plugin", "pjrt") if name.endswith("plugin") else name.replace("pjrt", "plugin")
        if pair not in plugins:
            problems.append(f"{name} is installed without {pair}: install {pair}=={jax}")
    return problems


def find_devices(problems: list[str]) -> tuple[list[str], str | None]:
    """Descriptions of JAX's devices, and their platform; a failure is added to `problems`."""
    from gdnjax.platform import current_platform, devices, gfx_architecture

    try:
        names = []
        for device in devices():
            arch = gfx_architecture(device.device_kind)
            names.append(f"{device.id}: {device.device_kind}" + (f" (architecture {arch})" if arch else ""))
        return names, current_platform()
    except RuntimeError as error:
        problems.append(f"JAX finds no device: {error}")
        return [], None


def platform_problems(wanted: str | None, found: str | None, plugins: dict[str, str], env: str) -> list[str]:
    """A GPU that was asked for and is not used: by name, or by installing its plugin."""
    if wanted is not None:
        if found == wanted:
            return []
        asked = f"{wanted} was asked for and JAX uses {found or 'no device'}"
        if wanted == "cpu":
            return [f"{asked}: set JAX_PLATFORMS=cpu"]
        return [f"{asked}: check the driver and install the extra gdnjax[{wanted}]"]
    for vendor in ("rocm", "cuda"):
        if any(vendor in name for name in plugins) and found == "cpu" and "cpu" not in env.split(","):
            return [
                f"the {vendor} plugin is installed and JAX runs on the CPU: check the driver, or set JAX_PLATFORMS=cpu "
                "if that is what you want"
            ]
    return []
