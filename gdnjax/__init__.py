"""gdnjax: Qwen3.5 models in JAX. See `load`, `LanguageModel`, and the pure functions.

Names are imported when they are first used, so that `import gdnjax` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdnjax.chat import encode_chat, render_chat
    from gdnjax.config import Config, ConfigError, from_preset
    from gdnjax.engine import Engine
    from gdnjax.generation import GenerationResult, SamplingParams
    from gdnjax.lm import LanguageModel
    from gdnjax.loading import ModelNotFoundError, load, random_model
    from gdnjax.model import decode_step, forward, forward_with_intermediates, mtp_logits, prefill, verify_step
    from gdnjax.state import Batch, State, VerifyBatch, commit, commit_verified, init_state, prefill_batch, verify_batch
    from gdnjax.weights.declaration import Params, init_params
    from gdnjax.weights.files import CheckpointError
    from gdnjax.weights.packing import pack

_HOME = {
    "encode_chat": "gdnjax.chat",
    "render_chat": "gdnjax.chat",
    "Config": "gdnjax.config",
    "ConfigError": "gdnjax.config",
    "Engine": "gdnjax.engine",
    "from_preset": "gdnjax.config",
    "GenerationResult": "gdnjax.generation",
    "SamplingParams": "gdnjax.generation",
    "LanguageModel": "gdnjax.lm",
    "ModelNotFoundError": "gdnjax.loading",
    "load": "gdnjax.loading",
    "random_model": "gdnjax.loading",
    "decode_step": "gdnjax.model",
    "forward": "gdnjax.model",
    "forward_with_intermediates": "gdnjax.model",
    "mtp_logits": "gdnjax.model",
    "prefill": "gdnjax.model",
    "verify_step": "gdnjax.model",
    "Batch": "gdnjax.state",
    "State": "gdnjax.state",
    "VerifyBatch": "gdnjax.state",
    "commit": "gdnjax.state",
    "commit_verified": "gdnjax.state",
    "init_state": "gdnjax.state",
    "prefill_batch": "gdnjax.state",
    "verify_batch": "gdnjax.state",
    "Params": "gdnjax.weights.declaration",
    "init_params": "gdnjax.weights.declaration",
    "CheckpointError": "gdnjax.weights.files",
    "pack": "gdnjax.weights.packing",
}

__all__ = [
    "Batch",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "GenerationResult",
    "LanguageModel",
    "ModelNotFoundError",
    "Params",
    "SamplingParams",
    "State",
    "VerifyBatch",
    "commit",
    "commit_verified",
    "decode_step",
    "encode_chat",
    "forward",
    "forward_with_intermediates",
    "from_preset",
    "init_params",
    "init_state",
    "load",
    "mtp_logits",
    "pack",
    "prefill",
    "prefill_batch",
    "random_model",
    "render_chat",
    "verify_batch",
    "verify_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gdnjax' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
