"""Configurations: what is read from where, and what is refused with which message."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gdnjax.config import (
    Config,
    ConfigError,
    GenerationDefaults,
    from_dict,
    from_directory,
    from_preset,
    from_yaml,
    preset_names,
)
from gdnjax.config.presets import with_override
from gdnjax.config.schema import MOST_DRAFTS
from gdnjax.weights.declaration import abstract_params
from pallas_kernels.gated_delta_verify.record import MOST_ROWS
from tests.helpers import GOLDENS

GENERATION = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [3, 5]}


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDENS / name / "config.json").read_text())


def flat(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**golden("dense_tied"), **changes}.items() if v is not REMOVED}


def nested(_outer: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    config = golden("dense_gva")
    config["text_config"] = {k: v for k, v in {**config["text_config"], **changes}.items() if v is not REMOVED}
    return {**config, **(_outer or {})}


REMOVED = object()


# What is read


def test_flat() -> None:
    c = from_directory(GOLDENS / "dense_tied")
    assert (c.vocab_size, c.hidden_size, c.num_hidden_layers) == (160, 48, 4)
    assert (c.linear_key_head_dim, c.linear_value_head_dim, c.heads_per_key_head) == (16, 16, 1)
    assert (c.key_channels, c.value_channels, c.conv_channels) == (32, 32, 96)
    assert c.tie_word_embeddings and not c.mtp_num_hidden_layers
    assert (c.rope_theta, c.partial_rotary_factor, c.rotary_dim, c.mrope_section) == (10_000_000, 0.25, 8, (2, 1, 1))
    assert (c.dtype, c.state_dtype, c.max_position_embeddings, c.max_length) == ("float32", "float32", 4096, 4096)
    assert (c.gdn_layers, c.attention_layers) == ((0, 1, 2), (3,))


def test_nested() -> None:
    c = from_directory(GOLDENS / "dense_gva")
    assert (c.vocab_size, c.heads_per_key_head, c.linear_value_head_dim) == (192, 2, 24)
    assert not c.tie_word_embeddings and c.mtp_num_hidden_layers == 1
    assert (c.dtype, c.state_dtype) == ("bfloat16", "float32")
    # the outer flag governs
    assert from_dict(nested({"tie_word_embeddings": True})).tie_word_embeddings
    assert from_dict(nested({"tie_word_embeddings": None}, tie_word_embeddings=True)).tie_word_embeddings


def test_layer_types() -> None:
    listed = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    assert from_dict(flat(layer_types=listed, full_attention_interval=2)).layer_types == tuple(listed)
    assert from_dict(flat(layer_types=REMOVED, full_attention_interval=2)).attention_layers == (1, 3)
    assert from_dict(flat(layer_types=REMOVED, full_attention_interval=REMOVED)).attention_layers == (3,)


def test_rope_places() -> None:
    places = [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_parameters": None, "rope_scaling": {"type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}},
        {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4, "partial_rotary_factor": 0.5},  # the dict wins
    ]
    for place in places:
        c = from_dict(flat(**place))
        assert (c.rope_theta, c.rotary_dim, c.mrope_section) == (5e5, 16, None)


def test_dtype_places() -> None:
    assert from_dict(flat(dtype=REMOVED, torch_dtype="bfloat16")).dtype == "bfloat16"
    assert from_dict(nested({"dtype": "bfloat16"}, dtype=REMOVED)).dtype == "bfloat16"
    assert from_dict(flat(dtype=REMOVED)).dtype == "float32"
    assert from_dict(flat(mamba_ssm_dtype="bfloat16")).state_dtype == "bfloat16"


def test_stop_ids_are_the_union(tmp_path: Path) -> None:
    c = from_dict(nested({"eos_token_id": 7}, eos_token_id=[5, 9]), GENERATION)
    assert c.generation == GenerationDefaults(True, 0.6, 20, 0.95, stop_ids=(3, 5, 9, 7))
    assert from_dict(flat(eos_token_id=4)).generation.stop_ids == (4,)
    assert from_dict(flat()).generation == GenerationDefaults()

    (tmp_path / "config.json").write_text(json.dumps(flat(eos_token_id=4)))
    assert from_directory(tmp_path).generation.stop_ids == (4,)
    (tmp_path / "generation_config.json").write_text(json.dumps(GENERATION))
    assert from_directory(tmp_path).generation.stop_ids == (3, 5, 4)
    assert from_directory(tmp_path).generation.temperature == 0.6


def test_overrides_win() -> None:
    c = from_directory(
        GOLDENS / "dense_gva", dtype="float32", max_requests=3, platform_overrides={}, generation={"top_k": 4}
    )
    assert (c.dtype, c.max_requests, c.platform_overrides, c.generation.top_k) == ("float32", 3, (), 4)
    assert c.replace(max_length=100, page_size=16).pages_per_request == 7
    assert c.replace(max_position_embeddings=64).max_length == 64


def test_vision_only_without_its_tower() -> None:
    with pytest.raises(ConfigError, match=r"vision_config: images and video are not supported; .*language_model_only"):
        from_directory(GOLDENS / "vl")
    c = from_directory(GOLDENS / "vl", language_model_only=True)
    assert c.language_model_only and c.vocab_size == 176
    assert from_dict({**golden("vl"), "language_model_only": True}).language_model_only


# Serving sizes and platforms


def test_serving_sizes() -> None:
    c = from_directory(GOLDENS / "dense_gva", max_requests=5, max_length=100, page_size=16)
    assert (c.pages_per_request, c.kv_pages, c.slots) == (7, 35, 6)
    assert c.replace(state_layout="twin").slots == 11
    assert c.replace(kv_tokens=64).kv_pages == 4


def test_speculation_is_slots_or_records_and_wider_rings() -> None:
    c = from_directory(GOLDENS / "dense_gva", max_requests=5)
    assert (c.verify_rows, c.ring_columns, c.records) == (1, 4, False)
    counts = {
        (layout, state): c.replace(speculate=3, state_layout=layout, speculative_state=state).slots
        for layout in ("in_place", "twin")
        for state in ("record", "slots")
    }
    assert list(counts.values()) == [1 + 5, 1 + 5 * 4, 1 + 5 * 2, 1 + 5 * 2 * 4]
    c = c.replace(speculate=7, platform_overrides={"cuda": {"speculative_state": "slots"}})
    assert (c.verify_rows, c.ring_columns, c.records) == (8, 11, True)
    assert (c.for_platform("cuda").step_slots, c.for_platform("cuda").records) == (8, False)
    assert c.verify_rows == MOST_ROWS == 1 + MOST_DRAFTS


def test_platform_overrides() -> None:
    c = from_directory(GOLDENS / "dense_gva")
    assert c.state_layout == "in_place"
    assert c.for_platform("rocm").state_layout == "twin"
    assert c.for_platform("cuda") is c and c.for_platform("cpu") is c
    c = c.replace(platform_overrides={"cuda": {"page_size": 128, "state_dtype": "bfloat16"}})
    assert c.for_platform("rocm") is c
    assert (c.for_platform("cuda").page_size, c.for_platform("cuda").state_dtype) == (128, "bfloat16")


# YAML and presets

YAML = """
vocab_size: 192
hidden_size: 64
intermediate_size: 96
num_hidden_layers: 4
full_attention_interval: 2
num_attention_heads: 4
num_key_value_heads: 1
head_dim: 32
linear_num_key_heads: 2
linear_num_value_heads: 6
linear_key_head_dim: 16
linear_value_head_dim: 24
max_length: 512
generation:
  stop_ids: [4, 2]
platform_overrides:
  rocm: {state_layout: in_place}
"""


def write_yaml(folder: Path, text: str) -> Path:
    path = folder / "model.yaml"
    path.write_text(text)
    return path


def test_yaml(tmp_path: Path) -> None:
    c = from_yaml(write_yaml(tmp_path, YAML), max_requests=2)
    assert c.attention_layers == (1, 3) and c.heads_per_key_head == 3
    assert (c.max_length, c.max_requests, c.generation.stop_ids) == (512, 2, (4, 2))
    assert c.for_platform("rocm").state_layout == "in_place"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]", r"holds a list; it takes a mapping"),
        ("1: 2", r"it takes a mapping of config keys"),
        ("a: [", r"not valid YAML"),
        ("a: !!python/object/apply:os.system [echo]", r"not valid YAML"),
        ("? [1]\n: 2", r"not valid YAML"),
        (YAML + "hiden_size: 64", r"unknown key 'hiden_size' \(value 64\); known keys: .*hidden_size"),
        (YAML + "num_experts: 8", r"num_experts = 8: mixture of experts is not supported; remove the key"),
        (YAML + "kv_dtype: int8", r"kv_dtype = 'int8': a KV cache of another dtype"),
        (YAML + "speculate: 8", r"speculate = 8; it takes an integer from 0 \(plain decoding\) to 7, the most drafts"),
        (YAML + "speculate: -1", r"speculate = -1; it takes an integer from 0 \(plain decoding\) to 7"),
        (YAML + "speculate: true", r"speculate = True; it takes an integer"),
        (YAML + "speculative_state: pages", r"speculative_state = 'pages'; it takes one of 'record', 'slots'"),
        (YAML + "speculative_state: slots", r"speculative_state = 'slots'; it takes 'record' with speculate = 0.*to 7"),
        (YAML + "speculate: 3\ndraft_kv: true", r"draft_kv = True; it takes False for a model without a draft head"),
        (YAML + "draft_head: fp8", r"draft_head = 'fp8'; it takes 'weights' for a model without.*with mtp\.\* tensors"),
        (YAML + "draft_head: int4", r"draft_head = 'int4'; it takes one of 'weights', 'fp8'"),
        (YAML + "layer_types: []", r"full_attention_interval = 2 and layer_types; it takes one of them"),
        (YAML.replace("interval: 2", "interval: 0"), r"full_attention_interval = 0; it takes an integer >= 1"),
        (YAML.replace("interval: 2", "interval: x"), r"full_attention_interval = 'x'; it takes an integer >= 1"),
        (YAML.replace("layers: 4", "layers: four"), r"num_hidden_layers = 'four'; it takes an integer"),
        (YAML.replace("layers: 4", "layers: 1000000000000"), r"num_hidden_layers = 1000000000000; it takes an integer"),
        (YAML.replace("hidden_size: 64", ""), r"hidden_size"),
        (YAML.replace("stop_ids", "stop"), r"generation = \['stop'\]; it takes .*stop_ids"),
        (YAML.replace("stop_ids:", "1: 2\n  x:"), r"generation = \['1', 'x'\]; it takes .*stop_ids"),
        (YAML.replace("rocm", "tpu"), r"platform_overrides = 'tpu'; it takes one of rocm, cuda, cpu"),
        (YAML.replace("state_layout", "hidden_size"), r"platform_overrides.rocm = .*hidden_size.*; it takes serving"),
        (YAML.replace("{state_layout: in_place}", "twin"), r"platform_overrides.rocm = 'twin'; it takes a mapping"),
    ],
)  # fmt: skip
def test_yaml_refusals(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        from_yaml(write_yaml(tmp_path, text))


def test_a_preset_with_drafts() -> None:
    assert from_preset("0.8b_mtp2") == from_preset("0.8b").replace(speculate=2, draft_kv=True)
    assert from_preset("0.8b_mtp3", speculate=1).speculate == 1
    for name in ("0.8b_mtp8", "0.8b_mtp", "1b_mtp2"):
        with pytest.raises(ConfigError, match=rf"unknown config '{name.removesuffix('_mtp2')}.*with _mtp2 or _mtp3"):
            from_preset(name)
    text = with_override("0.8b_mtp2", "rocm", "state_layout", "in_place")
    assert yaml.safe_load(text)["speculate"] == 2


def test_presets() -> None:
    assert preset_names() == ["0.8b", "27b", "2b", "35b-a3b", "4b", "9b", "tiny"]
    with pytest.raises(ConfigError, match=r"unknown config '1b'; it takes one of 0.8b, 27b"):
        from_preset("1b")
    with pytest.raises(ConfigError, match=r"35b-a3b.yaml: num_experts = 256: mixture of experts is not supported"):
        from_preset("35b-a3b")
    for name in set(preset_names()) - {"35b-a3b"}:
        c = from_preset(name, max_requests=2)
        assert c.max_requests == 2 and len(c.attention_layers) == c.num_hidden_layers // 4


@pytest.mark.parametrize(("name", "parameters"), [("0.8b", 0.77e9), ("9b", 9.2e9), ("27b", 27.3e9)])
def test_parameter_counts(name: str, parameters: float) -> None:
    # Without the draft head, which published counts leave out or in.
    c = from_preset(name, mtp_num_hidden_layers=0)
    counted = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract_params(c)))
    print(f"{name}: {counted:,}")
    assert counted == pytest.approx(parameters, rel=0.03)


def test_one_array_stays_under_32_bit_indices() -> None:
    # 48 x 128 x 128 elements a slot of 27B: 2,730 slots are under 2^31 elements, 2,731 are not.
    c = from_preset("27b", kv_tokens=4096)
    assert c.replace(max_requests=2729).slots == 2730
    assert c.replace(max_requests=1364, state_layout="twin").slots == 2729
    for changes in ({"max_requests": 2730}, {"max_requests": 1365, "state_layout": "twin"}):
        with pytest.raises(
            ConfigError, match=r"max_requests = \d+; it takes a value that keeps one layer's array under"
        ):
            c.replace(**changes)
    with pytest.raises(ConfigError, match=r"kv_tokens = \d+; it takes a value that keeps one layer's array under"):
        c.replace(kv_tokens=64 * 2**15)
    assert c.replace(kv_tokens=64 * (2**15 - 2)).kv_pages == 2**15 - 2
    # Four slots a request, which is what a record of four rows spares.
    drafts = {"speculate": 3, "speculative_state": "slots"}
    assert c.replace(max_requests=2729, speculate=3).slots == 2730
    assert c.replace(max_requests=682, **drafts).slots == 2729
    with pytest.raises(ConfigError, match=r"max_requests = 683; it takes a value that keeps one layer's array under"):
        c.replace(max_requests=683, **drafts)
    # Where keys are short, rings and records are larger than states.
    narrow = c.replace(linear_num_key_heads=48, linear_key_head_dim=1, linear_value_head_dim=4096, speculate=7)
    assert narrow.request_elements == max(11 * (2 * 48 + 48 * 4096), 2 * 8 * 48 * 4096)
    assert narrow.replace(max_requests=681)
    with pytest.raises(ConfigError, match=r"max_requests = 682; it takes a value .* elements \(here 2,148,532,224\)"):
        narrow.replace(max_requests=682)


# What is refused

REFUSED = [
    ({"hiden_size": 3}, r"unknown key 'hiden_size' \(value 3\)"),
    ({"model_type": "llama"}, r"model_type = 'llama'; it takes qwen3_5 or qwen3_5_text"),
    ({"model_type": REMOVED}, r"model_type = None; it takes qwen3_5"),
    ({"model_type": ["qwen3_5"]}, r"model_type = \['qwen3_5'\]; it takes"),
    ({"hidden_size": REMOVED, "head_dim": None}, r"missing keys: hidden_size, head_dim"),
    # known, and not done
    ({"num_experts": 8}, r"num_experts = 8: mixture of experts is not supported"),
    ({"quantization_config": {"bits": 4}}, r"quantization_config = .*: quantized weights is not supported"),
    ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'; it takes 'silu' or 'swish'"),
    ({"attention_bias": True}, r"attention_bias = True; it takes False"),
    ({"attn_output_gate": False}, r"attn_output_gate = False; it takes True"),
    ({"output_gate_type": "sigmoid"}, r"output_gate_type = 'sigmoid'; it takes 'swish' or 'silu'"),
    ({"attention_dropout": 0.1}, r"attention_dropout = 0.1; it takes 0"),
    ({"mtp_use_dedicated_embeddings": True}, r"mtp_use_dedicated_embeddings = True; it takes False"),
    ({"mamba_ssm_dtype": "float16"}, r"mamba_ssm_dtype = 'float16'; it takes 'float32' or 'bfloat16'"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope_type = 'yarn'; scaled rope is not supported"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}, r"rope_scaling.type = 'linear'"),
    ({"rope_parameters": {"rope_type": "default", "factor": 4.0}}, r"unknown rope key 'factor' \(value 4.0\)"),
    ({"rope_parameters": [1]}, r"rope_parameters = \[1\]; it takes an object"),
    ({"dtype": "float16"}, r"dtype = 'float16'; it takes one of 'float32', 'bfloat16'"),
    ({"dtype": REMOVED, "torch_dtype": "float64"}, r"dtype = 'float64'; it takes one of"),
    # of the wrong type
    ({"hidden_size": 48.0}, r"hidden_size = 48.0; it takes an integer"),
    ({"hidden_size": "48"}, r"hidden_size = '48'; it takes an integer"),
    ({"hidden_size": True}, r"hidden_size = True; it takes an integer"),
    ({"tie_word_embeddings": 1}, r"tie_word_embeddings = 1; it takes true or false"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps = nan; it takes a finite number"),
    ({"rms_norm_eps": float("inf")}, r"rms_norm_eps = inf; it takes a finite number"),
    ({"rope_theta": 10**400, "rope_parameters": None}, r"rope_theta = 1000.*; it takes a finite number"),
    ({"max_position_embeddings": "many"}, r"max_position_embeddings = 'many'; it takes an integer"),
    ({"layer_types": "linear_attention"}, r"layer_types = 'linear_attention'; it takes a list"),
    ({"layer_types": ["linear_attention"] * 3 + ["sliding"]}, r"layer_types = .*sliding"),
    ({"language_model_only": "no"}, r"language_model_only = 'no'; it takes true or false"),
    ({"text_config": None}, r"text_config = None; it takes an object"),
    ({"text_config": [1]}, r"text_config = \[1\]; it takes an object"),
    # impossible
    ({"vocab_size": 0}, r"vocab_size = 0; it takes an integer from 1 to"),
    ({"hidden_size": 2**31}, r"hidden_size = 2147483648; it takes an integer from 1 to"),
    ({"num_hidden_layers": 10**12, "layer_types": None}, r"num_hidden_layers = 10{12}; it takes an integer from"),
    ({"num_hidden_layers": -1, "layer_types": None}, r"num_hidden_layers = -1; it takes an integer from 1"),
    ({"full_attention_interval": 0, "layer_types": None}, r"full_attention_interval = 0; it takes an integer >= 1"),
    ({"linear_conv_kernel_dim": 1}, r"linear_conv_kernel_dim = 1; it takes an integer from 2 to 8"),
    ({"linear_conv_kernel_dim": 9}, r"linear_conv_kernel_dim = 9; it takes an integer from 2 to 8"),
    ({"num_attention_heads": 3}, r"num_attention_heads = 3; it takes a multiple of num_key_value_heads = 2"),
    ({"linear_num_value_heads": 3}, r"linear_num_value_heads = 3; it takes a multiple of linear_num_key_heads = 2"),
    ({"num_hidden_layers": 5}, r"layer_types = '4 entries'; it takes one entry a layer, num_hidden_layers = 5"),
    ({"rms_norm_eps": 0}, r"rms_norm_eps = 0; it takes a number in \(0, 1\)"),
    ({"rope_parameters": {"rope_theta": 1.0}}, r"rope_theta = 1.0; it takes a number > 1"),
    ({"rope_parameters": {"partial_rotary_factor": 1.5}}, r"partial_rotary_factor = 1.5; it takes a number in"),
    ({"rope_parameters": {"partial_rotary_factor": 0.1}}, r"partial_rotary_factor = 0.1; .*even number of head_dim"),
    ({"rope_parameters": {"mrope_section": [1, 1, 1]}}, r"mrope_section = \(1, 1, 1\); .*half the rotary dim.*, 4"),
    ({"rope_parameters": {"mrope_section": [5, -1, 0]}}, r"mrope_section = \(5, -1, 0\); it takes three counts"),
    ({"mtp_num_hidden_layers": 2}, r"mtp_num_hidden_layers = 2; it takes 0 or 1"),
    ({"initializer_range": 0.0}, r"initializer_range = 0.0; it takes a number > 0"),
    ({"eos_token_id": 160}, r"generation.stop_ids = \(160,\); it takes ids under vocab_size = 160"),
    ({"eos_token_id": [-1]}, r"stop_ids = \(-1,\); it takes token ids >= 0"),
    ({"eos_token_id": "end"}, r"eos_token_id = 'end'; it takes a token id or a list of them"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[next(iter(changes)) for changes, _ in REFUSED])
def test_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_dict(flat(**changes), source="somewhere")
    assert str(error.value).startswith("somewhere")


def test_a_switched_off_feature_is_accepted() -> None:
    c = from_dict(flat(num_experts=0, quantization_config=None, num_experts_per_tok=None))
    assert c == from_dict(flat())


def test_refusals_within_a_nested_file() -> None:
    for config in (nested(hiden_size=3), nested({"hiden_size": 3})):
        with pytest.raises(ConfigError, match=r"unknown key 'hiden_size' \(value 3\)"):
            from_dict(config)


def test_mixture_of_experts() -> None:
    with pytest.raises(ConfigError, match=r"model_type = 'qwen3_5_moe'; .*mixture of experts is not supported"):
        from_directory(GOLDENS / "moe")
    dense = {**golden("moe"), "model_type": "qwen3_5"}
    key = "|".join(["num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"])
    with pytest.raises(ConfigError, match=rf"({key}) = \d+: mixture of experts is not supported"):
        from_dict(dense)


@pytest.mark.parametrize(
    ("generation", "message"),
    [
        ({"num_beams": 4}, r"generation_config.json\): num_beams = 4 is not supported; it takes 1"),
        ({"penalty_alpha": 0.6}, r"penalty_alpha = 0.6 is not supported; it takes None"),
        ({"no_repeat_ngram_size": 3}, r"no_repeat_ngram_size = 3 is not supported; it takes 0"),
        ({"top_p_decay": 0.5}, r"generation_config.json\): unknown key 'top_p_decay' \(value 0.5\)"),
        ({"temperature": -1.0}, r"temperature = -1.0; it takes a number >= 0"),
        ({"temperature": "hot"}, r"temperature = 'hot'; it takes a finite number"),
        ({"top_k": -1}, r"top_k = -1; it takes an integer >= 0"),
        ({"top_p": 0.0}, r"top_p = 0.0; it takes a number in \(0, 1\]"),
        ({"min_p": 1.0}, r"min_p = 1.0; it takes a number in \[0, 1\)"),
        ({"repetition_penalty": 0}, r"repetition_penalty = 0; it takes a number > 0"),
        ({"do_sample": 1}, r"do_sample = 1; it takes true or false"),
        ({"eos_token_id": [1, True]}, r"eos_token_id = \[1, True\]; it takes a token id or a list of them"),
    ],
)
def test_generation_refusals(generation: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(flat(), generation)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_requests": 0}, r"max_requests = 0; it takes an integer from 1 to 65,536"),
        ({"max_requests": 65537}, r"max_requests = 65537; it takes an integer from 1 to 65,536"),
        ({"max_length": 5000}, r"max_length = 5000; it takes an integer from 1 to max_position_embeddings = 4096"),
        ({"max_length": 0}, r"max_length = 0; it takes an integer from 1"),
        ({"page_size": 0}, r"page_size = 0; it takes an integer from 1 to 65,536"),
        ({"prefill_tokens": 0}, r"prefill_tokens = 0; it takes an integer >= 1"),
        ({"kv_tokens": 100, "page_size": 64}, r"kv_tokens = 100; it takes a positive multiple of page_size = 64"),
        ({"kv_tokens": 0}, r"kv_tokens = 0; it takes a positive multiple"),
        ({"state_layout": "triple"}, r"state_layout = 'triple'; it takes one of 'in_place', 'twin'"),
        ({"state_dtype": "float16"}, r"state_dtype = 'float16'; it takes one of 'float32', 'bfloat16'"),
        ({"dtype": "float16"}, r"dtype = 'float16'; it takes one of"),
        ({"max_position_embeddings": "x"}, r"max_position_embeddings = 'x'; it takes an integer"),
        ({"no_such": 1}, r"override: unknown key 'no_such' \(value 1\); known keys"),
        ({"kv_dtype": "int8"}, r"override: kv_dtype = 'int8': .* is not supported; remove the key"),
        ({"generation": {"top": 1}}, r"generation = \['top'\]; it takes do_sample"),
    ],
)
def test_serving_refusals(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_dict(flat(), **changes)
    with pytest.raises(ConfigError, match=message):
        from_dict(flat()).replace(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"holds a list; it takes a JSON object"),
        ("{", r"not valid JSON"),
        ("[" * 100_000, r"not valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", r"not valid JSON"),
    ],
    ids=["list", "truncated", "deep", "long number"],
)
def test_files_that_are_no_config(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config.json there; it takes a checkpoint directory"):
        from_directory(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        from_directory(tmp_path)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ConfigError, match="not valid JSON"):
        from_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (16 * 2**20 + 1))
    with pytest.raises(ConfigError, match=r"16,777,217 bytes; a configuration file has at most 16,777,216"):
        from_directory(tmp_path)


# As a value


def test_equality_and_hash() -> None:
    one, other = from_dict(nested(), GENERATION), from_dict(nested(), GENERATION)
    assert one == other and hash(one) == hash(other) and one is not other
    assert one != one.replace(max_requests=9) and one != "config"
    assert one.replace(max_requests=9).replace(max_requests=one.max_requests) == one
    assert {one: 1}[other] == 1
    for again in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):
        assert again == one and hash(again) == hash(one)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.max_requests = 3  # type: ignore[misc]
    # every field counts
    for field in dataclasses.fields(Config):
        changed = copy.copy(one)
        object.__setattr__(changed, field.name, "another value")
        for cached in ("_values", "_hash"):
            changed.__dict__.pop(cached, None)
        assert changed != one, field.name


# Any JSON

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*flat(), *nested(), *nested()["text_config"], *golden("vl"), "rope_theta", "rope_scaling", "dtype",
               "torch_dtype", "language_model_only", "num_experts", "quantization_config"})  # fmt: skip
ROPE_KEYS = ["rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved"]
VALUES = JSON | st.sampled_from([0, 1, 2, 4, 64, -1, 2**31, 10**12, 0.5, "default", "float32", []])
CHANGES = st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), VALUES, max_size=3)
ROPE = st.dictionaries(st.sampled_from(ROPE_KEYS) | st.text(max_size=4), VALUES, max_size=3)
GENERATION_JSON = st.dictionaries(
    st.sampled_from([*GENERATION, "min_p", "num_beams"]) | st.text(max_size=8), VALUES, max_size=3
)


def config_or_error(*args: Any, **kwargs: Any) -> None:
    try:
        config = from_dict(*args, **kwargs)
    except ConfigError as error:
        assert re.search(r"\S", str(error))
    else:
        assert isinstance(config, Config)
        hash(config)
        config.for_platform("rocm")


@settings(max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(outer=CHANGES, inner=CHANGES, rope=st.none() | ROPE, generation=GENERATION_JSON, is_nested=st.booleans())
def test_any_json_gives_a_config_or_a_config_error(
    outer: dict, inner: dict, rope: dict | None, generation: dict, is_nested: bool
) -> None:
    inner = inner if rope is None else {**inner, "rope_parameters": rope}
    config_or_error(nested(outer, **inner) if is_nested else flat(**inner), generation)


@settings(max_examples=100)
@given(config=st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=8), VALUES))
def test_json_that_is_no_config_at_all(config: dict) -> None:
    config_or_error(config)
    config_or_error({**config, "model_type": "qwen3_5"})


@settings(max_examples=200)
@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(f.name for f in dataclasses.fields(Config) if f.name != "platform_overrides")),
        VALUES,
        max_size=3,
    )
)
def test_any_override_gives_a_config_or_a_config_error(changes: dict) -> None:
    config_or_error(nested(), **changes)
    with contextlib.suppress(ConfigError):
        hash(from_dict(nested()).replace(**changes))


def test_platform_overrides_are_checked_when_they_are_read(tmp_path):
    with pytest.raises(ConfigError, match=r"platform_overrides.rocm: state_layout = 'triple'; it takes one of"):
        from_preset("tiny", platform_overrides={"rocm": {"state_layout": "triple"}})
    with pytest.raises(ConfigError, match=r"platform_overrides.cpu: max_requests = \{\}; it takes an integer"):
        from_preset("tiny", platform_overrides={"cpu": {"max_requests": {}}})


def test_yaml_aliases_are_refused(tmp_path):
    path = tmp_path / "bomb.yaml"
    path.write_text("a: &a [1, 1]\nb: &b [*a, *a]\nunknown: [*b, *b]\n")
    with pytest.raises(ConfigError, match="YAML aliases"):
        from_yaml(path)


def test_scaled_rope_in_the_older_key_is_not_hidden_by_the_newer_one():
    rope = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_type": "default"}}
    with pytest.raises(ConfigError, match=r"rope_scaling.type = 'linear'; scaled rope is not supported"):
        from_dict({**flat(), **rope})
