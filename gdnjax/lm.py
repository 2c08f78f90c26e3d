"""A loaded model: config, params, tokenizer, and the calls most people need."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from gdnjax.config import Config
from gdnjax.generation.collect import GenerationResult, StreamCallback
from gdnjax.generation.drafting import Source
from gdnjax.generation.generate import Request, generate
from gdnjax.generation.loop import Loop, default_loop
from gdnjax.generation.sampling import SamplingParams
from gdnjax.model.forward import forward
from gdnjax.platform import current_platform
from gdnjax.state.batch import check_ids
from gdnjax.weights.declaration import Params
from gdnjax.weights.draft_head import DRAFT_HEAD

if TYPE_CHECKING:
    from gdnjax.tokenizer import Tokenizer

_jitted_forward = jax.jit(forward, static_argnames="config")

LENGTH_STEP = 64
"""`LanguageModel.logits` pads sequences to multiples of this: one compilation serves 64 lengths."""


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """What `gdnjax.load` returns. Nothing in it changes: state lives in the pytrees of `gdnjax.state`."""

    config: Config
    params: Params
    tokenizer: Tokenizer | None = None

    def logits(self, tokens: Any) -> jax.Array:
        """Logits of whole sequences.

        Args:
            tokens: `[B, T]` integers, T from 1 to `max_position_embeddings`.

        Returns:
            `[B, T, V]` float32.
        """
        try:
            array = np.asarray(tokens)
        except ValueError:
            raise ValueError("tokens has rows of unequal lengths; logits takes [B, T]") from None
        if array.ndim != 2 or array.size == 0:
            raise ValueError(f"tokens has shape {array.shape}; logits takes [B, T] with B and T at least 1")
        check_ids(array, self.config.vocab_size)
        length, limit = array.shape[1], self.config.max_position_embeddings
        if length > limit:
            raise ValueError(f"tokens has {length} positions; it takes at most max_position_embeddings = {limit}")
        # Padding on the right cannot reach the logits of the real tokens.
        padding = min(-length % LENGTH_STEP, limit - length)
        padded = jnp.asarray(np.pad(array.astype(np.int32), ((0, 0), (0, padding))))
        return _jitted_forward(self.params, config=self.config, tokens=padded)[:, :length]

    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        max_new_tokens: int = 128,
        *,
        temperature: float | Sequence[float] | None = None,
        top_k: int | Sequence[int] | None = None,
        top_p: float | Sequence[float] | None = None,
        min_p: float | Sequence[float] | None = None,
        repetition_penalty: float | Sequence[float] | None = None,
        presence_penalty: float | Sequence[float] = 0.0,
        frequency_penalty: float | Sequence[float] = 0.0,
        seed: int | Sequence[int] = 0,
        stop_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] = (),
        stream: StreamCallback | None = None,
        logprobs: bool = False,
        loop: Loop | None = None,
        speculate: int | Sequence[int] | None = None,
        drafts: Source = "mtp",
        adaptive: bool = False,
    ) -> list[GenerationResult]:
        """Continues every prompt, all in one batch.

        Sampling arguments take one value for all prompts or one a prompt; None takes the checkpoint's
        default (`config.generation`), and temperature 0 is greedy.

        Args:
            prompts: texts, or lists of token ids. Text that looks like a control token is text.
            max_new_tokens: most new tokens a prompt; a request also ends at `max_length`.
            temperature, top_k, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty:
                see `SamplingParams`.
            seed: an integer s gives prompt i the seed (s + i) modulo 2^32; a sequence gives each its own. A request's
                draws depend on its seed alone, not on what else is in the batch.
            stop_ids: ids that end a request; None takes the checkpoint's, () never stops early.
            stop: strings that end a request; its text is cut before them.
            stream: called with (index, new ids, new text) for every step as it is done.
            logprobs: whether results carry log-probabilities.
            loop: `device` or `python`; None lets the platform choose. Streaming and stop strings use
                `python`.
            speculate: most drafts that a step verifies, 0 to 7, for all prompts or one a prompt; 0 is plain decoding,
                None takes `config.speculate`. The tokens are the same.
            drafts: `mtp`, from the model's draft head, or `ngram`, from what followed in the text so far.
            adaptive: whether a request drafts less where little of it is accepted.

        Raises:
            ValueError: bad prompts or arguments; the message says which and what it takes.
        """
        ids = [self._encode(prompt, index) for index, prompt in enumerate(check_prompts(prompts))]
        defaults = self.config.generation
        drawn = defaults.temperature if defaults.do_sample else 0.0
        columns = {
            "temperature": _column("temperature", drawn if temperature is None else temperature, len(ids), float),
            "top_k": _column("top_k", defaults.top_k if top_k is None else top_k, len(ids), int),
            "top_p": _column("top_p", defaults.top_p if top_p is None else top_p, len(ids), float),
            "min_p": _column("min_p", defaults.min_p if min_p is None else min_p, len(ids), float),
            "repetition_penalty": _column(
                "repetition_penalty",
                defaults.repetition_penalty if repetition_penalty is None else repetition_penalty,
                len(ids),
                float,
            ),
            "presence_penalty": _column("presence_penalty", presence_penalty, len(ids), float),
            "frequency_penalty": _column("frequency_penalty", frequency_penalty, len(ids), float),
            "seed": [(int(seed) + i) % 2**32 for i in range(len(ids))]
            if isinstance(seed, int | np.integer) and not isinstance(seed, bool)
            else _column("seed", seed, len(ids), int),
        }
        counts = _column("speculate", self.config.speculate if speculate is None else speculate, len(ids), int)
        requests = [
            Request(
                prompt,
                max_new_tokens,
                SamplingParams(**{name: column[i] for name, column in columns.items()}),
                counts[i],
            )
            for i, prompt in enumerate(ids)
        ]
        return generate(
            self.params,
            self.config,
            requests,
            tokenizer=self.tokenizer,
            stop_ids=_tuple("stop_ids", defaults.stop_ids if stop_ids is None else stop_ids, "a list of token ids"),
            stop=(stop,) if isinstance(stop, str) else _tuple("stop", stop, "a string or a list of strings"),
            callback=stream,
            logprobs=logprobs,
            loop=loop if loop is not None else default_loop(current_platform()),
            drafts=drafts,
            adaptive=adaptive,
        )

    def _encode(self, prompt: str | Sequence[int], index: int) -> list[int]:
        if not isinstance(prompt, str):
            return list(map(int, prompt))
        if self.tokenizer is None:
            raise ValueError(f"prompt {index} is text, and this model has no tokenizer; give lists of token ids")
        return self.tokenizer.encode(prompt)

    @functools.cached_property
    def parameter_count(self) -> int:
        """Parameters in all arrays; a copy of some for drafts counts none."""
        return sum(
            leaf.size for name in self.params if name != DRAFT_HEAD for leaf in jax.tree.leaves(self.params[name])
        )


def check_prompts(prompts: Any) -> list[Any]:
    """Refuses what is no list of texts or of id lists."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(f"prompts is a {type(prompts).__name__}; it takes a list of texts or of lists of token ids")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            continue
        if not isinstance(prompt, Sequence | np.ndarray | jax.Array) or isinstance(prompt, bytes):
            raise ValueError(f"prompt {index} is a {type(prompt).__name__}; it takes a text or a list of token ids")
        try:
            array = np.asarray(prompt)
        except ValueError:
            raise ValueError(f"prompt {index} holds lists; it takes a flat list of ids") from None
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"prompt {index} has shape {array.shape} and dtype {array.dtype}; it takes a flat list of ids"
            )
    return list(prompts)


def _tuple(name: str, value: Any, takes: str) -> tuple[Any, ...]:
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name} = {value!r}; it takes {takes}") from None


def _column(name: str, value: Any, count: int, kind: type) -> list[Any]:
    if isinstance(value, np.ndarray | jax.Array):
        value = np.asarray(value).tolist()
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value] * count
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} values for {count} prompts; it takes one, or one a prompt")
    for v in values:
        if isinstance(v, bool) or not isinstance(v, int | float | np.integer | np.floating):
            raise ValueError(f"{name} = {v!r}; it takes a number")
        if kind is int and not float(v).is_integer():
            raise ValueError(f"{name} = {v!r}; it takes an integer")
    return [kind(v) for v in values]
