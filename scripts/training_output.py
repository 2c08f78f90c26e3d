"""What a training run leaves behind: a Hugging Face checkpoint, a report, a picture."""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import training
from safetensors.numpy import save_file

from gdnjax.config import Config
from gdnjax.tokenizer import Tokenizer

SAMPLE_PROMPTS = ("It was", "HAMLET.\n", "Of man’s first", "My dear Miss", "Chapter 1\n\n")


def config_json(config: Config, tokenizer: Tokenizer) -> dict[str, Any]:
    """The model's part of a config as Hugging Face writes it, flat."""
    copied = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
        head_dim linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim
        linear_conv_kernel_dim rms_norm_eps max_position_embeddings tie_word_embeddings mtp_num_hidden_layers
        initializer_range"""
    rope = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": config.partial_rotary_factor,
    }
    if config.mrope_section is not None:
        rope |= {"mrope_section": list(config.mrope_section), "mrope_interleaved": True}
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        **{key: getattr(config, key) for key in copied.split()},
        "layer_types": list(config.layer_types),
        "rope_parameters": rope,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "mamba_ssm_dtype": config.state_dtype,
        **_token_ids(tokenizer),
    }


def _token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    end = tokenizer.token_to_id("<|endoftext|>")
    ids = {"eos_token_id": stop_ids(tokenizer), "pad_token_id": end, "bos_token_id": end}
    return {key: value for key, value in ids.items() if value not in (None, [])}


def stop_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids that end a text, those of them that the tokenizer has."""
    ids = (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))
    return [i for i in ids if i is not None]


def write_model(out: Path, weights: training.Weights, task: training.Task) -> None:
    """A Hugging Face checkpoint: bfloat16, and float32 what is declared so."""
    tensors = jax.device_get(training.rounded(weights, task.config.replace(dtype="bfloat16")))
    temporary = out / "model.safetensors.part"  # a run that is killed here leaves the last good file
    save_file({name: np.ascontiguousarray(array) for name, array in tensors.items()}, temporary, {"format": "pt"})
    temporary.chmod(0o644)
    temporary.replace(out / "model.safetensors")
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.95}
    for name, content in (
        ("config.json", config_json(task.config, task.tokenizer)),
        ("generation_config.json", sampling | _token_ids(task.tokenizer)),
    ):
        (out / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if task.tokenizer_files is not None and (task.tokenizer_files / name).is_file():
            shutil.copyfile(task.tokenizer_files / name, out / name)


def make_report(
    args: argparse.Namespace, task: training.Task, weights: training.Weights, numbers: dict[str, Any]
) -> dict[str, Any]:
    """Judges the weights as they were written, rounded to bfloat16."""
    config, tokenizer, data = task.config.replace(dtype="bfloat16"), task.tokenizer, task.data
    tokens = numbers["steps"] * args.batch * args.length
    device = jax.devices()[0]
    report = {
        **numbers,
        "tokens": tokens,
        "epochs": round(tokens / data.train.size, 2),
        "parameters": sum(array.size for array in weights.values()),
        "device": f"{device.platform}: {device.device_kind}",
        "jax": jax.__version__,
        "arguments": {key: str(v) if isinstance(v, Path) else v for key, v in vars(args).items()},
        "heldout": {},
    }
    for name, rows in data.heldout.items():
        result = training.evaluate(weights, config, rows)
        size = counted_bytes(tokenizer, rows)
        nats = result["loss"] * result["tokens"]
        result |= {"bytes": size, "byte_perplexity": math.exp(nats / size), "bits_per_byte": nats / size / math.log(2)}
        report["heldout"][name] = result
    stops = stop_ids(tokenizer)
    problems = data.problems[: args.problems]
    if problems:
        began = time.monotonic()
        answers = training.generate(weights, config, [p.prompt_ids for p in problems], 300, stops)
        texts = [tokenizer.decode(ids) for ids in answers]
        right = [final_answer(text) == p.answer_text for text, p in zip(texts, problems, strict=True)]
        report["arithmetic"] = {
            "problems": len(problems),
            "solved": sum(right),
            "accuracy": sum(right) / len(problems),
            "seconds": round(time.monotonic() - began, 1),
            "examples": [
                {"prompt": tokenizer.decode(p.prompt_ids), "text": text, "answer": p.answer_text, "right": ok}
                for p, text, ok in list(zip(problems, texts, right, strict=True))[:4]
            ],
        }
    prompts = [tokenizer.encode(text) for text in SAMPLE_PROMPTS]
    samples = training.generate(weights, config, prompts, 200, stops, temperature=0.7, seed=args.seed)
    report["samples"] = [text + tokenizer.decode(ids) for text, ids in zip(SAMPLE_PROMPTS, samples, strict=True)]
    return report


def counted_bytes(tokenizer: Tokenizer, rows: training.Rows) -> int:
    """Bytes of text that the counted targets stand for."""
    return max(1, len(tokenizer.decode(rows.tokens[..., 1:][rows.counted]).encode("utf-8")))


def final_answer(text: str) -> str:
    """What stands after the last `####`, or nothing."""
    return text.rpartition("####")[2].strip() if "####" in text else ""


def plot(out: Path) -> None:
    """Draws `OUT/loss.png`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    figure, axes = plt.subplots(figsize=(7, 4.5))
    steps = [line["step"] for line in lines]
    axes.plot(steps, [line["loss"] for line in lines], label="training", linewidth=1)
    if "mtp_loss" in lines[0]:
        axes.plot(steps, [line["mtp_loss"] for line in lines], label="training, draft head", linewidth=1)
    judged = [line for line in lines if "heldout" in line]
    for name in judged[0]["heldout"] if judged else ():
        losses = [line["heldout"][name]["loss"] for line in judged]
        axes.plot([line["step"] for line in judged], losses, marker=".", label=f"held-out {name}")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(out / "loss.png", dpi=150)
