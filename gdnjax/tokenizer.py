"""Text to token ids and back, for the byte-level BPE tokenizers of the Qwen3.5 family.

The BPE itself runs in the `tokenizers` library. Everything around it is here, because the library always turns text
that looks like an added token (`<think>`, `<tool_call>`) into that token, and text from a user must not be able to do
that. So the library never sees the added tokens: this module finds them, and only where it is asked to.
"""

from __future__ import annotations

import codecs
import json
import operator
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

MAX_TOKENIZER_BYTES = 256 * 2**20
MAX_CONFIG_BYTES = 16 * 2**20
MAX_TEMPLATE_BYTES = 2**20
MAX_ID = 2**31 - 1

_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class ControlToken(NamedTuple):
    """A token that stands outside the BPE vocabulary. `special` ones are left out of decoded text."""

    id: int
    content: str
    special: bool


class Tokenizer:
    """A byte-level BPE tokenizer. Made by `load_tokenizer`.

    Attributes:
        vocab_size: the highest id that has a token, plus one. A model's embedding may have more rows than that.
        control_ids: the ids of all added tokens.
        control_tokens: text of each added token to its `ControlToken`.
        special_tokens: the tokens a chat template may name: `{"eos_token": "<|im_end|>", ...}`.
        eos_id: the id of `eos_token`, or None.
        chat_template: Jinja source from the checkpoint, or None when it carries none.
    """

    def __init__(
        self,
        bpe: tokenizers.Tokenizer,
        control_tokens: Iterable[ControlToken],
        *,
        special_tokens: dict[str, str] | None = None,
        chat_template: str | None = None,
        model_vocab_size: int | None = None,
    ):
        self._bpe = bpe
        self.control_tokens = {token.content: token for token in control_tokens}
        self._control_by_id = {token.id: token for token in self.control_tokens.values()}
        self._ids = bpe.get_vocab(with_added_tokens=False)
        self._tokens = {i: token for token, i in self._ids.items()}
        self._bytes: dict[int, bytes] = {}
        self._limit = MAX_ID + 1 if model_vocab_size is None else model_vocab_size
        self.vocab_size = max([*self._tokens, *self._control_by_id], default=-1) + 1
        self.control_ids = frozenset(self._control_by_id)
        self.special_tokens = dict(special_tokens or {})
        self.eos_id = self.token_to_id(self.special_tokens.get("eos_token", ""))
        self.chat_template = chat_template
        if self.vocab_size > self._limit:
            raise ValueError(
                f"the tokenizer has ids up to {self.vocab_size - 1}, but the model's vocab_size is {self._limit}: "
                "tokenizer.json and config.json belong to different models"
            )
        # The longest token wins where two start at the same place, as in the library.
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        self._control_pattern = "|".join(map(re.escape, longest_first)) or r"(?!)"
        self._control_re = re.compile(f"({self._control_pattern})")

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as `tokenizer.json` spells it (a space is `Ġ`), or None."""
        control = self.control_tokens.get(token)
        return self._ids.get(token) if control is None else control.id

    def id_to_token(self, id: int) -> str | None:
        """The token as `tokenizer.json` spells it, or None for an id without one."""
        id = self._check_id(id)
        control = self._control_by_id.get(id)
        return self._tokens.get(id) if control is None else control.content

    def encode(self, text: str, *, allow_control: bool = False) -> list[int]:
        """Token ids of `text`: no BOS, no prefix space.

        Args:
            text: any string that UTF-8 can carry.
            allow_control: if true, `<|im_end|>` and its like in `text` become the control tokens. If false, they are
                text as any other, so that what a user types cannot end a turn.

        Raises:
            TypeError: `text` is not a string.
            ValueError: `text` holds a lone surrogate.
        """
        if not isinstance(text, str):
            raise TypeError(f"text must be a str, got {type(text).__name__}; decode bytes first, join lists yourself")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            raise ValueError(
                f"text has a lone surrogate U+{code:04X} at character {error.start}, which UTF-8 cannot carry; "
                "remove it, or join it with its other half"
            ) from None
        if not allow_control:
            return self._encode_run(text)
        ids: list[int] = []
        for index, piece in enumerate(self._control_re.split(text)):
            if index % 2:
                ids.append(self.control_tokens[piece].id)
            else:
                ids += self._encode_run(piece)
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Token ids of `text` in which `mark` (one character) stands inside every `<` that must stay text.

        A control token that no mark interrupts or follows is a control token; the marks are removed from the text
        between control tokens before it is encoded. `gdnjax.chat` uses this to tell what a template wrote from what
        a message said.
        """
        ids: list[int] = []
        for index, piece in enumerate(re.split(f"((?:{self._control_pattern})(?!{re.escape(mark)}))", text)):
            if index % 2:
                ids.append(self.control_tokens[piece].id)
            else:
                ids += self.encode(piece.replace(mark, ""))
        return ids

    def decode(self, ids: Iterable[int], *, skip_control: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD.

        Args:
            ids: a one-dimensional sequence or array of token ids. An id without a token (the padded end of a model's
                vocabulary) is the empty string.
            skip_control: leave out the tokens flagged special (`<|im_end|>`); `<think>` is not one, and stays.

        Raises:
            TypeError: an id is not an integer.
            ValueError: an id is negative or at or above the model's vocab_size.
        """
        return b"".join(self._bytes_of(i, skip_control) for i in _as_list(ids)).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes that one id stands for, control tokens included; errors as in `decode`."""
        return self._bytes_of(id, skip_control=False)

    def stream(self, *, skip_control: bool = True) -> TextStream:
        """A decoder for ids that come a few at a time; arguments as in `decode`."""
        return TextStream(self, skip_control=skip_control)

    def _encode_run(self, text: str) -> list[int]:
        return self._bpe.encode(text, add_special_tokens=False).ids if text else []

    def _check_id(self, id: int) -> int:
        try:
            value = operator.index(id)
        except TypeError:
            raise TypeError(f"token ids are integers in one dimension, got {type(id).__name__} {id!r}") from None
        if not 0 <= value < self._limit:
            raise ValueError(f"token id {value} is out of range: ids run from 0 to {self._limit - 1}")
        return value

    def _bytes_of(self, id: int, skip_control: bool) -> bytes:
        id = self._check_id(id)
        control = self._control_by_id.get(id)
        if control is not None:
            return b"" if control.special and skip_control else control.content.encode("utf-8")
        found = self._bytes.get(id)
        if found is None:
            token = self._tokens.get(id, "")
            try:
                found = bytes(_BYTE_OF[char] for char in token)
            except KeyError:  # a token outside the byte alphabet stands for itself, as in the library
                found = token.encode("utf-8")
            self._bytes[id] = found
        return found


class TextStream:
    """Text of a growing list of ids, such that the pieces joined equal `decode` of all of them.

    A character whose bytes are split over several tokens comes out whole with its last one.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_control: bool = True):
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._finished = False

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete, "" if none. Raises as `Tokenizer.decode`, RuntimeError after `finish`."""
        if self._finished:
            raise RuntimeError("push after finish: start another stream with Tokenizer.stream()")
        # All ids are checked before the decoder's state moves, so that a bad id leaves the stream usable.
        data = b"".join([self._tokenizer._bytes_of(i, self._skip_control) for i in _as_list(ids)])
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back: U+FFFD if the ids ended inside a character, else "". Ends the stream."""
        self._finished = True
        return self._decoder.decode(b"", final=True)


def load_tokenizer(directory: str | Path, *, model_vocab_size: int | None = None) -> Tokenizer | None:
    """Reads `tokenizer.json` and its companions from a checkpoint directory.

    Args:
        directory: holds `tokenizer.json`, and optionally `tokenizer_config.json`, `special_tokens_map.json` and
            `chat_template.jinja` (which wins over the `chat_template` key of `tokenizer_config.json`).
        model_vocab_size: the model's vocab_size, if known. Ids at or above it are then refused by `decode`.

    Returns:
        The tokenizer, or None when the directory has no `tokenizer.json`.

    Raises:
        ValueError: a file is too large, corrupt, or describes another kind of tokenizer than byte-level BPE.
    """
    directory = Path(directory)
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    spec = _read_json(path, MAX_TOKENIZER_BYTES)
    config = _read_json(directory / "tokenizer_config.json", MAX_CONFIG_BYTES)
    names = _read_json(directory / "special_tokens_map.json", MAX_CONFIG_BYTES) | config

    for key, expected in (("model", "BPE"), ("decoder", "ByteLevel")):
        part = spec.get(key)
        kind = part.get("type", "BPE") if isinstance(part, dict) else None  # old files omit the model's type
        if kind != expected:
            raise ValueError(f"{path}: {key}.type is {kind!r}; gdnjax reads byte-level BPE, where it is {expected!r}")
    control = _control_tokens(path, spec.get("added_tokens"), config.get("added_tokens_decoder"))

    # Without its added tokens the library can only make text tokens. Padding and truncation would change the ids,
    # and a post-processor may name tokens that are now gone.
    spec = {**spec, "added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    vocab = spec["model"].get("vocab")
    if isinstance(vocab, dict):
        hidden = {token.content for token in control}
        spec["model"] = {**spec["model"], "vocab": {k: v for k, v in vocab.items() if k not in hidden}}
    try:
        bpe = tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} is not a tokenizer the tokenizers library reads: {error}") from error
    return Tokenizer(
        bpe,
        control,
        special_tokens={role: text for role in _ROLES if (text := _token_text(names.get(role))) is not None},
        chat_template=_chat_template(directory, config),
        model_vocab_size=model_vocab_size,
    )


def _control_tokens(path: Path, added: Any, added_in_config: Any) -> list[ControlToken]:
    """The added tokens of both files: `tokenizer.json` lists them, `tokenizer_config.json` may know more."""
    entries = list(added) if isinstance(added, list) else []
    if isinstance(added_in_config, dict):
        known = {entry.get("id") for entry in entries if isinstance(entry, dict)}
        for id, entry in added_in_config.items():
            if id.isdecimal() and int(id) not in known and isinstance(entry, dict):
                entries.append({**entry, "id": int(id)})
    tokens: dict[int, ControlToken] = {}
    for entry in entries:
        entry = entry if isinstance(entry, dict) else {}
        id, content = entry.get("id"), entry.get("content")
        if not isinstance(id, int) or not 0 <= id <= MAX_ID or not isinstance(content, str) or not content:
            raise ValueError(f"{path}: added token {entry!r} needs an id from 0 to {MAX_ID} and a non-empty content")
        if flags := [flag for flag in ("lstrip", "rstrip", "single_word") if entry.get(flag)]:
            raise ValueError(f"{path}: added token {content!r} sets {flags[0]}, which gdnjax does not implement")
        if id in tokens or any(content == token.content for token in tokens.values()):
            raise ValueError(f"{path}: added token {content!r} with id {id} is there twice")
        tokens[id] = ControlToken(id, content, bool(entry.get("special")))
    return list(tokens.values())


def _chat_template(directory: Path, config: dict[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return _read_text(path, MAX_TEMPLATE_BYTES)
    template = config.get("chat_template")
    if isinstance(template, list):  # several named templates
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"chat_template in tokenizer_config.json is a {type(template).__name__}, not a string")
    return template


def _token_text(value: Any) -> str | None:
    """A token's text from its two spellings: "<|im_end|>" and {"content": "<|im_end|>", ...}."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def _read_text(path: Path, limit: int) -> str:
    size = path.stat().st_size
    if size > limit:
        raise ValueError(f"{path} has {size} bytes; at most {limit} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None


def _read_json(path: Path, limit: int) -> dict[str, Any]:
    """The object in a JSON file; an absent file is {}."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path, limit))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _as_list(ids: Any) -> Iterable[int]:
    # One transfer for an array on a device, in place of one for each element.
    return ids.tolist() if hasattr(ids, "tolist") and getattr(ids, "ndim", 1) else ids


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 stands for itself, the other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
