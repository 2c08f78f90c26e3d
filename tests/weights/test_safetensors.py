"""Reading and writing Hugging Face checkpoints: names, damage, memory, bits."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from gdnjax.weights.declaration import tensor_names
from gdnjax.weights.files import CheckpointError
from gdnjax.weights.safetensors_format import read_header
from gdnjax.weights.safetensors_io import load_safetensors, plan_directory, read_tensors, write_safetensors
from pallas_kernels.attention_prologue.reference import inverse_frequencies, rope_table
from tests.helpers import assert_same_bits, jit_forward

LANGUAGE_MODEL = "model.language_model."
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
BF16 = ml_dtypes.bfloat16


def assert_same(found: Any, wanted: Any) -> None:
    found, wanted = dict(found), dict(wanted)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert_same_bits(found[name], array, name)


def refuses(path: Path, config: Any, message: str) -> str:
    with pytest.raises(CheckpointError, match=message) as caught:
        list(read_tensors(path, config))
    return str(caught.value)


# Names


@pytest.mark.newest
@pytest.mark.parametrize("prefix", ["model.", LANGUAGE_MODEL])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("mtp", [False, True])
def test_every_name_style_gives_the_same_tensors(make, prefix: str, tied: bool, mtp: bool) -> None:
    checkpoint = make(prefix=prefix, tied=tied, mtp=mtp)
    assert_same(read_tensors(checkpoint.write(), checkpoint.config), checkpoint.tensors)
    assert (HEAD in checkpoint.tensors) is not tied
    assert any(name.startswith("mtp.") for name in checkpoint.tensors) is mtp


def test_shards(make) -> None:
    checkpoint = make(prefix=LANGUAGE_MODEL)
    assert_same(read_tensors(checkpoint.write_shards(), checkpoint.config), checkpoint.tensors)


def test_report_34_untied_head_is_used(make) -> None:
    untied, tied = make("untied"), make("tied", tied=True)
    tokens = jnp.asarray([[1, 2, 3]])
    own = load_safetensors(untied.write(), untied.config, dtype="float32")
    tensors = {**untied.tensors, HEAD: untied.tensors[EMBEDDING]}
    save_file(tensors, tied.path / "model.safetensors")
    shared = load_safetensors(tied.path, tied.config, dtype="float32")
    logits = [jit_forward(p, c, tokens) for p, c in ((own, untied.config), (shared, tied.config))]
    assert np.abs(np.asarray(logits[0] - logits[1])).max() > 1e-3
    assert HEAD not in tensor_names(shared)


def test_report_34_tied_head_must_be_the_embedding(make) -> None:
    checkpoint = make(tied=True)
    embedding = checkpoint.tensors[EMBEDDING]
    assert_same(read_tensors(checkpoint.write({HEAD: embedding}), checkpoint.config), checkpoint.tensors)
    other = embedding.copy()
    other.view(np.uint16)[-1, -1] ^= 1
    refuses(
        checkpoint.write({HEAD: other}), checkpoint.config, "tie_word_embeddings = True, but 'lm_head.weight' differs"
    )
    # The same numbers in another dtype are not the same bits.
    refuses(checkpoint.write({HEAD: embedding.astype(np.float32)}), checkpoint.config, "'lm_head.weight' differs")
    refuses(checkpoint.write({HEAD: embedding[:10]}), checkpoint.config, "'lm_head.weight' differs")


def test_report_34_untied_needs_a_head(make) -> None:
    checkpoint = make()
    path = checkpoint.write(drop=(HEAD,))
    refuses(path, checkpoint.config, "missing tensors: 'lm_head.weight'.*tie_word_embeddings = False")


def test_all_findings_in_one_error(make) -> None:
    checkpoint = make()
    gone = ("model.norm.weight", "model.layers.0.linear_attn.A_log")
    extra = {"model.layers.0.mlp.experts.down_proj": np.ones(3, np.float32), "lm_head.bias": np.ones(1, np.float32)}
    extra["model.layers.1.self_attn.q_norm.weight"] = np.ones(17, np.float32)
    message = refuses(checkpoint.write(extra, gone), checkpoint.config, "unknown tensors")
    for part in (*gone, *extra, "missing tensors", "shape [17]; the config declares [16]", str(checkpoint.path)):
        assert part in message


def test_a_name_with_control_characters_is_printed_escaped(make) -> None:
    checkpoint = make()
    message = refuses(checkpoint.write({"\x1b[2Jx": np.ones(1, np.float32)}), checkpoint.config, "unknown")
    assert "\x1b" not in message


def test_mixed_name_styles(make) -> None:
    checkpoint = make()
    norm = {LANGUAGE_MODEL + "norm.weight": checkpoint.tensors["model.norm.weight"]}
    refuses(checkpoint.write(norm), checkpoint.config, "mixes two ways to name")


def test_draft_head_needs_its_config(make) -> None:
    with_head, without = make("with", mtp=True), make("without")
    message = refuses(with_head.write(), without.config, "mtp_num_hidden_layers = 0, but it holds a draft head")
    assert all(name in message for name in with_head.tensors if name.startswith("mtp."))
    refuses(without.write(), with_head.config, "missing tensors: 'mtp.*set mtp_num_hidden_layers to 0")


def test_vision_tower_is_read_only_when_told_to_skip_it(make) -> None:
    checkpoint = make(prefix=LANGUAGE_MODEL)
    tower = {"model.visual.pos_embed.weight": np.ones((2, 2), np.float16)}
    path = checkpoint.write(tower)
    refuses(path, checkpoint.config, "'model.visual.pos_embed.weight'; set language_model_only=True")
    assert_same(read_tensors(path, checkpoint.config.replace(language_model_only=True)), checkpoint.tensors)


# Dtypes and values


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8"])
def test_other_dtypes(make, dtype: str) -> None:
    checkpoint = make()
    norm = {"model.norm.weight": np.ones(32, dtype)}
    name = {"float16": "F16", "float64": "F64", "int8": "I8"}[dtype]
    refuses(checkpoint.write(norm), checkpoint.config, rf"'model.norm.weight' .* has dtype {name}.*takes F32 or BF16")


@pytest.mark.parametrize("dtype", [np.float32, BF16])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_named(make, dtype: Any, value: float) -> None:
    checkpoint = make()
    broken = np.linspace(-3e38, 3e38, 48 * 32).reshape(48, 32).astype(dtype)
    assert dict(read_tensors(checkpoint.write({EMBEDDING: broken}), checkpoint.config))
    broken[47, 31] = value
    refuses(checkpoint.write({EMBEDDING: broken}), checkpoint.config, rf"'{EMBEDDING}' is -?(nan|inf) at \[47, 31\]")


def test_nothing_is_read_before_all_is_checked(make) -> None:
    checkpoint = make()
    path = checkpoint.write(drop=("model.norm.weight",))
    with pytest.raises(CheckpointError, match="missing"):
        read_tensors(path, checkpoint.config)


@pytest.mark.newest
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_report_35_what_is_declared_float32_survives_the_load_dtype(make, dtype: str) -> None:
    checkpoint = make()
    for name in checkpoint.tensors:
        if name.endswith("dt_bias"):
            checkpoint.tensors[name] = checkpoint.tensors[name].astype(np.float32) + np.float32(2**-20)
    # what a bfloat16 would lose, in every tensor that must keep it
    checkpoint.tensors["model.layers.0.linear_attn.norm.weight"] += np.float32(2**-20)
    params = tensor_names(load_safetensors(checkpoint.write(), checkpoint.config, dtype))
    for name, array in params.items():
        kept = name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight"))
        assert array.dtype == ("float32" if kept else dtype), name
        assert_same_bits(array, checkpoint.tensors[name].astype(array.dtype), name)
        assert not kept or (np.asarray(array) != np.asarray(array).astype(BF16).astype(np.float32)).any(), name


def test_report_35_inverse_frequencies_are_float32_at_any_dtype() -> None:
    frequencies = inverse_frequencies(1e7, 64)
    assert frequencies.dtype == np.float32
    assert (frequencies.astype(BF16).astype(np.float32) != frequencies).any()
    position = np.asarray([0, 4095, 262143], np.int32)
    cos, sin = rope_table(jnp.asarray(position), 1e7, 64)
    angles = (position[:, None].astype(np.float32) * frequencies).astype(np.float64)
    assert cos.dtype == sin.dtype == jnp.float32
    assert np.abs(np.asarray(cos) - np.cos(angles)).max() < 1e-6
    assert np.abs(np.asarray(sin) - np.sin(angles)).max() < 1e-6


def test_bfloat16_rounds_to_nearest_even(make) -> None:
    checkpoint = make()
    values = np.float32(1) + np.arange(32, dtype=np.float32) / 1024
    params = load_safetensors(checkpoint.write({"model.norm.weight": values}), checkpoint.config)
    assert_same_bits(tensor_names(params)["model.norm.weight"], values.astype(BF16))


# Damaged files


def test_truncation_anywhere(make) -> None:
    checkpoint = make()
    path = checkpoint.write() / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    cuts = {0, 1, 7, 8, 9, 8 + header // 2, 7 + header, 8 + header, 9 + header, len(whole) // 2, len(whole) - 1}
    for cut in sorted(cuts | set(range(0, len(whole), len(whole) // 40))):
        path.write_bytes(whole[:cut])
        refuses(checkpoint.path, checkpoint.config, re.escape(str(path)) + ".*truncated")
    path.write_bytes(whole + b"\0")
    refuses(checkpoint.path, checkpoint.config, "its tensors end at")


def test_truncation_after_the_check(make) -> None:
    checkpoint = make()
    path = checkpoint.write() / "model.safetensors"
    reading = read_tensors(checkpoint.path, checkpoint.config)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: ends at byte"):
        list(reading)


def test_a_flipped_byte_in_the_header_is_no_other_exception(make) -> None:
    checkpoint = make()
    path = checkpoint.write() / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for at in [*range(8), *rng.integers(8, 8 + header, 120)]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            plan_directory(checkpoint.path, checkpoint.config)
        except CheckpointError:
            refused += 1
    assert refused > 100  # the others hit padding or the free-form metadata


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


HUGE = 2**60


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, "'b' overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, "'b' leaves a gap"),
        ({"a": entry([2], 8, 16)}, "'a' leaves a gap"),
        ({"a": entry([3], 0, 8)}, r"F32 \[3\] takes 12 bytes, data_offsets span 8"),
        ({"a": entry([HUGE], 0, 4 * HUGE)}, "truncated"),
        ({"a": entry([HUGE, HUGE, HUGE], 0, 16)}, "takes .* bytes, data_offsets span 16"),
        ({"a": entry([2**63], 0, 16)}, "shape = .*integers >= 0"),
        ({"a": entry([-4], 0, 16)}, "shape = .*integers >= 0"),
        ({"a": entry([True], 0, 4)}, "shape = .*integers >= 0"),
        ({"a": entry([4], 16, 0)}, "data_offsets = .*begin <= end"),
        ({"a": entry([4], -16, 0)}, "data_offsets"),
        ({"a": {**entry([4], 0, 16), "data_offsets": [0]}}, "data_offsets"),
        ({"a": {**entry([4], 0, 16), "data_offsets": [0.0, 16.0]}}, "data_offsets"),
        ({"a": entry([4], 0, 16, "F33")}, "dtype = 'F33'"),
        ({"a": {**entry([4], 0, 16), "dtype": ["F32"]}}, "dtype = "),
        ({"a": {"dtype": "F32", "shape": [4]}}, "exactly dtype, shape and data_offsets"),
        ({"a": 1}, "exactly dtype, shape and data_offsets"),
        ([1, 2], "holds a list"),
        (
            '{"a": ' + json.dumps(entry([4], 0, 16)) + ', "a": ' + json.dumps(entry([4], 0, 16)) + "}",
            "'a' stands twice",
        ),
        ("[" * 100_000, "no valid JSON"),
        ("{", "no valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "no valid JSON"),
        (b"\xff\xfe{}", "no valid JSON"),
    ],
)
def test_hostile_headers(make, header: Any, message: str) -> None:
    checkpoint = make()
    if not isinstance(header, bytes):
        header = (header if isinstance(header, str) else json.dumps(header)).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(16)
    (checkpoint.path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refuses(checkpoint.path, checkpoint.config, message)


@pytest.mark.parametrize("length", [2**24 + 1, 2**63, 2**64 - 1])
def test_a_long_header_is_refused_unread(make, length: int) -> None:
    checkpoint = make()
    path = checkpoint.path / "model.safetensors"
    with open(path, "wb") as file:
        file.write(length.to_bytes(8, "little"))
        file.truncate(2**26)  # sparse
    refuses(checkpoint.path, checkpoint.config, r"header of [\d,]+ bytes; it takes at most")


# Indices


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/tmp/out.safetensors", "a/b.safetensors", "..", "x.bin", 3, "a\0.safetensors"]
)
def test_index_names_stay_inside(make, tmp_path: Path, name: Any) -> None:
    checkpoint = make()
    weight_map = json.loads((checkpoint.write_shards() / "model.safetensors.index.json").read_text())["weight_map"]
    save_file({"model.norm.weight": checkpoint.tensors["model.norm.weight"]}, tmp_path / "out.safetensors")
    checkpoint.write_index({**weight_map, "model.norm.weight": name})
    refuses(checkpoint.path, checkpoint.config, "it takes a (plain name|.safetensors file)")


def test_links_stay_inside(make, tmp_path: Path) -> None:
    checkpoint = make()
    path = checkpoint.write() / "model.safetensors"
    outside = path.rename(tmp_path / "elsewhere.safetensors")
    path.symlink_to(outside)
    refuses(checkpoint.path, checkpoint.config, "a link that leads out of the checkpoint")
    path.unlink()
    path.symlink_to("gone")
    refuses(checkpoint.path, checkpoint.config, "neither model.safetensors nor|no such file")
    path.unlink()
    path.mkdir()
    refuses(checkpoint.path, checkpoint.config, "not a regular file")


def test_the_download_cache_of_hugging_face_is_read_through_its_links(make, tmp_path: Path) -> None:
    checkpoint = make("models--a--b/snapshots/0123")
    path = checkpoint.write() / "model.safetensors"
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    path.rename(blobs / "ffff")
    path.symlink_to("../../blobs/ffff")
    assert_same(read_tensors(checkpoint.path, checkpoint.config), checkpoint.tensors)


def test_damaged_indices(make) -> None:
    checkpoint = make()
    path = checkpoint.write_shards()
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    norm, first, second = "model.norm.weight", *sorted(set(weight_map.values()))[:2]

    checkpoint.write_index({**weight_map, "model.more.weight": first})
    refuses(path, checkpoint.config, "not in the shards it names: 'model.more.weight'")
    checkpoint.write_index({**weight_map, norm: first if weight_map[norm] != first else second})
    refuses(path, checkpoint.config, "not in the shards it names: 'model.norm.weight'")
    checkpoint.write_index({name: file for name, file in weight_map.items() if name != norm})
    refuses(path, checkpoint.config, "holds tensor 'model.norm.weight', which .* does not list")
    for content in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}'):
        index.write_text(content)
        refuses(path, checkpoint.config, "index.json")

    checkpoint.write_index(weight_map)
    shard = path / weight_map[norm]
    names = {name for name, file in weight_map.items() if file == shard.name} | {
        "model.layers.0.input_layernorm.weight"
    }
    names |= {name for name, file in weight_map.items() if file != shard.name}
    whole = shard.read_bytes()
    save_file({name: checkpoint.stored()[name] for name in names}, shard)
    refuses(path, checkpoint.config, "is also in")
    shard.write_bytes(whole[:-1])
    refuses(path, checkpoint.config, re.escape(str(shard)) + ".*truncated")
    shard.unlink()
    refuses(path, checkpoint.config, re.escape(str(shard)) + ": no such file")


def test_no_or_two_sources(make) -> None:
    checkpoint = make()
    refuses(checkpoint.path, checkpoint.config, "neither model.safetensors nor model.safetensors.index.json")
    checkpoint.write()
    checkpoint.write_shards()
    refuses(checkpoint.path, checkpoint.config, "both model.safetensors and")


# Writing


@pytest.mark.newest
@pytest.mark.parametrize("style", ["flat", "language_model"])
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 6000])
def test_write_and_read_back(make, tmp_path: Path, style: Any, shard_bytes: int) -> None:
    checkpoint = make(mtp=True)
    odd = checkpoint.tensors["model.layers.0.linear_attn.dt_bias"]
    odd[:] = [-0.0, 1e-40, 3e38, -1e-40]  # signs of zero and subnormals are bits too
    files = {"config.json": checkpoint.path / "config.json", "note.txt": b"x"}
    write_safetensors(tmp_path / "out", checkpoint.tensors.items(), style, files, shard_bytes)
    assert_same(read_tensors(tmp_path / "out", checkpoint.config), checkpoint.tensors)
    assert (tmp_path / "out" / "config.json").read_bytes() == (checkpoint.path / "config.json").read_bytes()
    assert (tmp_path / "out" / "note.txt").read_bytes() == b"x"

    # What Hugging Face's library sees: names, alignment, its metadata, sizes.
    checkpoint.prefix = {"flat": "model.", "language_model": LANGUAGE_MODEL}[style]
    shards = sorted((tmp_path / "out").glob("*.safetensors"))
    assert (len(shards) == 1) == (shard_bytes > 6000)
    found = {}
    for shard in shards:
        with safe_open(shard, framework="numpy") as file:
            assert file.metadata() == {"format": "pt"}
            found.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    assert_same(found, checkpoint.stored())
    if len(shards) > 1:
        index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(array.nbytes for array in checkpoint.tensors.values())
        assert [shard.name for shard in shards] == sorted(set(index["weight_map"].values()))
        assert shards[0].name == f"model-00001-of-{len(shards):05d}.safetensors"
        sizes = {shard.name: 0 for shard in shards}
        for name, file in index["weight_map"].items():
            sizes[file] += found[name].nbytes
        largest = max(array.nbytes for array in found.values())
        assert all(size <= max(shard_bytes, largest) for size in sizes.values())


def test_wide_dtypes_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    arrays = {"a": np.ones(3, BF16), "b": np.ones(2, np.float32), "c": np.ones(1, BF16), "d": np.ones(1, np.float32)}
    write_safetensors(tmp_path / "out", arrays.items())
    for tensor in read_header(tmp_path / "out" / "model.safetensors").values():
        assert tensor.offset % (4 if tensor.dtype == "F32" else 2) == 0
    with safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert_same({name: file.get_tensor(name) for name in arrays}, arrays)


def test_write_jax_arrays_on_the_way_to_the_host(make, tmp_path: Path) -> None:
    checkpoint = make()
    params = load_safetensors(checkpoint.write(), checkpoint.config)
    write_safetensors(tmp_path / "out", tensor_names(params).items())
    assert_same(
        read_tensors(tmp_path / "out", checkpoint.config), {n: np.asarray(a) for n, a in tensor_names(params).items()}
    )


def test_write_refusals_leave_nothing(make, tmp_path: Path) -> None:
    checkpoint = make()
    target = tmp_path / "out"
    good = ("model.norm.weight", np.ones(2, np.float32))
    with pytest.raises(CheckpointError, match=r"stand twice: model\.norm\.weight"):
        write_safetensors(target, [good, good])
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' is float16; it takes float32 or bfloat16"):
        write_safetensors(target, [good, (HEAD, np.ones(2, np.float16))])
    with pytest.raises(CheckpointError, match="no tensors"):
        write_safetensors(target, [])
    with pytest.raises(ValueError, match=r"names = 'nested'; it takes 'flat' or 'language_model'"):
        write_safetensors(target, [good], "nested")
    with pytest.raises(FileNotFoundError):
        write_safetensors(target, [good], files={"config.json": tmp_path / "gone"})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.path.name]
    target.mkdir()
    with pytest.raises(CheckpointError, match="out exists; it takes a path that does not"):
        write_safetensors(target, [good])
    assert list(target.iterdir()) == []


# Memory

MEASURE = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import numpy as np
from gdnjax.config import from_directory
from gdnjax.weights.safetensors_format import read_header
from gdnjax.weights.safetensors_io import read_tensors

def peak():
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith("VmHWM"))

config = from_directory(Path(sys.argv[1]))
before, total = peak(), 0
for name, array in read_tensors(sys.argv[1], config):
    total += array.nbytes
print(total, peak() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_is_two_tensors(make, tmp_path: Path) -> None:
    checkpoint = make(tied=True)
    text = {**checkpoint.json, "num_hidden_layers": 8, "layer_types": ["linear_attention"] * 8}
    checkpoint.json = {**text, "vocab_size": 64, "hidden_size": 1024, "intermediate_size": 4096}
    checkpoint.write_config()
    from gdnjax.config import from_directory
    from gdnjax.weights.declaration import abstract_params

    shapes = tensor_names(abstract_params(from_directory(checkpoint.path)))
    checkpoint.tensors = {name: np.zeros(s.shape, BF16) for name, s in shapes.items()}
    path = checkpoint.write_shards()
    largest = max(array.nbytes for array in checkpoint.tensors.values())
    code = MEASURE.format(tests=str(Path(__file__).resolve().parents[2]))
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    total, peak = map(int, done.stdout.split())
    assert total == sum(array.nbytes for array in checkpoint.tensors.values()) > 200e6
    assert peak < 2 * largest + 24e6
