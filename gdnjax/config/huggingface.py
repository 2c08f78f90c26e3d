"""Reads a Hugging Face `config.json` and `generation_config.json` into a `Config`."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from gdnjax.config.checks import ConfigError, require
from gdnjax.config.schema import UNSUPPORTED, Config, check_keys, freeze

MODEL_TYPES = ("qwen3_5", "qwen3_5_text")
MAX_JSON_BYTES = 16 * 2**20
MAX_LAYERS = 4096

# Sizes that Hugging Face would fill in from class defaults. The defaults describe no published
# model, so a file without them is refused instead of guessed at.
REQUIRED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"
).split()
OPTIONAL = (
    "linear_conv_kernel_dim rms_norm_eps max_position_embeddings tie_word_embeddings mtp_num_hidden_layers "
    "initializer_range"
).split()

# key -> values under which this implementation computes what the file asks for
FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "attention_bias": (False,),
    "attn_output_gate": (True,),
    "output_gate_type": ("swish", "silu", None),
    "mtp_use_dedicated_embeddings": (False,),
    "mamba_ssm_dtype": ("float32", "bfloat16"),
    "attention_dropout": (0, 0.0),
    "tie_encoder_decoder": (False,),
    "deepstack_visual_indexes": ([], None),
}
# Keys that say nothing about the text model's forward pass.
IGNORED = frozenset(
    """architectures model_type transformers_version use_cache _name_or_path return_dict output_hidden_states
    output_attentions chunk_size_feed_forward is_encoder_decoder add_cross_attention problem_type id2label label2id
    pad_token_id bos_token_id image_token_id video_token_id vision_start_token_id vision_end_token_id
    full_attention_interval rope_parameters rope_scaling rope_theta partial_rotary_factor layer_types eos_token_id
    dtype torch_dtype text_config vision_config language_model_only mlp_only_layers _attn_implementation_autoset
    ignore_keys_at_rope_validation""".split()
)
ROPE_KEYS = frozenset("rope_type type rope_theta partial_rotary_factor mrope_section mrope_interleaved".split())

GENERATION_KEYS = ("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Values that leave generation as it is here; any other value would be dropped in silence.
GENERATION_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1, None),
    "num_return_sequences": (1, None),
    "typical_p": (1.0, None),
    "length_penalty": (1.0, None),
    "no_repeat_ngram_size": (0, None),
    "epsilon_cutoff": (0.0, None),
    "eta_cutoff": (0.0, None),
    "penalty_alpha": (None,),
}
GENERATION_IGNORED = frozenset(
    """bos_token_id pad_token_id eos_token_id transformers_version _from_model_config max_new_tokens max_length
    use_cache""".split()
)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object from an untrusted file, size checked first.

    Raises:
        ConfigError: the file is too large, no JSON, or no object.
    """
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: {size:,} bytes; a configuration file has at most {MAX_JSON_BYTES:,}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds a {type(value).__name__}; it takes a JSON object")
    return value


def from_directory(directory: pathlib.Path, **overrides: Any) -> Config:
    """The config of a checkpoint directory that holds `config.json` (and `generation_config.json`)."""
    path = directory / "config.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: no config.json there; it takes a checkpoint directory")
    generation = directory / "generation_config.json"
    return from_dict(
        read_json(path), read_json(generation) if generation.is_file() else {}, source=str(path), **overrides
    )


def from_dict(
    config: Mapping[str, Any],
    generation: Mapping[str, Any] | None = None,
    /,
    *,
    source: str = "config",
    **overrides: Any,
) -> Config:
    """A `Config` from the contents of a Hugging Face `config.json`, nested or flat.

    Args:
        config: the parsed file. Nested files keep the text model under `text_config`.
        generation: the parsed `generation_config.json`, if there is one.
        source: name used in error messages.
        **overrides: keys of `Config` that win over the file.

    Raises:
        ConfigError: a key that is unknown, unsupported, impossible or contradictory.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        hint = "; mixture of experts is not supported" if model_type and "moe" in str(model_type) else ""
        raise ConfigError(f"{source}: model_type = {model_type!r}; it takes {' or '.join(MODEL_TYPES)}{hint}")
    nested = "text_config" in config
    if nested and not isinstance(config["text_config"], Mapping):
        raise ConfigError(f"{source}: text_config = {config['text_config']!r}; it takes an object")
    text = dict(config["text_config"]) if nested else dict(config)
    text_only = overrides.get("language_model_only", config.get("language_model_only") or False)
    if not isinstance(text_only, bool):
        raise ConfigError(f"{source}: language_model_only = {text_only!r}; it takes true or false")
    if config.get("vision_config") is not None and not text_only:
        raise ConfigError(
            f"{source}: vision_config: images and video are not supported; set language_model_only=True "
            "(--language-model-only) to load the text model and leave model.visual.* unread"
        )
    for scope in [text, *([{k: v for k, v in config.items() if k != "text_config"}] if nested else [])]:
        _check_scope(scope, source)

    values: dict[str, Any] = {k: text[k] for k in (*REQUIRED, *OPTIONAL) if text.get(k) is not None}
    missing = [k for k in REQUIRED if k not in values]
    if missing:
        raise ConfigError(f"{source}: missing keys: {', '.join(missing)}")
    # The outer flag governs a nested file (published small models say it in both places).
    if config.get("tie_word_embeddings") is not None:
        values["tie_word_embeddings"] = config["tie_word_embeddings"]
    values["layer_types"] = _layer_types(text, values["num_hidden_layers"], source)
    values.update(_rope(text, source))
    dtype = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    values["dtype"] = dtype if dtype is not None else "float32"
    if text.get("mamba_ssm_dtype") is not None:
        values["state_dtype"] = text["mamba_ssm_dtype"]
    values["language_model_only"] = text_only
    stops = [*_ids(text.get("eos_token_id"), source), *_ids(config.get("eos_token_id"), source)]
    values["generation"] = _generation(generation or {}, stops, source)
    positions = values.get("max_position_embeddings")
    values["max_length"] = min(4096, positions) if isinstance(positions, int) else 4096

    check_keys(overrides, "override")
    values.update({k: freeze(k, v) for k, v in overrides.items()})
    try:
        return Config(**{k: freeze(k, v) for k, v in values.items()})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def _check_scope(scope: Mapping[str, Any], source: str) -> None:
    for key, value in scope.items():
        if key in UNSUPPORTED and value:
            raise ConfigError(f"{source}: {key} = {value!r}: {UNSUPPORTED[key]} is not supported")
        if key in FIXED and value not in FIXED[key]:
            takes = " or ".join(repr(v) for v in FIXED[key])
            raise ConfigError(f"{source}: {key} = {value!r}; it takes {takes}")
        if key not in IGNORED and key not in FIXED and key not in UNSUPPORTED and key not in (*REQUIRED, *OPTIONAL):
            raise ConfigError(f"{source}: unknown key {key!r} (value {value!r})")


def _layer_types(text: Mapping[str, Any], layers: Any, source: str) -> tuple[str, ...]:
    # An explicit list wins over the interval.
    if text.get("layer_types") is not None:
        if not isinstance(text["layer_types"], list):
            raise ConfigError(f"{source}: layer_types = {text['layer_types']!r}; it takes a list")
        return tuple(text["layer_types"])
    interval = text.get("full_attention_interval", 4)
    if not isinstance(interval, int) or interval < 1:
        raise ConfigError(f"{source}: full_attention_interval = {interval!r}; it takes an integer >= 1")
    try:
        return interval_layers(layers, interval)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def interval_layers(layers: Any, interval: int) -> tuple[str, ...]:
    """Layer i (from 0) is full attention when (i + 1) is a multiple of `interval`.

    Raises:
        ConfigError: `layers` is no integer, or so large that listing them would exhaust the memory.
    """
    counts = isinstance(layers, int) and 1 <= layers <= MAX_LAYERS
    require(counts, "num_hidden_layers", layers, f"an integer from 1 to {MAX_LAYERS}")
    return tuple("full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers))


def _rope(text: Mapping[str, Any], source: str) -> dict[str, Any]:
    rope: dict[str, Any] = {k: text[k] for k in ("rope_theta", "partial_rotary_factor") if text.get(k) is not None}
    for key in ("rope_scaling", "rope_parameters"):
        inner = text.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise ConfigError(f"{source}: {key} = {inner!r}; it takes an object")
        for name in ("rope_type", "type"):
            kind = inner.get(name, "default")
            if kind != "default":
                raise ConfigError(f"{source}: {key}.{name} = {kind!r}; scaled rope is not supported: 'default'")
        rope.update(inner)
    unknown = set(rope) - ROPE_KEYS
    if unknown:
        key = sorted(unknown)[0]
        raise ConfigError(
            f"{source}: unknown rope key {key!r} (value {rope[key]!r}); known: {', '.join(sorted(ROPE_KEYS))}"
        )
    return {k: rope[k] for k in ("rope_theta", "partial_rotary_factor", "mrope_section") if rope.get(k) is not None}


def _ids(value: Any, source: str) -> list[int]:
    if value is None:
        return []
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ConfigError(f"{source}: eos_token_id = {value!r}; it takes a token id or a list of them")
    return ids


def _generation(generation: Mapping[str, Any], stops: list[int], source: str) -> dict[str, Any]:
    where = f"{source} (generation_config.json)"
    values: dict[str, Any] = {}
    for key, value in generation.items():
        if key in GENERATION_NEUTRAL:
            if value not in GENERATION_NEUTRAL[key]:
                raise ConfigError(
                    f"{where}: {key} = {value!r} is not supported; it takes {GENERATION_NEUTRAL[key][0]!r}"
                )
        elif key in GENERATION_KEYS:
            if value is not None:
                values[key] = value
        elif key not in GENERATION_IGNORED:
            raise ConfigError(f"{where}: unknown key {key!r} (value {value!r})")
    # config.json names only <|endoftext|>; generation_config.json adds <|im_end|>. Both end a text.
    values["stop_ids"] = tuple(dict.fromkeys([*_ids(generation.get("eos_token_id"), where), *stops]))
    return values
