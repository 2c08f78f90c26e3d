"""Arguments that say which model, on which platform, with which limits; shared by the commands."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from gdnjax.cli import UsageError

if TYPE_CHECKING:
    from gdnjax.config import Config
    from gdnjax.lm import LanguageModel

DEFAULT_MODEL = "tiny"


def add_platform(parser: argparse.ArgumentParser) -> None:
    """`--platform`: the platform that is asked for."""
    parser.add_argument(
        "--platform", choices=("rocm", "cuda", "cpu"), help="run there or fail; without it, what JAX finds"
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    """`--model`, `--config`, `--dtype`, `--platform` and the limits."""
    parser.add_argument(
        "--model", metavar="NAME|DIR", help=f"weights: a shipped model or a directory ({DEFAULT_MODEL})"
    )
    parser.add_argument(
        "--config", metavar="NAME|FILE.yaml", help="a shape from configs/ or a file, with random weights"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="of weights and activations")
    parser.add_argument("--max-length", type=int, metavar="N", help="longest request, prompt and new tokens")
    parser.add_argument("--state-layout", choices=("in_place", "twin"), help="recurrent slots a request")
    parser.add_argument("--language-model-only", action="store_true", help="leave a vision tower unread")
    add_platform(parser)


def add_draft_head(parser: argparse.ArgumentParser) -> None:
    """`--draft-head`: a config key, for commands that draft."""
    parser.add_argument(
        "--draft-head",
        choices=("weights", "fp8"),
        help="of drafts mtp: chosen by the model's head, or by a copy of it with half the bytes (weights)",
    )


def check_drafts(args: argparse.Namespace) -> None:
    """Refuses what says how to draft where nobody drafts so.

    Raises:
        UsageError: names the option, its value and what is missing.
    """
    if args.drafts is not None and not args.speculate:
        raise UsageError(f"--drafts {args.drafts} says where drafts come from; give their number with --speculate K")
    if args.draft_head is not None and (not args.speculate or args.drafts == "ngram"):
        what = "give their number with --speculate K" if not args.speculate else "leave --drafts ngram out"
        raise UsageError(f"--draft-head {args.draft_head} says what drafts of the draft head are chosen by; {what}")


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The config keys that the arguments set."""
    names = ("max_length", "state_layout", "draft_head")
    values = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    return {**values, "language_model_only": True} if getattr(args, "language_model_only", False) else values


def require_platform(args: argparse.Namespace) -> None:
    """Makes JAX use the platform that was asked for. A missing GPU is an error, never a CPU run.

    Raises:
        RuntimeError: the platform is not there.
    """
    from gdnjax.platform import current_platform

    wanted = args.platform
    if wanted is None:
        current_platform()
        return
    # JAX reads this when it first looks for devices; nothing has asked it before this point.
    os.environ["JAX_PLATFORMS"] = wanted
    import jax

    jax.config.update("jax_platforms", wanted)
    try:
        found = current_platform()
    except RuntimeError as error:
        raise RuntimeError(f"--platform {wanted}: no such device here ({error}); run `gdnjax doctor`") from None
    if found != wanted:
        raise RuntimeError(f"--platform {wanted}: JAX's device is {found}; run `gdnjax doctor`")


def load_model(args: argparse.Namespace, seed: int = 0) -> LanguageModel:
    """The model that the arguments name."""
    from gdnjax.loading import load, random_model

    if args.model is not None and args.config is not None:
        raise UsageError(f"--model {args.model} and --config {args.config}: give weights or a shape, not both")
    require_platform(args)
    if args.config is not None:
        return random_model(args.config, seed, args.dtype, **overrides(args))
    return load(args.model or DEFAULT_MODEL, args.dtype, **overrides(args))


def read_config(model: str | None, config: str | None) -> Config:
    """The config of a model or a shape, without its weights."""
    from gdnjax.config import from_directory, from_preset
    from gdnjax.loading import find_model

    if config is not None:
        return from_preset(config)
    return from_directory(find_model(model or DEFAULT_MODEL), language_model_only=True)
