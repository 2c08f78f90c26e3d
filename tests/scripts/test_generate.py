"""The short generation script: it is short, and its tokens are those of `LanguageModel.generate`."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import gdnjax
from gdnjax.tokenizer import Tokenizer

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "generate.py"
PROMPTS = ["It was a fine morning", "HAMLET"]
COUNT = 24

# What packed weights can move a logit by: the products are the same, their sums may run in another order.
NEAR_TIE = 1e-3


def test_it_is_short() -> None:
    assert len(SCRIPT.read_text().splitlines()) < 60


def test_tokens_of_two_unequal_prompts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    decoded: list[list[int]] = []
    decode = Tokenizer.decode

    def spy(self: Tokenizer, ids: Iterable[int], **options: bool) -> str:
        decoded.append(list(ids))
        return decode(self, ids, **options)

    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *PROMPTS, "--tokens", str(COUNT)])
    with monkeypatch.context() as patch:
        patch.setattr(Tokenizer, "decode", spy)
        runpy.run_path(str(SCRIPT), run_name="__main__")
    printed = capsys.readouterr().out

    lm = gdnjax.load("tiny")
    assert lm.tokenizer is not None
    prompts = [lm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert len(prompts[0]) != len(prompts[1])
    assert printed == "".join(f"{p}{lm.tokenizer.decode(ids)}\n" for p, ids in zip(PROMPTS, decoded, strict=True))

    results = lm.generate(prompts, COUNT, temperature=0, stop_ids=())
    for prompt, ids, result in zip(prompts, decoded, results, strict=True):
        assert len(ids) == len(result.tokens) == COUNT
        for place, (ours, theirs) in enumerate(zip(ids, result.tokens, strict=True)):
            if ours != theirs:
                logits = np.asarray(lm.logits([prompt + ids[:place]])[0, -1])
                assert abs(logits[ours] - logits[theirs]) < NEAR_TIE
                break  # what follows continues another text
