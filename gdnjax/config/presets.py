"""Named shapes: `configs/NAME.yaml`, flat files of `Config` keys."""

from __future__ import annotations

import pathlib
import re
from typing import Any

import yaml

from gdnjax.config.checks import ConfigError
from gdnjax.config.huggingface import interval_layers
from gdnjax.config.schema import Config, check_keys, freeze
from gdnjax.resources import configs_dir

MAX_YAML_BYTES = 2**20


def preset_names() -> list[str]:
    """The names of the shipped shapes."""
    return sorted(path.stem for path in configs_dir().glob("*.yaml"))


def speculating(name: str) -> tuple[str, dict[str, Any]]:
    """`27b_mtp3` is the shape `27b` with 3 drafts a step of its draft head: the shape, and the keys that the rest of
    its name sets."""
    match = re.fullmatch(r"(.+)_mtp([1-7])", name)
    if match is None:
        return name, {}
    return match.group(1), {"speculate": int(match.group(2)), "draft_kv": True}


def preset_path(name: str) -> pathlib.Path:
    """The file of a shipped shape, or a file of one's own: any name that ends in `.yaml`.

    Raises:
        ConfigError: neither.
    """
    if name.endswith(".yaml"):
        path = pathlib.Path(name).expanduser()
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; it takes a YAML file of config keys, as those in configs/")
        return path
    name, _ = speculating(name)
    if name not in preset_names():
        takes = ", ".join(preset_names())
        raise ConfigError(
            f"unknown config {name!r}; it takes one of {takes}, with _mtp2 or _mtp3 behind it for as many drafts a "
            "step, or a file that ends in .yaml"
        )
    return configs_dir() / f"{name}.yaml"


def from_preset(name: str, **overrides: Any) -> Config:
    """The shape `configs/NAME.yaml`, or the one in a file of one's own; `NAME_mtp3` drafts 3 tokens a step.

    Raises:
        ConfigError: no such shape, or one with a key that is unknown or unsupported.
    """
    return from_yaml(preset_path(name), **speculating(name)[1] | overrides)


def with_override(name: str, platform: str, key: str, value: Any) -> str:
    """The text of a shape's file with `platform_overrides.PLATFORM.KEY` set, other overrides kept.

    Raises:
        ConfigError: no such shape, or a value that the key does not take.
    """
    config = from_preset(name)
    merged = {p: dict(keys) for p, keys in config.platform_overrides}
    merged.setdefault(platform, {})[key] = value
    config.replace(platform_overrides=merged)
    values = yaml.safe_load(preset_path(name).read_text(encoding="utf-8")) | speculating(name)[1]
    values |= {"platform_overrides": merged}
    return yaml.safe_dump(values, sort_keys=False)


def from_yaml(path: pathlib.Path, **overrides: Any) -> Config:
    """A `Config` from a YAML file. `full_attention_interval` may stand in for `layer_types`."""
    size = path.stat().st_size
    if size > MAX_YAML_BYTES:
        raise ConfigError(f"{path}: {size:,} bytes; a config file has at most {MAX_YAML_BYTES:,}")
    try:
        text = path.read_text(encoding="utf-8")
        # A few lines of aliases can stand for more data than any memory holds.
        if any(isinstance(token, yaml.AliasToken) for token in yaml.scan(text, Loader=yaml.SafeLoader)):
            raise ConfigError(f"{path}: uses YAML aliases (*name); write the values out")
        values = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(k, str) for k in values):
        raise ConfigError(f"{path}: holds a {type(values).__name__}; it takes a mapping of config keys")
    interval = values.pop("full_attention_interval", None)
    check_keys(values, str(path))
    if interval is not None:
        if "layer_types" in values:
            raise ConfigError(f"{path}: full_attention_interval = {interval!r} and layer_types; it takes one of them")
        if not isinstance(interval, int) or interval < 1:
            raise ConfigError(f"{path}: full_attention_interval = {interval!r}; it takes an integer >= 1")
        values["layer_types"] = interval_layers(values.get("num_hidden_layers", 0), interval)
    check_keys(overrides, "override")
    merged = {k: freeze(k, v) for k, v in {**values, **overrides}.items()}
    try:
        return Config(**merged)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from None
