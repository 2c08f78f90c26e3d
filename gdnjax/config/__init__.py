"""Configuration of a model and of how it is served. `Config` is the one dataclass."""

from gdnjax.config.checks import ConfigError
from gdnjax.config.huggingface import from_dict, from_directory
from gdnjax.config.presets import from_preset, from_yaml, preset_names
from gdnjax.config.schema import Config, GenerationDefaults

__all__ = [
    "Config",
    "ConfigError",
    "GenerationDefaults",
    "from_dict",
    "from_directory",
    "from_preset",
    "from_yaml",
    "preset_names",
]
