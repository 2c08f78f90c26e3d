"""The tables of accepted drafts: from figures, into the card, and by a short run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from gdnjax.generation import GenerationResult

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import acceptance
from acceptance import Figures, Run


def test_a_table() -> None:
    found = {
        Run("x", "float32", None, 0): Figures(90, 0, 0, 300.4),
        Run("x", "float32", "mtp", 2): Figures(60, 120, 30, 250.0),
        Run("y", "float32", None, 0): Figures(1, 0, 0, 1.0),
    }
    assert acceptance.table(found, "x").splitlines() == [
        "| x | float32 state: drafts accepted | tokens a step | tokens/s |",
        "|---|---|---|---|",
        "| plain |  | 1.00 | 300 |",
        "| `mtp`, k = 2 | 25 % | 1.50 | 250 |",
    ]


def test_the_card_has_a_place_for_them() -> None:
    card = (ROOT / "checkpoints" / "tiny" / "README.md").read_text(encoding="utf-8")
    once = acceptance.replaced(card, "figures")
    assert "\n\nfigures\n\n" in once and acceptance.replaced(once, "figures") == once
    assert once.partition(acceptance.BEGIN)[0] == card.partition(acceptance.BEGIN)[0]
    with pytest.raises(SystemExit, match="the card has no place for the tables"):
        acceptance.replaced("# tiny", "figures")


def test_differences_are_shown_with_their_gap(capsys: pytest.CaptureFixture[str]) -> None:
    def result(*tokens: int) -> GenerationResult:
        return GenerationResult(list(tokens), None, "length", [-float(t) for t in tokens], 1)

    acceptance.compare("here", [result(1, 2), result(1, 2)], [result(1, 2), result(1, 4)])
    assert capsys.readouterr().out == "here: prompt 1 differs at token 1, gap 2\n"


@pytest.mark.slow
def test_a_short_run(capsys: pytest.CaptureFixture[str]) -> None:
    acceptance.main("--counts 1 --sources mtp ngram --state-dtypes float32 --prompts 2 --tokens 8".split())
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("| `mtp`, k = 1 | ") for line in lines) == len(acceptance.TEXTS)
    assert lines[-1].startswith("2 prompts a table, 8 new tokens at most; ")
