"""From what a caller asks for to a handle: every refusal that needs no state happens here."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from gdnjax.config import Config
from gdnjax.engine.constraint import Constraint
from gdnjax.engine.handle import Handle, Piece
from gdnjax.engine.programs import mode_of
from gdnjax.generation.collect import Collector
from gdnjax.generation.drafting import Source
from gdnjax.generation.generate import Request, check_requests, check_speculation, speculating_config
from gdnjax.generation.sampling import SamplingParams

if TYPE_CHECKING:
    from gdnjax.lm import LanguageModel


def make_handle(
    lm: LanguageModel,
    config: Config,
    prompt: str | Sequence[int],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    stop_ids: Sequence[int] | None = None,
    stop: str | Sequence[str] = (),
    constraint: Constraint | None = None,
) -> Handle:
    """The handle of a request that nobody runs yet. Arguments and errors as in `Engine.submit`."""
    tokenizer = lm.tokenizer
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("prompt is text, and this model has no tokenizer; give a list of token ids")
        prompt = tokenizer.encode(prompt)
    ids = config.generation.stop_ids if stop_ids is None else tuple(stop_ids)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and tokenizer is None:
        raise ValueError(f"stop = {list(stop)!r} needs a tokenizer, and this model has none; use stop_ids")
    if not all(isinstance(s, str) and s for s in stop):
        raise ValueError(f"stop = {list(stop)!r}; it takes strings of at least one character")
    sampling = SamplingParams() if sampling is None else sampling
    prompt = [int(i) for i in prompt]
    (most,) = check_requests(config, [Request(prompt, max_new_tokens, sampling)], ids)
    collector = Collector(0, len(prompt), tokenizer, ids, stop, None)
    handle = Handle(tuple(prompt), most, sampling, mode_of(sampling), collector, text=None if tokenizer is None else "")
    if constraint is not None:
        if constraint.vocab_size != config.vocab_size:
            raise ValueError(
                f"the constraint is for vocab_size = {constraint.vocab_size}, and this model has {config.vocab_size}; "
                "compile it with this model"
            )
        handle.mode, handle.matcher = "constrained", constraint.start(ids)
    collector.listen(functools.partial(_hear, handle))
    return handle


def limit_of(given: int | Literal["auto"] | None, own: int | None) -> int | None:
    """What `derive_limits` is asked for where a caller gives `given` and the config has `own`: None derives it."""
    if given == "auto":
        return None
    return own if given is None else given


def speculation_of(config: Config, speculate: int | None, drafts: Source | None) -> tuple[Config, Source | None]:
    """An engine's config with what speculation takes, and where its drafts come from: None without speculation.

    Arguments and errors as in `Engine`.
    """
    source: Source = drafts or ("mtp" if config.mtp_num_hidden_layers else "ngram")
    (most,) = check_speculation(config, [Request([], 1, SamplingParams(), speculate)], source)
    if config.draft_head != "weights" and not (most and source == "mtp"):
        raise ValueError(
            f"draft_head = {config.draft_head!r} with speculate = {most} and drafts = {source!r}: nobody drafts "
            "with it; take speculate = 1 to 7 with drafts = 'mtp', or draft_head = 'weights'"
        )
    if most:
        return speculating_config(config, most, source), source
    if drafts is not None:
        raise ValueError(f"drafts = {drafts!r} with speculate = 0; give their number, speculate = 1 to 7")
    return speculating_config(config, 0, source) if config.speculate else config, None


def drafts_of(config: Config, speculate: int | None, constraint: Constraint | None) -> int:
    """Most drafts that a step of a request verifies. Of a constrained one none: no more is known than what may follow
    its last token.

    Raises:
        ValueError: more than the engine's own.
    """
    most = config.speculate
    if speculate is not None and not 0 <= speculate <= most:
        raise ValueError(f"speculate = {speculate}; this engine takes 0 (plain decoding) to {most}, its own")
    return 0 if constraint is not None else most if speculate is None else speculate


def _hear(handle: Handle, _: int, tokens: list[int], text: str) -> None:
    if handle.text is not None:
        handle.text += text
    first = len(handle.logprobs) - len(tokens)
    piece = Piece(tuple(tokens), tuple(handle.logprobs[first:]), text)
    handle.pieces.append(piece)
    if handle.on_piece is not None:
        handle.on_piece(piece)
