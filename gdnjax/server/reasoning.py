"""Tells what a model thinks from what it answers, in text that comes in pieces."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def held_back(text: str, tag: str) -> int:
    """Characters at the end of `text` that may turn out to be a part of `tag` or the space in front of it."""
    size = next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
    return len(text) - len(text[: len(text) - size].rstrip())


class ReasoningSplitter:
    """Splits a text at the end of its think block.

    A chat template may have opened the block already: then the text starts inside it, with or without a `<think>` of
    its own. Where none was opened, a text that starts with `<think>` opens one, and any other is all answer. Space
    around the block's ends belongs to neither part. How the text is cut into pieces does not matter.
    """

    def __init__(self, opened: bool):
        self._opened = opened
        self._state = "start"
        self._held = ""

    def push(self, text: str) -> tuple[str, str]:
        """More text: what it adds to the reasoning, and to the answer."""
        self._held += text
        reasoning = ""
        if self._state == "start":
            begun = self._held.lstrip()
            if OPEN.startswith(begun) and begun != OPEN:
                return "", ""
            if begun.startswith(OPEN):
                self._state, self._held = "opening", begun.removeprefix(OPEN)
            else:
                self._state = "opening" if self._opened else "answer"
        if self._state == "opening" and (begun := self._held.lstrip()):
            self._state, self._held = "thinking", begun
        if self._state == "thinking":
            thought, close, rest = self._held.partition(CLOSE)
            if close:
                reasoning, self._state, self._held = thought.rstrip(), "closing", rest
            else:
                held = held_back(thought, CLOSE)
                reasoning, self._held = thought[: len(thought) - held], thought[len(thought) - held :]
        if self._state == "closing" and (begun := self._held.lstrip()):
            self._state, self._held = "answer", begun
        if self._state != "answer":
            return reasoning, ""
        answer, self._held = self._held, ""
        return reasoning, answer

    def finish(self) -> tuple[str, str]:
        """What was held back."""
        rest, self._held = self._held, ""
        if self._state in ("opening", "closing"):
            return "", ""
        if self._state == "start" and self._opened:
            return rest.lstrip(), ""
        return (rest, "") if self._state == "thinking" else ("", rest)
