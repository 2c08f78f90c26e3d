"""The one frozen configuration: model sizes, serving limits and sampling defaults.

Everything here is hashable, so a `Config` can be a static part of a jitted function's arguments.
Where a value comes from is the business of `gdnjax.config.huggingface` and `gdnjax.config.presets`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Literal

from gdnjax.config.checks import PLATFORMS, ConfigError, check_types, require

DType = Literal["float32", "bfloat16"]
MOST_DRAFTS = 7
"""Most drafts of a request in one step."""
LayerType = Literal["linear_attention", "full_attention"]

# Keys that name something this project knows of and does not do yet. A value that switches the
# feature off is harmless and accepted; anything else must not be dropped in silence.
UNSUPPORTED = {
    "num_experts": "mixture of experts",
    "num_experts_per_tok": "mixture of experts",
    "moe_intermediate_size": "mixture of experts",
    "shared_expert_intermediate_size": "mixture of experts",
    "kv_dtype": "a KV cache of another dtype than the activations'",
    "quantization_config": "quantized weights",
}


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """Sampling defaults of a checkpoint (its `generation_config.json`).

    `do_sample=False` means greedy whatever the other fields say, as in Hugging Face.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self)
        require(self.temperature >= 0.0, "temperature", self.temperature, "a number >= 0 (0 is greedy)")
        require(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 switches it off)")
        require(0.0 < self.top_p <= 1.0, "top_p", self.top_p, "a number in (0, 1] (1 switches it off)")
        require(0.0 <= self.min_p < 1.0, "min_p", self.min_p, "a number in [0, 1) (0 switches it off)")
        require(self.repetition_penalty > 0.0, "repetition_penalty", self.repetition_penalty, "a number > 0")
        require(all(i >= 0 for i in self.stop_ids), "stop_ids", self.stop_ids, "token ids >= 0")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of a Qwen3.5 text model and the limits it is served with.

    Model fields carry Hugging Face's names. Serving fields:

    * `max_requests`: requests that can be live at once (requests, not slots).
    * `max_length`: longest request, prompt and new tokens together.
    * `kv_tokens`: tokens the paged KV cache holds over all requests; None means room for
      `max_requests` requests of `max_length`.
    * `page_size`: tokens a KV page.
    * `prefill_tokens`: most prompt tokens one prefill call processes; longer work is cut into windows.
    * `state_layout`: `in_place` (one recurrent slot a request) or `twin` (two: a decode step reads
      one and writes the other). Twin doubles the recurrent pool; the values are the same.
    * `draft_kv`: the state also has the keys and values of the draft head, beside those of the attention layers.
    * `draft_head`: what the draft head's logits are made with: the model's own head (`weights`), or `fp8`, a copy of
      it that takes half its bytes and is made where weights are loaded. No other logits are made with it.
    * `speculate`: most drafts of a request that one step verifies, 0 to 7; 0 is plain decoding.
    * `speculative_state`: how a recurrent state gets back from drafts that were rejected: `record` (the slots that
      `state_layout` gives it, and the inputs that rebuild the rest) or `slots` (1 + speculate slots instead of one).
    * `state_dtype`: dtype of the recurrent state. bfloat16 halves it and rounds it at every step.
    * `kernels`: `reference` (plain JAX), `pallas`, or `interpret` (kernels as plain JAX, for tests); None is
      `pallas` on a GPU and `reference` anywhere else. Sizes that a kernel cannot take run the reference.
    * `attention_pin`, `attention_segment`: decode attention cuts every row's keys into
      attention_pin / attention_segment segments, of attention_segment keys at attention_pin keys.
    * `memory_fraction`: share of the device's memory that weights, state, KV cache and prefix snapshots
      take together where a server derives `max_requests` or `kv_tokens` (`gdnjax.sizes.derive_limits`).
    * `prefix_cache_bytes`: memory for snapshots of prefixes that requests share; 0 switches prefix caching off.
    * `prefix_interval`: a prefix is kept about every so many tokens, rounded up to whole pages.
    * `platform_overrides`: serving keys that differ by platform, applied by `for_platform`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    layer_types: tuple[LayerType, ...]
    linear_conv_kernel_dim: int = 4
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] | None = None
    tie_word_embeddings: bool = False
    mtp_num_hidden_layers: int = 0
    initializer_range: float = 0.02
    dtype: DType = "bfloat16"

    max_requests: int = 8
    max_length: int = 4096
    kv_tokens: int | None = None
    page_size: int = 64
    prefill_tokens: int = 1024
    state_layout: Literal["in_place", "twin"] = "in_place"
    draft_kv: bool = False
    draft_head: Literal["weights", "fp8"] = "weights"
    speculate: int = 0
    speculative_state: Literal["record", "slots"] = "record"
    state_dtype: DType = "float32"
    kernels: Literal["reference", "pallas", "interpret"] | None = None
    attention_pin: int = 4096
    attention_segment: int = 256
    memory_fraction: float = 0.9
    prefix_cache_bytes: int = 0
    prefix_interval: int = 512
    platform_overrides: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = (("rocm", (("state_layout", "twin"),)),)

    generation: GenerationDefaults = GenerationDefaults()
    language_model_only: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        _check_model(self)
        _check_serving(self)
        for platform, overrides in self.platform_overrides:
            # Their types only: whether a platform's sizes fit together is asked on that platform.
            check_types(self, dict(overrides), f"platform_overrides.{platform}: ")

    # A config is part of the key of every jitted call. Comparing it to itself must not walk 30 fields.
    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Config) and self._values == other._values

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, f.name) for f in dataclasses.fields(self))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._values)

    @property
    def heads_per_key_head(self) -> int:
        """Value heads that share one key head (Hv / Hk)."""
        return self.linear_num_value_heads // self.linear_num_key_heads

    @property
    def key_channels(self) -> int:
        """Channels of q, and of k, in a GDN layer (Hk * dk)."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_channels(self) -> int:
        """Channels of v, and of z, in a GDN layer (Hv * dv)."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def conv_channels(self) -> int:
        """Channels that go through the causal convolution: q, k and v."""
        return 2 * self.key_channels + self.value_channels

    @property
    def slot_elements(self) -> int:
        """Numbers in a recurrent slot (Hv * dv * dk)."""
        return self.value_channels * self.linear_key_head_dim

    @property
    def request_elements(self) -> int:
        """Most numbers that a request has in an array other than the slots: in a ring, or in a part of a record."""
        recorded = max(self.key_channels, self.value_channels, 2 * self.linear_num_value_heads)
        return max(self.ring_columns * self.conv_channels, 2 * self.verify_rows * recorded * self.records)

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of an attention head that rope turns."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        """Indices of the Gated DeltaNet layers."""
        return tuple(i for i, t in enumerate(self.layer_types) if t == "linear_attention")

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers."""
        return tuple(i for i, t in enumerate(self.layer_types) if t == "full_attention")

    @property
    def pages_per_request(self) -> int:
        """KV pages that a request of `max_length` tokens needs."""
        return -(-self.max_length // self.page_size)

    @property
    def kv_pages(self) -> int:
        """KV pages in the cache."""
        if self.kv_tokens is None:
            return self.max_requests * self.pages_per_request
        return self.kv_tokens // self.page_size

    @property
    def verify_rows(self) -> int:
        """Most rows of a request in one step (T): the token emitted last and the drafts behind it."""
        return 1 + self.speculate

    @property
    def step_slots(self) -> int:
        """Recurrent slots of a request that one step writes: one, or with `slots` one for each of its rows."""
        return self.verify_rows if self.speculative_state == "slots" else 1

    @property
    def slots(self) -> int:
        """Recurrent slots a layer: one reserved, then those that a step writes once or (`twin`) twice a request."""
        return 1 + self.max_requests * self.slots_per_request

    @property
    def slots_per_request(self) -> int:
        """Recurrent slots of a request in one layer."""
        return self.step_slots * (2 if self.state_layout == "twin" else 1)

    @property
    def ring_columns(self) -> int:
        """Columns of a convolution ring (W): what a step reads before its rows, and its rows."""
        return self.linear_conv_kernel_dim - 1 + self.verify_rows

    @property
    def records(self) -> bool:
        """Whether requests have a record beside their slots."""
        return self.speculate > 0 and self.speculative_state == "record"

    def replace(self, **changes: Any) -> Config:
        """A copy with some keys changed, checked as a whole. Unknown keys raise `ConfigError`."""
        check_keys(changes, "override")
        positions = changes.get("max_position_embeddings")
        if isinstance(positions, int) and "max_length" not in changes:
            changes["max_length"] = min(self.max_length, positions)
        return dataclasses.replace(self, **{k: freeze(k, v) for k, v in changes.items()})

    def for_platform(self, platform: str) -> Config:
        """The config with `platform_overrides[platform]` applied (`rocm`, `cuda` or `cpu`)."""
        overrides = dict(dict(self.platform_overrides).get(platform, ()))
        return self.replace(**overrides) if overrides else self


SERVING_KEYS = frozenset(
    """max_requests max_length kv_tokens page_size prefill_tokens state_layout draft_kv draft_head speculate
    speculative_state state_dtype kernels attention_pin attention_segment memory_fraction prefix_cache_bytes
    prefix_interval""".split()
)


def check_keys(keys: Mapping[str, Any], where: str) -> None:
    """Refuses keys that are unknown, or known and not supported.

    Raises:
        ConfigError: names the key, its value and the keys that are taken.
    """
    known = {f.name for f in dataclasses.fields(Config)}
    for key, value in keys.items():
        if key in UNSUPPORTED:
            raise ConfigError(f"{where}: {key} = {value!r}: {UNSUPPORTED[key]} is not supported; remove the key")
        if key not in known:
            raise ConfigError(f"{where}: unknown key {key!r} (value {value!r}); known keys: {', '.join(sorted(known))}")


def freeze(key: str, value: Any) -> Any:
    """Turns what JSON and YAML give (lists, dicts) into what the dataclass holds."""
    if key == "platform_overrides" and isinstance(value, Mapping):
        for platform, overrides in value.items():
            require(platform in PLATFORMS, "platform_overrides", platform, f"one of {', '.join(PLATFORMS)}")
            if not isinstance(overrides, Mapping):
                raise ConfigError(f"platform_overrides.{platform} = {overrides!r}; it takes a mapping of serving keys")
            for name, v in overrides.items():
                require(
                    name in SERVING_KEYS,
                    f"platform_overrides.{platform}",
                    {name: v},
                    f"serving keys: {', '.join(sorted(SERVING_KEYS))}",
                )
        return tuple(sorted((p, tuple(sorted(o.items()))) for p, o in value.items()))
    if key == "generation" and isinstance(value, Mapping):
        unknown = set(value) - {f.name for f in dataclasses.fields(GenerationDefaults)}
        require(
            not unknown,
            "generation",
            sorted(map(str, unknown)),
            ", ".join(f.name for f in dataclasses.fields(GenerationDefaults)),
        )
        return GenerationDefaults(**{k: freeze(k, v) for k, v in value.items()})
    if isinstance(value, list):
        return tuple(value)
    return value


def _check_model(c: Config) -> None:
    for key in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
        "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim max_position_embeddings"
    ).split():
        require(0 < getattr(c, key) < 2**31, key, getattr(c, key), "an integer from 1 to 2^31 - 1")
    require(
        2 <= c.linear_conv_kernel_dim <= 8, "linear_conv_kernel_dim", c.linear_conv_kernel_dim, "an integer from 2 to 8"
    )
    require(
        c.num_attention_heads % c.num_key_value_heads == 0,
        "num_attention_heads",
        c.num_attention_heads,
        f"a multiple of num_key_value_heads = {c.num_key_value_heads}",
    )
    require(
        c.linear_num_value_heads % c.linear_num_key_heads == 0,
        "linear_num_value_heads",
        c.linear_num_value_heads,
        f"a multiple of linear_num_key_heads = {c.linear_num_key_heads}",
    )
    require(
        len(c.layer_types) == c.num_hidden_layers,
        "layer_types",
        f"{len(c.layer_types)} entries",
        f"one entry a layer, num_hidden_layers = {c.num_hidden_layers}",
    )
    require(0.0 < c.rms_norm_eps < 1.0, "rms_norm_eps", c.rms_norm_eps, "a number in (0, 1)")
    require(c.rope_theta > 1.0, "rope_theta", c.rope_theta, "a number > 1")
    require(
        0.0 < c.partial_rotary_factor <= 1.0, "partial_rotary_factor", c.partial_rotary_factor, "a number in (0, 1]"
    )
    require(
        c.rotary_dim >= 2 and c.rotary_dim % 2 == 0,
        "partial_rotary_factor",
        c.partial_rotary_factor,
        f"a factor that makes an even number of head_dim = {c.head_dim} (here {c.rotary_dim})",
    )
    if c.mrope_section is not None:
        require(
            min(c.mrope_section) >= 0 and sum(c.mrope_section) == c.rotary_dim // 2,
            "mrope_section",
            c.mrope_section,
            f"three counts that add up to half the rotary dimensions, {c.rotary_dim // 2}",
        )
    require(c.mtp_num_hidden_layers in (0, 1), "mtp_num_hidden_layers", c.mtp_num_hidden_layers, "0 or 1")
    require(c.initializer_range > 0, "initializer_range", c.initializer_range, "a number > 0")
    require(
        all(i < c.vocab_size for i in c.generation.stop_ids),
        "generation.stop_ids",
        c.generation.stop_ids,
        f"ids under vocab_size = {c.vocab_size}",
    )


def _check_serving(c: Config) -> None:
    require(1 <= c.max_requests <= 65536, "max_requests", c.max_requests, "an integer from 1 to 65,536")
    require(
        1 <= c.max_length <= c.max_position_embeddings,
        "max_length",
        c.max_length,
        f"an integer from 1 to max_position_embeddings = {c.max_position_embeddings}",
    )
    require(1 <= c.page_size <= 65536, "page_size", c.page_size, "an integer from 1 to 65,536")
    require(
        not c.draft_kv or c.mtp_num_hidden_layers == 1,
        "draft_kv",
        c.draft_kv,
        f"False for a model without a draft head (mtp_num_hidden_layers = {c.mtp_num_hidden_layers}); drafting takes a "
        "checkpoint with mtp.* tensors",
    )
    require(
        c.draft_head == "weights" or c.mtp_num_hidden_layers == 1,
        "draft_head",
        c.draft_head,
        f"'weights' for a model without a draft head (mtp_num_hidden_layers = {c.mtp_num_hidden_layers}); an fp8 head "
        "takes a checkpoint with mtp.* tensors",
    )
    require(
        0 <= c.speculate <= MOST_DRAFTS,
        "speculate",
        c.speculate,
        f"an integer from 0 (plain decoding) to {MOST_DRAFTS}, the most drafts of a step",
    )
    require(
        c.speculate > 0 or c.speculative_state == "record",
        "speculative_state",
        c.speculative_state,
        f"'record' with speculate = 0, which needs no slots for drafts; set speculate to 1 to {MOST_DRAFTS}",
    )
    require(c.prefill_tokens >= 1, "prefill_tokens", c.prefill_tokens, "an integer >= 1")
    require(c.attention_segment >= 1, "attention_segment", c.attention_segment, "an integer >= 1")
    require(
        c.attention_pin >= 1 and c.attention_pin % c.attention_segment == 0,
        "attention_pin",
        c.attention_pin,
        f"a positive multiple of attention_segment = {c.attention_segment}",
    )
    require(0.0 < c.memory_fraction <= 1.0, "memory_fraction", c.memory_fraction, "a number in (0, 1]")
    require(c.prefix_cache_bytes >= 0, "prefix_cache_bytes", c.prefix_cache_bytes, "an integer >= 0 (0 is off)")
    require(c.prefix_interval >= 1, "prefix_interval", c.prefix_interval, "an integer >= 1")
    if c.kv_tokens is not None:
        require(
            c.kv_tokens >= c.page_size and c.kv_tokens % c.page_size == 0,
            "kv_tokens",
            c.kv_tokens,
            f"a positive multiple of page_size = {c.page_size}",
        )
    # Index arithmetic inside the kernels is 32 bit, so one array must stay under 2^31 elements.
    for name, size in (
        ("max_requests", c.slots * c.slot_elements),
        ("max_requests", (1 + c.max_requests) * c.request_elements),
        ("kv_tokens", (1 + c.kv_pages) * c.page_size * c.num_key_value_heads * c.head_dim),
    ):
        require(
            size < 2**31,
            name,
            getattr(c, name),
            f"a value that keeps one layer's array under 2^31 elements (here {size:,})",
        )
