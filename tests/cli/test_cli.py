"""The command line: exit codes, one JSON object on stdout, messages on stderr."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

from gdnjax.cli import UsageError, main
from gdnjax.cli.doctor import PLUGINS, installed
from gdnjax.cli.generate import MAX_IDS_BYTES, Printer
from gdnjax.cli.info import format_bytes, parse_size
from gdnjax.cli.source import require_platform
from gdnjax.config import Config, from_preset
from gdnjax.lm import LanguageModel
from gdnjax.sizes import sizes
from gdnjax.state import init_state
from tests.generation.small import PROMPTS, SMALL, VOCAB, byte_tokenizer, run, small_model

GENERATE_KEYS = {"tokens", "text", "finish_reason", "prompt_tokens", "seconds", "tokens_per_second"}
GENERATE_KEYS |= {"steps", "drafted", "accepted", "tokens_per_step"}
INFO_KEYS = set(
    """parameters weight_bytes draft_head_bytes bytes_per_request bytes_per_kv_token max_requests kv_tokens""".split()
)

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def small_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--config small` is the small model's shape."""
    folder = tmp_path / "configs"
    folder.mkdir()
    keys = ("layer_types", "tie_word_embeddings", "initializer_range", "dtype")
    keys += ("max_requests", "max_length", "page_size", "prefill_tokens")
    sized = {k: v for k, v in vars(SMALL).items() if isinstance(v, int) and k in Config.__dataclass_fields__}
    values = {**sized, **{k: getattr(SMALL, k) for k in keys}, "layer_types": list(SMALL.layer_types)}
    (folder / "small.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    monkeypatch.setattr("gdnjax.config.presets.configs_dir", lambda: folder)
    assert from_preset("small") == SMALL


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
    """What `--model` loads: the small model, which has a tokenizer."""
    lm = small_model()
    monkeypatch.setattr("gdnjax.loading.load", lambda source, dtype=None, **overrides: lm)
    return lm


@pytest.fixture
def ids_file(tmp_path: Path) -> str:
    path = tmp_path / "ids.json"
    path.write_text(json.dumps(PROMPTS[0]))
    return str(path)


def one_object(text: str) -> dict[str, Any]:
    """The object that is all of stdout."""
    assert text.endswith("\n") and text.count("\n") == 1
    value = json.loads(text)
    assert isinstance(value, dict)
    return value


def fails(capsys: Capture, code: int, *arguments: str) -> str:
    """Runs a command that fails; returns its message. Nothing may be on stdout."""
    try:
        result = main(list(arguments))
    except SystemExit as exit:
        result = exit.code
    captured = capsys.readouterr()
    assert result == code, captured.err
    assert captured.out == ""
    assert "Traceback" not in captured.err
    return captured.err


# generate


def test_generate_json_from_ids(capsys: Capture, ids_file: str) -> None:
    code = main(["generate", "--config", "small", "--ids", ids_file, "--max-new-tokens", "5", "--seed", "1", "--json"])
    captured = capsys.readouterr()
    assert code == 0
    result = one_object(captured.out)
    assert result.keys() == GENERATE_KEYS
    # the seed is the weights' too, and random weights without a checkpoint's defaults are greedy
    assert result["tokens"] == run(small_model(), PROMPTS[:1], 5)[0].tokens
    assert result["text"] is None
    assert (result["finish_reason"], result["prompt_tokens"]) == ("length", 7)
    assert result["seconds"] > 0 and result["tokens_per_second"] > 0
    assert [result[key] for key in ("steps", "drafted", "accepted", "tokens_per_step")] == [4, 0, 0, 1.0]


def test_generate_speculates(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text("[1]")
    arguments = ["generate", "--config", "small", "--ids", str(path), "--ignore-stop-ids", "--seed", "1"]
    arguments += "--max-new-tokens 40 --speculate 2 --drafts ngram".split()
    assert main([*arguments, "--json"]) == 0
    result = one_object(capsys.readouterr().out)
    assert result.keys() == GENERATE_KEYS
    assert result["tokens"] == run(small_model(), [[1]], 40)[0].tokens
    assert result["drafted"] > 0 and 1 + result["steps"] + result["accepted"] == 40
    assert result["tokens_per_step"] == round(39 / result["steps"], 3)
    assert main(arguments) == 0
    assert capsys.readouterr().err.endswith(f", {result['accepted']} of {result['drafted']} drafts accepted\n")


def test_drafts_that_cannot_be(capsys: Capture, ids_file: str) -> None:
    source = ("generate", "--config", "small", "--ids", ids_file)
    for count in ("8", "-1"):
        message = fails(capsys, 2, *source, "--speculate", count)
        assert f"speculate = {count}; it takes an integer from 0 (plain decoding) to 7" in message
    for more in ([], ["--speculate", "0"]):
        message = fails(capsys, 2, *source, "--drafts", "ngram", *more)
        assert "--drafts ngram says where drafts come from; give their number with --speculate K" in message
    assert "invalid choice: 'guess'" in fails(capsys, 2, *source, "--speculate", "1", "--drafts", "guess")
    message = fails(capsys, 1, *source, "--speculate", "2")
    assert "this model has no draft head (mtp_num_hidden_layers = 0)" in message and "--drafts ngram" in message
    for more, missing in (
        ([], "give their number with --speculate K"),
        (["--drafts", "ngram"], "leave --drafts ngram"),
    ):
        message = fails(capsys, 2, *source, "--draft-head", "fp8", *["--speculate", "2"] * bool(more), *more)
        assert "--draft-head fp8 says what drafts of the draft head are chosen by; " + missing in message
    message = fails(capsys, 1, *source, "--speculate", "2", "--draft-head", "fp8")
    assert "draft_head = 'fp8'; it takes 'weights' for a model without a draft head" in message


def test_generate_json_of_one_token_has_no_speed(capsys: Capture, ids_file: str) -> None:
    assert main(["generate", "--config", "small", "--ids", ids_file, "--max-new-tokens", "1", "--json"]) == 0
    result = one_object(capsys.readouterr().out)
    assert result["tokens_per_second"] is result["tokens_per_step"] is None


def test_generate_prints_ids_where_there_is_no_tokenizer(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(PROMPTS[1])))
    assert main(["generate", "--config", "small", "--ids", "-", "--max-new-tokens", "5", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == run(small_model(), PROMPTS[1:2], 5)[0].tokens
    assert captured.err.startswith("1 prompt tokens, 5 new (length), ")


def test_generate_text(capsys: Capture, model: LanguageModel) -> None:
    text = "the é <|im_end|>"
    (expected,) = model.generate([text], 8)
    assert main(["generate", "--prompt", text, "--max-new-tokens", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{expected.text}\n"
    assert f"{len(byte_tokenizer().encode(text))} prompt tokens, 8 new (length)" in captured.err
    assert main(["generate", "--prompt", text, "--max-new-tokens", "8", "--json"]) == 0
    captured = capsys.readouterr()
    result = one_object(captured.out)
    assert (result["text"], result["tokens"]) == (expected.text, expected.tokens)
    assert captured.err == ""


def test_generate_stops_at_text(capsys: Capture, model: LanguageModel) -> None:
    (whole,) = model.generate(["x"], 8)
    assert whole.text is not None
    stop = whole.text[2]
    arguments = ["generate", "--prompt", "x", "--max-new-tokens", "8", "--stop", "never this", "--stop", stop, "--json"]
    assert main(arguments) == 0
    result = one_object(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"]) == (whole.text[: whole.text.index(stop)], "stop")


def test_every_sampling_flag_arrives(capsys: Capture, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def generate(self: LanguageModel, prompts: Any, max_new_tokens: int, **arguments: Any) -> Any:
        asked.update(arguments, prompts=prompts, max_new_tokens=max_new_tokens)
        raise ValueError("enough")

    monkeypatch.setattr(LanguageModel, "generate", generate)
    flags = "--temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --repetition-penalty 1.5 --presence-penalty 0.25"
    flags += " --frequency-penalty 0.75 --seed 9 --max-new-tokens 6 --stop a --stop b --ignore-stop-ids"
    flags += " --speculate 3 --drafts ngram"
    assert "enough" in fails(capsys, 1, "generate", "--prompt", "x", *flags.split())
    stream = asked.pop("stream")
    assert isinstance(stream, Printer)
    assert asked == {
        "prompts": [[ord("x")]],
        "max_new_tokens": 6,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "stop": ["a", "b"],
        "stop_ids": (),
        "seed": 9,
        "speculate": 3,
        "drafts": "ngram",
    }
    assert "enough" in fails(capsys, 1, "generate", "--prompt", "x")
    unset = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop_ids", "speculate")
    assert [asked[name] for name in unset] == [None] * 7 and asked["drafts"] == "mtp"


def test_generate_chat(capsys: Capture, model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def encode_chat(tokenizer: Any, messages: Any, thinking: bool | None) -> list[int]:
        asked.append((messages, thinking))
        return [5]

    monkeypatch.setattr("gdnjax.chat.encode_chat", encode_chat)
    more = ["--max-new-tokens", "1", "--json"]
    assert main(["generate", "--chat", "hi", *more]) == 0
    assert main(["generate", "--chat", "hi", "--system", "be brief", "--no-thinking", *more]) == 0
    assert main(["generate", "--chat", "hi", "--thinking", *more]) == 0
    user = {"role": "user", "content": "hi"}
    system = {"role": "system", "content": "be brief"}
    assert asked == [([user], None), ([system, user], False), ([user], True)]
    assert capsys.readouterr().out.count("\n") == 3


def test_config_keys_arrive(ids_file: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    asked: list[Any] = []

    def record(*arguments: Any, **overrides: Any) -> Any:
        asked.append((arguments, overrides))
        raise ValueError("enough")

    monkeypatch.setattr("gdnjax.loading.load", record)
    monkeypatch.setattr("gdnjax.loading.random_model", record)
    shared = ["--ids", ids_file, "--dtype", "bfloat16", "--max-length", "32", "--state-layout", "twin"]
    fails(capsys, 1, "generate", *shared)
    fails(capsys, 1, "generate", "--model", "some/where", "--language-model-only", "--ids", ids_file)
    fails(capsys, 1, "generate", "--config", "0.8b", "--seed", "3", *shared)
    assert asked == [
        (("tiny", "bfloat16"), {"max_length": 32, "state_layout": "twin"}),
        (("some/where", None), {"language_model_only": True}),
        (("0.8b", 3, "bfloat16"), {"max_length": 32, "state_layout": "twin"}),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage:"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        (["generate"], "one of the arguments --prompt --chat --ids is required"),
        (["generate", "--prompt", "a", "--chat", "b"], "not allowed with argument"),
        (["generate", "--chat", "a", "--thinking", "--no-thinking"], "not allowed with argument"),
        (["generate", "--prompt", "a", "--top-k", "many"], "invalid int value: 'many'"),
        (["generate", "--prompt", "a", "--platform", "tpu"], "invalid choice: 'tpu'"),
        (["generate", "--prompt", "a", "--dtype", "float16"], "invalid choice: 'float16'"),
        (["generate", "--prompt", "a", "--system", "b"], "--system and --thinking shape a chat; give them with --chat"),
        (["generate", "--prompt", "a", "--no-thinking"], "give them with --chat"),
        (["generate", "--prompt", "a", "--model", "m", "--config", "c"], "give weights or a shape, not both"),
        (["info"], "it takes a MODEL or --config NAME"),
        (["info", "m", "--config", "small"], "it takes a MODEL or --config NAME"),
        (["info", "--config", "small", "--memory", "much"], "--memory 'much': it takes a number with a unit"),
        (["info", "--config", "small", "--memory", "-1GiB"], "expected one argument"),
        (["info", "--config", "small", "--speculate", "0"], "--speculate 0; it takes 1 to 7"),
        (["convert", "a"], "the following arguments are required: DST"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_usage_errors(capsys: Capture, arguments: list[str], message: str) -> None:
    assert message in fails(capsys, 2, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "a", "--model", "no/such"], "unknown model 'no/such': no such directory"),
        (["generate", "--prompt", "a", "--config", "huge"], "unknown config 'huge'; it takes one of small"),
        (["generate", "--prompt", "a", "--config", "small"], "this model has no tokenizer; give token ids with --ids"),
        (["generate", "--ids", "no/such.json", "--config", "small"], "no/such.json"),
        (
            ["generate", "--prompt", "a", "--config", "small", "--max-length", "0"],
            "max_length = 0; it takes an integer",
        ),
        (["info", "no/such"], "unknown model 'no/such'"),
        (["info", "--config", "huge"], "unknown config 'huge'"),
        (["info", "--config", "small", "--speculate", "8"], "speculate = 8; it takes an integer from 0"),
        (["info", "--config", "small", "--memory", "1KiB"], "memory of 1,024 bytes holds no request"),
        (["info", "--config", "small", "--memory", "0"], "memory of 0 bytes holds no request"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures(capsys: Capture, arguments: list[str], message: str) -> None:
    error = fails(capsys, 1, *arguments)
    assert error.startswith(f"gdnjax {arguments[0]}: ")
    assert message in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "nan"], "temperature = nan; it takes a finite number"),
        (["--top-p", "2"], "top_p = 2.0; it takes a number in (0, 1]"),
        (["--max-new-tokens", "0"], "max_new_tokens = 0; it takes an integer >= 1"),
        (["--stop", ""], "stop = ['']; it takes strings of at least one character"),
        (["--repetition-penalty", "0"], "repetition_penalty = 0.0; it takes a number > 0"),
    ],
    ids=str,
)
def test_bad_sampling_values(capsys: Capture, model: LanguageModel, flags: list[str], message: str) -> None:
    assert message in fails(capsys, 2, "generate", "--prompt", "a", *flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1, 2", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"[" + b"9" * 5000 + b"]", "not valid JSON"),
        (b"\xff\xfe\xfd", "not valid JSON"),
        (b"{}", "it takes one flat JSON list of token ids"),
        (b"5", "it takes one flat JSON list of token ids"),
        (b"[[1]]", "it takes one flat JSON list of token ids"),
        (b"[1.0]", "it takes one flat JSON list of token ids"),
        (b"[true]", "it takes one flat JSON list of token ids"),
        (b'["1"]', "it takes one flat JSON list of token ids"),
        (b"[]", "prompt 0 is empty"),
        (b"[-1]", "prompt 0: token id -1"),
        (b"[999999999999999999999999]", "it takes a flat list of ids"),
        (f"[{VOCAB}]".encode(), f"prompt 0: token id {VOCAB}"),
    ],
    ids=lambda value: repr(value[:20]) if isinstance(value, bytes) else "",
)
def test_bad_id_files(
    capsys: Capture, model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    error = fails(capsys, 1, "generate", "--ids", str(path))
    assert message in error
    assert str(path) in error or "prompt 0" in error


def test_a_huge_id_file_is_not_read(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "huge.json"
    with path.open("wb") as file:
        file.truncate(MAX_IDS_BYTES + 1)
    assert "a file of token ids has at most" in fails(capsys, 1, "generate", "--ids", str(path))


def test_interrupts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **more: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr("gdnjax.loading.load", interrupted)
    assert fails(capsys, 1, "generate", "--prompt", "a") == "gdnjax generate: interrupted\n"


def test_help_needs_no_jax() -> None:
    code = (
        "import sys; from gdnjax.cli import build_parser; build_parser().format_help();"
        "sys.exit(any(m in sys.modules for m in ('jax', 'numpy', 'flax', 'orbax')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_speed_leaves_out_the_first_two_tokens(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    clock = iter([0.0, 10.0, 10.5, 11.0, 50.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    printer = Printer(quiet=False)
    for text in "abcd":
        printer(0, [1], text)
    printer(0, [], "e")  # held back to the end: text without a token
    assert printer.tokens_per_second() == 2.0
    assert capsys.readouterr().out == "abcde"
    # Steps of several tokens, of which the first compiles.
    clock = iter([0.0, 10.0, 10.5, 11.0])
    printer = Printer(quiet=True)
    for tokens in ([1], [1, 2, 3], [1, 2], [1]):
        printer(0, tokens, "")
    assert printer.tokens_per_second() == 3.0


# info


@pytest.mark.newest
def test_info_json(capsys: Capture) -> None:
    assert main(["info", "--config", "small", "--json"]) == 0
    captured = capsys.readouterr()
    value = one_object(captured.out)
    assert value.keys() == INFO_KEYS
    costs = sizes(SMALL)
    assert value["parameters"] == costs.parameters
    assert value["weight_bytes"] == costs.weight_bytes == 4 * costs.parameters
    # one GDN layer: 4 heads of 16 x 16 in float32, four columns of 2 * 32 + 64 channels; twin has two states
    assert value["bytes_per_request"] == {"in_place": 4096 + 2048, "twin": 2 * 4096 + 2048}
    # one attention layer: keys and values of 2 heads of 16
    assert value["bytes_per_kv_token"] == 2 * 2 * 16 * 4
    assert (value["max_requests"], value["kv_tokens"]) == (4, 256)
    assert captured.err == ""


@pytest.mark.parametrize("layout", ["in_place", "twin"])
def test_info_memory_against_real_arrays(capsys: Capture, layout: str) -> None:
    memory = sizes(SMALL).weight_bytes + 200_000
    arguments = ["info", "--config", "small", "--memory", str(memory), "--state-layout", layout, "--json"]
    assert main([*arguments, "--max-length", "48"]) == 0
    value = one_object(capsys.readouterr().out)
    config = SMALL.replace(
        state_layout=layout, max_length=48, max_requests=value["max_requests"], kv_tokens=value["kv_tokens"]
    )
    state = init_state(config)
    used = value["weight_bytes"] + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    used += 5 * VOCAB * config.max_requests  # for penalties
    assert memory - 16 * value["bytes_per_kv_token"] < used <= memory
    assert value["max_requests"] > 1
    assert (state.page_table[:, :3] > 0).all(), "a request has no room for max_length"


def test_info_changes(capsys: Capture) -> None:
    assert main(["info", "--config", "small", "--dtype", "bfloat16", "--max-length", "32", "--json"]) == 0
    value = one_object(capsys.readouterr().out)
    assert value["bytes_per_kv_token"] == 128
    assert value["kv_tokens"] == 128
    assert value["bytes_per_request"]["in_place"] == 4096 + 1024


def test_info_of_drafts(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the shipped shapes
    assert main(["info", "--config", "27b", "--speculate", "3", "--memory", "64GiB", "--json"]) == 0
    ways = {(w["state_layout"], w["speculative_state"]): w for w in json.loads(capsys.readouterr().out)["speculation"]}
    # 48 layers with pages of 3 MiB, and in a record two halves of 4 rows of k, v, a and b.
    page, record = 3 * 2**20, 2 * 4 * (16 * 128 + 48 * 128 + 2 * 48) * 2
    for layout, pages in (("in_place", 4), ("twin", 8)):
        freed = ways[layout, "slots"]["bytes_per_request"] - ways[layout, "record"]["bytes_per_request"]
        assert freed == 48 * ((pages - pages // 4) * page - record)
        assert ways[layout, "record"]["max_requests"] > ways[layout, "slots"]["max_requests"]
    assert main(["info", "--config", "27b", "--speculate", "3"]) == 0
    assert "3 drafts, slots, twin" in capsys.readouterr().out
    assert main(["info", "--config", "27b", "--draft-head", "fp8", "--json"]) == 0
    value = one_object(capsys.readouterr().out)
    assert value["draft_head_bytes"] == 248320 * (5120 + 4)
    assert main(["info", "--config", "27b", "--draft-head", "fp8"]) == 0
    assert re.search(r"^fp8 draft head +1\.2 GiB$", capsys.readouterr().out, re.MULTILINE)


def test_info_text(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the shipped shapes
    assert main(["info", "--config", "0.8b", "--memory", "32GiB"]) == 0
    captured = capsys.readouterr()
    lines = dict(line.split("  ", 1) for line in captured.out.splitlines())
    values = {k.strip(): v.strip() for k, v in lines.items()}
    assert values["state a request, in_place"] == "18.84 MiB"
    assert values["state a request, twin"] == "36.84 MiB"
    assert values["KV cache a token"] == "12 KiB"
    assert int(values["requests that fit in 32GiB"].replace(",", "")) > 100
    assert captured.err == ""


def test_a_long_max_length_does_not_need_the_files_max_requests(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    arguments = ["info", "--config", "27b", "--max-length", "262144", "--json"]
    # eight such requests would pass 2^31 elements in one array
    assert main(arguments) == 1
    assert "kv_tokens" in capsys.readouterr().err
    assert main([*arguments, "--memory", "192GiB"]) == 0
    value = one_object(capsys.readouterr().out)
    assert value["max_requests"] >= 1 and value["kv_tokens"] >= 262144


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("32GiB", 32 * 2**30),
        ("32gib", 32 * 2**30),
        ("64GB", 64 * 10**9),
        ("64 G", 64 * 10**9),
        ("512M", 512 * 10**6),
        ("1.5MiB", 3 * 2**19),
        ("1e9", 10**9),
        ("2E3K", 2 * 10**6),
        ("7B", 7),
        ("7", 7),
        (" 1 TiB ", 2**40),
    ],
)
def test_parse_size(text: str, count: int) -> None:
    assert parse_size(text) == count


@pytest.mark.parametrize("text", ["", "GiB", "1 2", "5I", "1XB", "-1", "0x10", "1e999", "nan", "inf", "1.2.3", "٣GiB"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(UsageError, match="it takes a number with a unit, such as 32GiB or 64GB"):
        parse_size(text)


def test_format_bytes() -> None:
    counts = (0, 1023, 1024, 12288, 18 * 2**20, 2**30, 3 * 2**40)
    assert [format_bytes(c) for c in counts] == [
        "0 B", "1023 B", "1 KiB", "12 KiB", "18 MiB", "1.0 GiB", "3,072.0 GiB",
    ]  # fmt: skip


# The process


def process(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **more.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "gdnjax", *arguments], capture_output=True, text=True, env=environment, **more
    )


@pytest.mark.skipif(bool(installed(PLUGINS)), reason="a GPU plugin is installed")
def test_a_gpu_that_is_asked_for_and_missing_fails() -> None:
    done = process("generate", "--config", "tiny", "--ids", "-", "--platform", "cuda", input="[1, 2]")
    assert done.returncode == 1, done
    assert done.stdout == ""
    assert done.stderr.startswith("gdnjax generate: --platform cuda: no such device here")
    assert "run `gdnjax doctor`" in done.stderr and "Traceback" not in done.stderr
    # the same through the environment, without --platform
    for command in (["generate", "--config", "tiny", "--ids", "-"], ["doctor"]):
        done = process(*command, input="[1, 2]", env={"JAX_PLATFORMS": "cuda"})
        assert done.returncode == 1, done
        assert "JAX was told to use 'cuda', and that is not here" in done.stderr + done.stdout
        assert "Traceback" not in done.stderr


def test_a_platform_that_jax_has_not_is_never_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jax.default_backend() == "cpu"  # JAX runs here already, and does not look again
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    before = jax.config.jax_platforms
    try:
        with pytest.raises(RuntimeError, match="--platform cuda: JAX's device is cpu; run `gdnjax doctor`"):
            require_platform(argparse.Namespace(platform="cuda"))
    finally:
        jax.config.update("jax_platforms", before)


def test_info_as_a_process() -> None:
    done = process("info", "--config", "0.8b", "--json")
    assert done.returncode == 0, done.stderr
    value = one_object(done.stdout)
    assert value["bytes_per_kv_token"] == 12 * 1024
    assert process("info").returncode == 2


@pytest.mark.slow
def test_generate_as_a_process() -> None:
    arguments = ["generate", "--config", "tiny", "--ids", "-", "--max-new-tokens", "4", "--platform", "cpu", "--json"]
    done = process(*arguments, input="[1, 2, 3]")
    assert done.returncode == 0, done.stderr
    value = one_object(done.stdout)
    assert value.keys() == GENERATE_KEYS
    assert len(value["tokens"]) == 4


def test_a_reader_that_leaves_is_no_traceback() -> None:
    # the pipe's reading end is closed before anything is written
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "gdnjax", "info", "--config", "0.8b"]
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True, env={**os.environ})
    assert done.returncode == 1
    assert done.stderr == ""
