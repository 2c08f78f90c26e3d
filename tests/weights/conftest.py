"""Small checkpoints as Hugging Face would write them, made with its own safetensors library."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from gdnjax.config import Config, from_directory
from gdnjax.weights.declaration import abstract_params, tensor_names

Tensors = dict[str, np.ndarray]

TEXT = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def file_dtype(name: str) -> Any:
    """As published: bfloat16, with float32 where rounding shows. dt_bias stays bfloat16 in files."""
    return np.float32 if name.endswith(("A_log", "linear_attn.norm.weight")) else ml_dtypes.bfloat16


class Checkpoint:
    """A Hugging Face directory, its config, and its tensors by declared name, in the dtypes of the file."""

    def __init__(self, path: Path, *, tied: bool, prefix: str, mtp: bool, seed: int = 0):
        path.mkdir(parents=True)
        self.path, self.prefix = path, prefix
        text = {**TEXT, "tie_word_embeddings": tied, "mtp_num_hidden_layers": int(mtp)}
        if prefix == "model.":
            self.json = {"model_type": "qwen3_5_text", **text}
        else:
            self.json = {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **text}}
            self.json["tie_word_embeddings"] = tied
        self.write_config()
        self.config: Config = from_directory(path)
        # Random, but not by the initializers: a norm's weights must not all be alike, or a mix-up would pass.
        rng = np.random.default_rng(seed)
        shapes = {name: array.shape for name, array in tensor_names(abstract_params(self.config)).items()}
        self.tensors: Tensors = {n: (0.3 * rng.normal(size=s)).astype(file_dtype(n)) for n, s in shapes.items()}

    def write_config(self) -> None:
        (self.path / "config.json").write_text(json.dumps(self.json))

    def stored(self) -> Tensors:
        """By the names in the file."""
        return {
            self.prefix + n.removeprefix("model.") if n.startswith("model.") else n: a for n, a in self.tensors.items()
        }

    def write(self, extra: Tensors | None = None, drop: tuple[str, ...] = ()) -> Path:
        """One file: the tensors but `drop`, and `extra`, both by the names in the file."""
        stored = {name: array for name, array in {**self.stored(), **(extra or {})}.items() if name not in drop}
        save_file(stored, self.path / "model.safetensors", metadata={"format": "pt"})
        return self.path

    def write_shards(self) -> Path:
        """Three shards and their index."""
        stored = sorted(self.stored().items())
        weight_map = {}
        for i in range(3):
            file = f"model-{i + 1:05d}-of-00003.safetensors"
            save_file(dict(stored[i::3]), self.path / file, metadata={"format": "pt"})
            weight_map.update({name: file for name, _ in stored[i::3]})
        self.write_index(weight_map)
        return self.path

    def write_index(self, weight_map: dict[str, Any]) -> None:
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (self.path / "model.safetensors.index.json").write_text(json.dumps(index))


MakeCheckpoint = Callable[..., Checkpoint]


@pytest.fixture
def make(tmp_path: Path) -> MakeCheckpoint:
    """Makes a checkpoint directory; nothing but config.json is written until `write` or `write_shards`."""

    def make(name: str = "hf", *, tied: bool = False, prefix: str = "model.", mtp: bool = False, seed: int = 0):
        return Checkpoint(tmp_path / name, tied=tied, prefix=prefix, mtp=mtp, seed=seed)

    return make
