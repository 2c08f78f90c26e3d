"""Which tensors of a Hugging Face checkpoint become which weights of the declaration.

Files write the text model's names as `model.` or `model.language_model.`; here they are `model.` always.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Literal

from gdnjax.config import Config
from gdnjax.weights.declaration import abstract_params, tensor_names
from gdnjax.weights.files import CheckpointError
from gdnjax.weights.safetensors_format import NUMPY, StoredTensor

NameStyle = Literal["flat", "language_model"]
PREFIXES: dict[NameStyle, str] = {"flat": "model.", "language_model": "model.language_model."}

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_COMPARE_BYTES = 2**24


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to read: stored tensors by declared name in the order of the files, and how the files name them."""

    tensors: dict[str, StoredTensor]
    name_style: NameStyle


def file_name(name: str, style: NameStyle) -> str:
    """The name that a file in this style has for a declared name.

    Raises:
        ValueError: an unknown style.
    """
    if style not in PREFIXES:
        raise ValueError(f"names = {style!r}; it takes {' or '.join(map(repr, PREFIXES))}")
    return PREFIXES[style] + name.removeprefix("model.") if name.startswith("model.") else name


def plan_tensors(stored: Mapping[str, StoredTensor], config: Config, source: pathlib.Path) -> Plan:
    """Matches the tensors of a checkpoint with the declaration, with nothing left over on either side.

    Args:
        stored: tensors by the name they have in the files.
        config: the config that declares the weights.
        source: the directory, for messages.

    Raises:
        CheckpointError: all that is wrong, one line a finding: unknown or missing tensors, other shapes or
            dtypes, tensors of parts that the config does not have, a tied model with a head of its own.
    """
    declared = tensor_names(abstract_params(config))
    found: dict[str, StoredTensor] = {}
    styles: dict[NameStyle, str] = {}
    unknown: list[str] = []
    draft_head: list[str] = []
    visual: list[str] = []
    head: StoredTensor | None = None
    for name, tensor in stored.items():
        if name.startswith("model.visual."):
            visual.append(name)
            continue
        style: NameStyle = "language_model" if name.startswith(PREFIXES["language_model"]) else "flat"
        canonical = "model." + name.removeprefix(PREFIXES[style]) if name.startswith("model.") else name
        if name.startswith("mtp.") and not config.mtp_num_hidden_layers:
            draft_head.append(name)
        elif name == HEAD and config.tie_word_embeddings:
            head = tensor
        elif canonical not in declared:
            unknown.append(name)
        else:
            found[canonical] = tensor
            if name.startswith("model."):
                styles.setdefault(style, name)

    problems = []
    if len(styles) > 1:
        problems.append(f"mixes two ways to name tensors ({' and '.join(map(repr, styles.values()))}); it takes one")
    if unknown:
        problems.append(f"unknown tensors (the config declares none of them): {_listed(unknown)}")
    if draft_head:
        problems.append(
            f"mtp_num_hidden_layers = 0, but it holds a draft head: {_listed(draft_head)}; "
            "set mtp_num_hidden_layers to 1 or remove the tensors"
        )
    if visual and not config.language_model_only:
        problems.append(
            f"vision is not supported, and it holds {_listed(visual)}; set language_model_only=True "
            "(--language-model-only) to leave them unread"
        )
    missing = [name for name in declared if name not in found]
    if missing:
        problems.append(f"missing tensors: {_listed(missing)}{_missing_hint(missing)}")
    for name, tensor in found.items():
        problems += _mismatch(name, tensor, tuple(declared[name].shape))
    if head is not None and EMBEDDING in found and not _same(head, found[EMBEDDING]):
        problems.append(
            f"tie_word_embeddings = True, but {HEAD!r} differs from {EMBEDDING!r}; set tie_word_embeddings to false "
            "in config.json if the model has a head of its own, or remove the tensor"
        )
    if problems:
        raise CheckpointError(f"{source}: " + "\n".join(problems))
    ordered = sorted(found.items(), key=lambda item: (item[1].path.name, item[1].offset))
    return Plan(dict(ordered), "language_model" if "language_model" in styles else "flat")


def _listed(names: list[str]) -> str:
    # repr: a name from a file may hold control characters
    return ", ".join(map(repr, sorted(names)))


def _missing_hint(missing: list[str]) -> str:
    if missing == [HEAD]:
        return "; the config says tie_word_embeddings = False, so the model needs a head of its own"
    if all(name.startswith("mtp.") for name in missing):
        return "; set mtp_num_hidden_layers to 0 to load the model without its draft head"
    return ""


def _mismatch(name: str, tensor: StoredTensor, shape: tuple[int, ...]) -> list[str]:
    problems = []
    if tensor.shape != shape:
        problems.append(
            f"{name!r} in {tensor.path.name} has shape {list(tensor.shape)}; the config declares {list(shape)}"
        )
    if tensor.dtype not in NUMPY:
        reason = " (float16 overflows in these models)" if tensor.dtype == "F16" else ""
        problems.append(
            f"{name!r} in {tensor.path.name} has dtype {tensor.dtype}{reason}; it takes {' or '.join(NUMPY)}: "
            "convert the checkpoint"
        )
    return problems


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with open(a.path, "rb") as left, open(b.path, "rb") as right:
        left.seek(a.offset)
        right.seek(b.offset)
        for start in range(0, a.nbytes, _COMPARE_BYTES):
            count = min(_COMPARE_BYTES, a.nbytes - start)
            if left.read(count) != right.read(count):
                return False
    return True
