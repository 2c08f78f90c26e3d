"""Training the small model, at sizes at which a few steps take seconds."""

import json
import math
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import tiny_data
import train_tiny
import training
import training_output

from gdnjax.config import from_directory, from_preset
from gdnjax.model.draft import mtp_logits
from gdnjax.model.forward import forward, forward_hidden
from gdnjax.tokenizer import load_tokenizer
from gdnjax.weights.declaration import abstract_params, tensor_names

TOKENIZER = ROOT / "checkpoints" / "tiny"
CONFIG = from_preset(
    "tiny",
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    layer_types=("linear_attention", "full_attention"),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    partial_rotary_factor=0.5,
    mrope_section=(2, 1, 1),
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
TEXT = "It is a truth universally acknowledged, that a single man in possession of a fortune. " * 60
ARGUMENTS = "--batch 4 --length 32 --block 4 --eval-every 8 --save-every 8 --warmup 4 --lr 1e-2 --problems 2".split()


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(TOKENIZER, model_vocab_size=4096)


def train(tokenizer, out, *arguments):
    args = train_tiny.parse_args([*ARGUMENTS, "--out", str(out), *arguments])
    stream = np.array(tokenizer.encode(TEXT), np.uint16)
    prompt, answer = tokenizer.encode("It is a"), tokenizer.encode(" truth universally")
    problem = tiny_data.HeldOutProblem(prompt, "4", prompt + answer)
    data = training.Data(
        stream[:-200],
        {
            "literature": training.stream_rows(stream[-200:], args.batch, args.length),
            "arithmetic": training.problem_rows([problem] * 3, args.batch, args.length),
        },
        [problem] * 3,
    )
    weights = training.initial_weights(CONFIG, args.seed)
    task = training.Task(CONFIG.replace(dtype=args.dtype), weights, tokenizer, TOKENIZER, data)
    return task, train_tiny.run(args, task, time.monotonic(), Console(quiet=True))


def log_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def without_times(lines):
    return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]


@pytest.fixture(scope="module")
def whole(tokenizer, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, *train(tokenizer, out, "--steps", "24")


def test_a_few_steps_lower_the_loss_and_everything_is_written(whole, tokenizer):
    out, task, report = whole
    lines = log_of(out)
    assert lines[-1]["loss"] < lines[0]["loss"] - 1.0
    assert lines[-1]["heldout"]["literature"]["loss"] < lines[1]["heldout"]["literature"]["loss"]
    assert report["steps"] == report["best_step"] == 24 and report["tokens"] == 24 * 4 * 32
    assert report["heldout"]["literature"]["tokens"] == 199
    assert report["heldout"]["arithmetic"]["tokens"] == 3 * len(tokenizer.encode(" truth universally"))
    assert report["arithmetic"]["problems"] == 2 and len(report["samples"]) == len(training_output.SAMPLE_PROMPTS)
    assert json.loads((out / "report.json").read_text())["best_step"] == 24
    steps = sorted(int(p.name) for p in (out / "checkpoints").iterdir() if p.name.isdecimal())
    assert steps == [16, 24]

    from safetensors import safe_open

    with safe_open(out / "model.safetensors", "numpy") as file:
        names = set(file.keys())
        dtypes = {name: file.get_slice(name).get_dtype() for name in names}
    declared = tensor_names(abstract_params(task.config))
    assert names == set(declared) and "lm_head.weight" not in names
    kept = {name for name, dtype in dtypes.items() if dtype == "F32"}
    layer = "model.layers.0.linear_attn."
    assert kept == {layer + "A_log", layer + "dt_bias", layer + "norm.weight"}
    assert set(dtypes.values()) == {"F32", "BF16"}

    read = from_directory(out)
    assert read.generation.stop_ids == tuple(training_output.stop_ids(tokenizer)) and read.generation.do_sample
    same = {"generation": CONFIG.generation, "max_length": CONFIG.max_length}
    assert read.replace(**same) == CONFIG


def test_a_resumed_run_equals_one_that_never_stopped(whole, tokenizer, tmp_path, monkeypatch):
    out, _, report = whole
    real = train_tiny.save

    def save_and_stop(manager, state, best, numbers):
        real(manager, state, best, numbers)
        if int(state.step) == 16:
            raise KeyboardInterrupt

    monkeypatch.setattr(train_tiny, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        train(tokenizer, tmp_path, "--steps", "24")
    monkeypatch.undo()
    # What a stopped run logged after its last checkpoint must not stand twice.
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write(json.dumps({"step": 20, "loss": 0.0}) + "\n")
    _, resumed = train(tokenizer, tmp_path, "--steps", "24", "--resume")
    assert (tmp_path / "model.safetensors").read_bytes() == (out / "model.safetensors").read_bytes()
    assert without_times(log_of(tmp_path)) == without_times(log_of(out))
    assert resumed["heldout"] == report["heldout"] and resumed["samples"] == report["samples"]


def test_resuming_without_a_checkpoint_says_so(tokenizer, tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        train(tokenizer, tmp_path, "--steps", "4", "--resume")


def test_a_time_budget_ends_the_run(tokenizer, tmp_path):
    _, report = train(tokenizer, tmp_path, "--steps", "100000", "--minutes", "0.02", "--save-every", "0")
    assert 4 <= report["steps"] < 100000 and "heldout" in log_of(tmp_path)[-1]
    assert not (tmp_path / "checkpoints").exists()


@pytest.fixture(scope="module")
def gradients():
    """The gradient of the loss in each dtype of the computation."""
    weights = training.initial_weights(CONFIG, 0)
    tokens = jax.random.randint(jax.random.key(0), (2, 33), 0, CONFIG.vocab_size)
    gradient = jax.jit(jax.grad(lambda w, c: training.total_loss(w, c, tokens)[0]), static_argnums=1)
    return {dtype: gradient(weights, CONFIG.replace(dtype=dtype)) for dtype in ("float32", "bfloat16")}


def test_losses_are_those_of_the_model():
    config = CONFIG.replace(dtype="float32")
    weights = training.initial_weights(config, 1)
    tokens = jax.random.randint(jax.random.key(2), (2, 17), 0, config.vocab_size)

    @jax.jit
    def expected(weights):
        params, inputs = training.model_params(weights, config), tokens[:, :-1]
        hidden, _ = forward_hidden(params, config, inputs)
        logits = forward(params, config, inputs), mtp_logits(params, config, hidden, inputs)
        return [
            -jnp.take_along_axis(jax.nn.log_softmax(logits[i]), tokens[:, i + 1 :, None], axis=-1)[..., 0]
            for i in range(2)
        ]

    loss, mtp_loss, right = jax.jit(lambda w: training.token_losses(w, config, tokens))(weights)
    for got, want in zip((loss, mtp_loss), expected(weights), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert right.shape == (2, 15)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_weight_gets_a_gradient_those_of_the_draft_head_too(gradients, dtype):
    for name, gradient in gradients[dtype].items():
        assert gradient.dtype == jnp.float32 and np.all(np.isfinite(gradient)), name
        assert np.any(gradient), name
    assert any(name.startswith("mtp.") for name in gradients[dtype])


def test_gradients_in_bfloat16_are_close_to_those_in_float32(gradients):
    exact, rounded = gradients["float32"], gradients["bfloat16"]
    for name in exact:
        error = np.linalg.norm(exact[name] - rounded[name]) / np.linalg.norm(exact[name])
        assert error < 0.1, (name, error)


def test_only_matrices_decay():
    weights = {"a": jnp.ones((2, 2)), "A_log": jnp.ones(2), "conv": jnp.ones((2, 1, 4))}
    optimizer = training.make_optimizer(0.1)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = optimizer.update(zeros, optimizer.init(weights), weights)
    assert float(updates["a"][0, 0]) == pytest.approx(0.1)
    assert not np.any(updates["A_log"]) and not np.any(updates["conv"])


def test_the_schedule_warms_up_and_ends_at_zero():
    rate = training.learning_rate
    assert rate(1.0, 0, 10, 0.0) == pytest.approx(0.1)
    assert rate(1.0, 50, 10, 0.5) == pytest.approx(0.5)
    assert rate(1.0, 99, 10, 1.5) == pytest.approx(0.0)


def test_a_stream_counts_every_target_once():
    rows = training.stream_rows(np.arange(100, dtype=np.uint16), 3, 32)
    assert rows.tokens.shape == (2, 3, 33)
    assert rows.tokens[..., 1:][rows.counted].tolist() == list(range(1, 100))


def test_generation_is_greedy_and_stops():
    config = CONFIG.replace(dtype="float32")
    weights = training.initial_weights(config, 3)
    prompts = [[1, 2, 3], [7, 8, 9, 10, 11]]
    outputs = training.generate(weights, config, prompts, 5, [])
    params = training.model_params(weights, config)
    logits = jax.jit(lambda tokens: forward(params, config, tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = list(prompt)
        for _ in range(5):  # the model is causal: what stands after a position doesn't matter to it
            padded = np.zeros((1, 64), np.int32)
            padded[0, : len(ids)] = ids
            ids.append(int(np.argmax(logits(padded)[0, len(ids) - 1])))
        assert output == ids[len(prompt) :]
    stop = outputs[0][2]
    stopped = training.generate(weights, config, prompts, 5, [stop])[0]
    assert stopped == outputs[0][: outputs[0].index(stop)]


def test_final_answer():
    assert training_output.final_answer("2 + 2 = 4\n#### 4") == "4"
    assert training_output.final_answer("2 + 2 = 4") == ""


def test_a_text_file_is_cut_into_training_and_held_out(tokenizer, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    args = train_tiny.parse_args(["--text", str(path), "--length", "32", "--batch", "2"])
    data = train_tiny.load_data(args, tokenizer)
    total = len(tokenizer.encode(TEXT))
    held = data.heldout["text"]
    assert data.train.size + int(held.counted.sum()) + 1 == total
    args.length = total
    with pytest.raises(SystemExit, match="more text"):
        train_tiny.load_data(args, tokenizer)
    assert math.isfinite(training.evaluate(training.initial_weights(CONFIG, 0), CONFIG, held)["loss"])


def test_the_loss_curve(whole):
    pytest.importorskip("matplotlib")
    out = whole[0]
    train_tiny.main(["--out", str(out), "--plot"])
    assert (out / "loss.png").stat().st_size > 1000
