"""Trains the small model, or trains any checkpoint further on a text file.

    python scripts/train_tiny.py --minutes 12                         # the shipped model, on a GPU
    python scripts/train_tiny.py --init DIR --text FILE --steps 200   # fine-tuning
    python scripts/train_tiny.py --out runs/tiny --plot               # the loss curve of a run

The run ends annealed after --steps or --minutes, whichever comes first, and leaves in --out a Hugging Face checkpoint
of the weights with the lowest held-out loss, log.jsonl and report.json. --resume continues a stopped run; where the
schedule hangs on steps alone, the outcome is bit for bit that of a run that was never stopped.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import training
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from training import Data, Task
from training_output import make_report, plot, write_model

from gdnjax.config import from_preset
from gdnjax.resources import checkpoints_dir
from gdnjax.tokenizer import Tokenizer, load_tokenizer

HELDOUT_FRACTION = 0.05


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    if args.plot:
        plot(args.out)
        return
    start = time.monotonic()
    console = Console()
    run(args, load_task(args), start, console)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="optimizer steps (2000)")
    add("--minutes", type=float, help="wall-clock budget, all but the closing report (none)")
    add("--batch", type=int, default=64, help="sequences a step (64)")
    add("--length", type=int, default=512, help="tokens a sequence (512)")
    add("--lr", type=float, default=2e-3, help="peak learning rate (2e-3)")
    add("--warmup", type=int, default=100, help="steps of linear warm-up (100)")
    add("--weight-decay", type=float, default=1.0, help="of matrices (1.0)")
    add("--seed", type=int, default=0)
    add("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the computation (bfloat16)")
    add("--block", type=int, default=20, help="steps between two looks from the host (20)")
    add("--eval-every", type=int, default=100, help="steps between held-out losses (100)")
    add("--save-every", type=int, default=500, help="steps between checkpoints to resume from; 0: none (500)")
    add("--problems", type=int, default=200, help="held-out problems to solve at the end (200)")
    add("--out", type=Path, default=Path("runs/tiny"))
    add("--resume", action="store_true", help="continue from the last checkpoint in --out")
    add("--init", metavar="DIR", help="start from this checkpoint (or shipped name) instead of random weights")
    add("--text", type=Path, metavar="FILE", help="train on this UTF-8 text instead of data/")
    add("--plot", action="store_true", help="only draw OUT/loss.png from OUT/log.jsonl")
    args = parser.parse_args(argv)
    for name in ("steps", "batch", "length", "block", "eval_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} takes an integer >= 1")
    # One compiled call has one number of steps.
    for name in ("steps", "eval_every", "save_every"):
        setattr(args, name, -(-getattr(args, name) // args.block) * args.block)
    return args


def load_task(args: argparse.Namespace) -> Task:
    if args.init is None:
        config = from_preset("tiny")
        weights = training.initial_weights(config, args.seed)
        files = checkpoints_dir() / "tiny"
        tokenizer = load_tokenizer(files, model_vocab_size=config.vocab_size)
    else:
        from gdnjax.loading import find_model, load

        lm = load(args.init, dtype="float32")
        config, tokenizer, files = lm.config, lm.tokenizer, find_model(args.init)
        weights = {k: jnp.array(w, jnp.float32) for k, w in training.tensor_names(lm.params).items()}
    if tokenizer is None:
        raise SystemExit(f"{files}: no tokenizer.json there")
    config = config.replace(dtype=args.dtype)
    return Task(config, weights, tokenizer, files, load_data(args, tokenizer))


def load_data(args: argparse.Namespace, tokenizer: Tokenizer) -> Data:
    if args.text is None:
        from tiny_data import load_tiny_data

        data = load_tiny_data(tokenizer)
        problems = data["heldout_arithmetic"]
        heldout = {
            "literature": training.stream_rows(data["heldout_literature"], args.batch, args.length),
            "arithmetic": training.problem_rows(problems, args.batch, args.length),
        }
        return Data(data["train"], heldout, problems)
    ids = tokenizer.encode(args.text.read_text(encoding="utf-8"))
    stream = np.array(ids, np.int32 if tokenizer.vocab_size > 2**16 else np.uint16)
    cut = stream.size - max(2, int(stream.size * HELDOUT_FRACTION))
    if cut <= args.length:
        raise SystemExit(f"{args.text}: {stream.size} tokens; --length {args.length} takes more text, or lower it")
    return Data(stream[:cut], {"text": training.stream_rows(stream[cut:], args.batch, args.length)}, [])


def run(args: argparse.Namespace, task: Task, start: float, console: Console) -> dict[str, Any]:
    """Trains and writes everything; returns the report."""
    config, data = task.config, task.data
    args.out.mkdir(parents=True, exist_ok=True)
    if args.eval_every > args.steps:
        args.eval_every = args.steps
    state = training.initial_state(task.weights, args.weight_decay)
    # best: the weights of the lowest held-out loss so far. past: seconds that earlier parts of a resumed run took.
    best = jax.tree.map(jnp.copy, state.weights)
    best_loss, best_step, past = math.inf, 0, 0.0
    manager = checkpoint_manager(args) if args.save_every or args.resume else None
    log = args.out / "log.jsonl"
    if args.resume:
        saved = restore(manager, state, best)
        state, best = training.State(*saved["state"]), saved["best"]
        best_loss, best_step, past = (float(x) for x in saved["numbers"])
    keep_lines(log, int(state.step))

    fixed = {key: getattr(args, key) for key in ("weight_decay", "batch", "length", "seed")}
    stream = jnp.asarray(data.train)
    step, recent, held = int(state.step), [], {}
    block_tokens = args.block * args.batch * args.length
    columns = ("[bold]step {task.completed:.0f}/{task.total:.0f}", "{task.fields[shown]}")
    with Progress(
        TextColumn(columns[0]), BarColumn(), TextColumn(columns[1]), TimeElapsedColumn(), console=console
    ) as bar:
        shown = bar.add_task("train", total=args.steps, completed=step, shown="compiling")
        elapsed = past + time.monotonic() - start
        while step < args.steps and not (args.minutes and elapsed >= 60 * args.minutes):
            spent = elapsed / (60 * args.minutes) if args.minutes else 0.0
            rates = [
                training.learning_rate(args.lr, i, args.warmup, max(i / args.steps, spent))
                for i in range(step, step + args.block)
            ]
            state, metrics = training.train_block(state, stream, jnp.array(rates, jnp.float32), config=config, **fixed)
            metrics = {name: float(np.mean(value)) for name, value in jax.device_get(metrics).items()}
            step += args.block
            if not all(map(math.isfinite, metrics.values())):
                raise SystemExit(f"step {step}: {metrics}; training diverged, lower --lr")
            before, elapsed = elapsed, past + time.monotonic() - start
            speed = block_tokens / (elapsed - before)
            recent.append(metrics["loss"])
            line = {"step": step, "seconds": round(elapsed, 2), "lr": rates[-1], "tokens_per_second": round(speed)}
            line |= metrics
            over = step >= args.steps or (args.minutes and elapsed >= 60 * args.minutes)
            if step % args.eval_every == 0 or over:
                held = {name: training.evaluate(state.weights, config, rows) for name, rows in data.heldout.items()}
                loss = sum(result["loss"] for result in held.values()) / len(held)
                if loss < best_loss:
                    best, best_loss, best_step = jax.tree.map(jnp.copy, state.weights), loss, step
                    write_model(args.out, best, task)
                line["heldout"] = held
                texts = [f"{name} {result['loss']:.3f}" for name, result in held.items()]
                console.print(
                    f"step {step}: train {np.mean(recent):.3f}, held out {', '.join(texts)}, {speed:,.0f} tokens/s"
                )
                recent = []
            with log.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            mtp = f" mtp {metrics['mtp_loss']:.3f}" if "mtp_loss" in metrics else ""
            text = f"loss {metrics['loss']:.3f}{mtp} lr {rates[-1]:.1e} {speed:,.0f} tokens/s"
            bar.update(shown, completed=step, shown=text)
            if args.save_every and (step % args.save_every == 0 or over):
                save(manager, state, best, [best_loss, best_step, elapsed])
    if manager is not None:
        manager.wait_until_finished()
        manager.close()
    write_model(args.out, best, task)
    report = make_report(args, task, best, dict(steps=step, best_step=int(best_step), seconds=round(elapsed, 1)))
    (args.out / "report.json").write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print_json(json.dumps({key: value for key, value in report.items() if key != "samples"}))
    return report


def checkpoint_manager(args: argparse.Namespace) -> Any:
    import orbax.checkpoint as ocp

    folder = (args.out / "checkpoints").resolve()
    if not args.resume and folder.exists():
        shutil.rmtree(folder)
    return ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2, create=True))


def save(manager: Any, state: training.State, best: training.Weights, numbers: list[float]) -> None:
    import orbax.checkpoint as ocp

    leaves = _numbered(jax.tree.leaves(tuple(state)))
    saved = {"state": leaves, "best": best, "numbers": np.array(numbers, np.float64)}
    manager.save(int(state.step), args=ocp.args.StandardSave(saved))
    manager.wait_until_finished()  # the next block reuses these buffers


def restore(manager: Any, state: training.State, best: training.Weights) -> dict[str, Any]:
    import orbax.checkpoint as ocp

    if manager.latest_step() is None:
        raise SystemExit(f"--resume: no checkpoint in {manager.directory}")
    leaves, structure = jax.tree.flatten(tuple(state))
    like = {"state": _numbered(leaves), "best": best, "numbers": np.zeros(3, np.float64)}
    saved = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
    # Through NumPy: restored arrays are bound to their device, for which the step would be compiled anew.
    saved = jax.tree.map(lambda x: jnp.array(np.asarray(x)) if isinstance(x, jax.Array) else x, saved)
    saved["state"] = jax.tree.unflatten(structure, [saved["state"][key] for key in _numbered(leaves)])
    return saved


def _numbered(leaves: list[Any]) -> dict[str, Any]:
    return {f"{index:05d}": leaf for index, leaf in enumerate(leaves)}


def keep_lines(log: Path, step: int) -> None:
    """Drops what a stopped run logged after the checkpoint that its resumption starts from."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
    log.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["step"] <= step), encoding="utf-8")


if __name__ == "__main__":
    main()
