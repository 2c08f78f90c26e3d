"""What the documentation says can be done, is done: its Python, its commands, its links. Figures are not checked."""

from __future__ import annotations

import inspect
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from gdnjax.cli import build_parser, main
from gdnjax.lm import LanguageModel

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
CARDS = [ROOT / "checkpoints" / "tiny" / "README.md", ROOT / "tests" / "goldens" / "README.md"]
ALL = [*PAGES, *CARDS]


pytestmark = pytest.mark.usefixtures("quick_compilation")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(path: Path, language: str) -> list[tuple[int, str]]:
    """Fenced blocks of a language: the line that each starts at, and its text."""
    text = path.read_text(encoding="utf-8")
    assert len(re.findall(r"^```", text, re.MULTILINE)) % 2 == 0, f"{name(path)}: a fence is not closed"
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def console_commands(path: Path) -> list[tuple[int, list[str]]]:
    """The `$` lines of console blocks, split into words."""
    commands = []
    for start, block in blocks(path, "console"):
        for offset, line in enumerate(block.splitlines()):
            if line.startswith("$ "):
                assert not line.endswith("\\"), f"{name(path)}:{start + offset}: one command a line"
                commands.append((start + offset, shlex.split(line[2:], comments=True)))
    return commands


def prose(path: Path) -> str:
    """The page without its blocks, which may hold brackets of their own."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", [p for p in PAGES if blocks(p, "python")], ids=name)
def test_python_blocks_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__main__"}
    for start, block in blocks(path, "python"):
        # Blank lines in front, so that a traceback names the page's own line.
        exec(compile("\n" * (start - 1) + block, str(path), "exec"), namespace)


class Commands:
    """Which words of a page's commands stand for something that is not there."""

    def __init__(self) -> None:
        self._made_from_nothing: set[str] = set()

    def can_run(self, words: list[str]) -> bool:
        """False for a placeholder (`DIR`, `FILE.json`), an output of a run, a GPU, or what such a command made."""
        blocked = [
            word
            for word in words
            if re.fullmatch(r"[A-Z][A-Z_]+(\.\w+)?", word)
            or word.startswith("runs/")
            or word in ("rocm", "cuda")
            or word in self._made_from_nothing
        ]
        if blocked and words[1] == "convert":
            self._made_from_nothing.add(build_parser().parse_args(words[1:]).target)
        return not blocked


@pytest.mark.parametrize("path", [p for p in ALL if console_commands(p)], ids=name)
def test_commands(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    (targets,) = re.findall(r"^\.PHONY:(.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    known = Commands()
    for line, words in console_commands(path):
        where = f"{name(path)}:{line}: {shlex.join(words)}"
        match words:
            case ["gdnjax", *arguments]:
                try:
                    build_parser().parse_args(arguments)
                except SystemExit:
                    pytest.fail(f"{where}: {capsys.readouterr().err}")
                if known.can_run(words):
                    code = main(arguments)
                    captured = capsys.readouterr()
                    assert code == 0, f"{where}: {captured.out}{captured.err}"
                    assert captured.out or arguments[0] == "convert", f"{where} printed nothing"
            case ["make", *goals]:
                assert set(goals) <= set(targets.split()), f"{where}: the Makefile has no such target"
            case ["python", script, *_]:
                assert (ROOT / script).is_file(), f"{where}: no such script"
            case ["pip", "install", *arguments]:
                named = re.findall(r"\[([\w,-]+)\]", arguments[-1])
                assert set(",".join(named).split(",")) - {""} <= extras.keys(), f"{where}: no such extra"
            case _:
                pytest.fail(f"{where}: nothing here checks such a command")


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", ALL, ids=name)
def test_links_and_pictures_exist(path: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        assert place.exists(), f"{name(path)}: {target} is not there"
        assert place.is_relative_to(ROOT), f"{name(path)}: {target} is outside the repository"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(place), re.MULTILINE)
            assert anchor in map(slug, headings), f"{name(path)}: {file or name(path)} has no heading #{anchor}"


def test_every_page_is_within_reach_of_the_readme() -> None:
    text = prose(ROOT / "README.md")
    missing = [name(page) for page in ALL[1:] if f"({name(page)})" not in text]
    assert not missing, f"README.md does not link {', '.join(missing)}"


def test_every_generate_option_is_documented() -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    options = [o for o in inspect.signature(LanguageModel.generate).parameters if o not in ("self", "prompts")]
    assert [o for o in options if f"| `{o}` |" not in text] == []


def test_every_flag_of_generate_is_documented(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "docs" / "generation.md").read_text(encoding="utf-8")
    with pytest.raises(SystemExit):
        build_parser().parse_args(["generate", "--help"])
    flags = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out)) - {"--help"}
    assert [flag for flag in sorted(flags) if f"`{flag}" not in text] == []
