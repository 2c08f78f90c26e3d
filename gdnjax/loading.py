"""`load`: a model from a name or a directory. `random_model`: a shape with random weights."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any

import jax

from gdnjax.config import Config, from_directory, from_preset
from gdnjax.lm import LanguageModel
from gdnjax.platform import current_platform
from gdnjax.resources import checkpoints_dir
from gdnjax.weights.declaration import init_params
from gdnjax.weights.draft_head import with_draft_head
from gdnjax.weights.files import is_checkpoint

if TYPE_CHECKING:
    from jax.sharding import Mesh


class ModelNotFoundError(FileNotFoundError):
    """The source is neither a shipped model nor a checkpoint directory."""


def shipped_models() -> list[str]:
    """Names that `load` takes besides directories."""
    return sorted(path.name for path in checkpoints_dir().iterdir() if is_checkpoint(path))


def is_safetensors(directory: pathlib.Path) -> bool:
    """Whether a directory is a Hugging Face checkpoint."""
    files = ("model.safetensors", "model.safetensors.index.json")
    return (directory / "config.json").is_file() and any((directory / name).is_file() for name in files)


def find_model(source: str | pathlib.Path) -> pathlib.Path:
    """The checkpoint directory of a shipped model's name or of a path.

    Raises:
        ModelNotFoundError: says what the source is and what it takes.
    """
    if isinstance(source, str) and source in shipped_models():
        return checkpoints_dir() / source
    path = pathlib.Path(source).expanduser()
    takes = f"it takes a shipped model ({', '.join(shipped_models())}) or a checkpoint directory"
    if not path.exists():
        raise ModelNotFoundError(f"unknown model {str(source)!r}: no such directory; {takes}")
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} is a file; {takes}")
    if not is_checkpoint(path) and not is_safetensors(path):
        raise ModelNotFoundError(
            f"{path} is no checkpoint: it has neither gdnjax.json (written by `gdnjax convert`) nor config.json "
            f"with model.safetensors or model.safetensors.index.json; {takes}"
        )
    return path


def default_dtype(config: Config) -> str:
    """The checkpoint's dtype on an accelerator; float32 on CPU, where bfloat16 is slow."""
    return "float32" if current_platform() == "cpu" else config.dtype


def load(
    source: str | pathlib.Path, dtype: str | None = None, *, mesh: Mesh | None = None, **overrides: Any
) -> LanguageModel:
    """A model from a shipped name, a `gdnjax convert` directory or a Hugging Face directory.

    Args:
        source: `tiny`, or a path.
        dtype: `float32` or `bfloat16`, the dtype of weights and activations. None: the checkpoint's on
            an accelerator, float32 on CPU. A_log, dt_bias and the gated norm are float32 in any case.
        mesh: devices to shard the weights over, see `gdnjax.weights.sharding`; None is one device.
        **overrides: keys of `Config`, such as `max_requests=64` or `state_layout="twin"`; they win over
            the file's and over the platform's.

    Raises:
        ModelNotFoundError: unknown model, or a directory that is no checkpoint.
        ConfigError: a configuration that cannot work.
        CheckpointError: files that are missing, damaged or do not fit the configuration.
    """
    from gdnjax.tokenizer import load_tokenizer
    from gdnjax.weights import orbax_io, safetensors_io
    from gdnjax.weights.sharding import shardings

    path = find_model(source)
    platform = current_platform()
    # The file's own keys are checked before the dtype is known, because the default comes from them.
    config = from_directory(path, **overrides).for_platform(platform).replace(**overrides)
    config = config.replace(dtype=dtype if dtype is not None else default_dtype(config))
    placed = None if mesh is None else shardings(config, mesh)
    read = orbax_io.restore if is_checkpoint(path) else safetensors_io.load_safetensors
    params = read(path, config, shardings=placed)
    params = with_draft_head(params, config)
    return LanguageModel(config, params, load_tokenizer(path, model_vocab_size=config.vocab_size))


def random_model(config: str | Config, seed: int = 0, dtype: str | None = None, **overrides: Any) -> LanguageModel:
    """A model of a shape with random weights: for shapes, speeds and tests, not for text.

    Args:
        config: a name from `configs/`, or a config.
        seed: of the weights, 0 to 2^32 - 1.
        dtype: as in `load`.
        **overrides: keys of `Config`.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed = {seed}; it takes an integer from 0 to 2^32 - 1")
    c = from_preset(config, **overrides) if isinstance(config, str) else config.replace(**overrides)
    c = c.for_platform(current_platform()).replace(**overrides)
    c = dataclasses.replace(c, dtype=dtype if dtype is not None else default_dtype(c))
    return LanguageModel(c, with_draft_head(init_params(c, jax.random.key(seed)), c))
