"""Documents: the commands that they show are valid, and the names that they mention exist."""

from __future__ import annotations

import argparse
import ast
import functools
import importlib.util
import pkgutil
import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coarse.cli.main import COMMANDS, build_parser
from coarse.settings import declarations

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path
    for path in ROOT.glob("**/*.md")
    if not {".venv", "build", "node_modules"} & set(path.relative_to(ROOT).parts)
)
IDS = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
SOURCES = ("coarse", "tests", "benchmarks", "experiments")
SUFFIXES = (".py", ".cpp", ".hpp", ".txt")
VARIABLE = re.compile(r"\bCOARSE_[A-Z_]*[A-Z]\b")
# Groups: the language of a block, and its text.
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=IDS)


@functools.cache
def parser() -> argparse.ArgumentParser:
    return build_parser(list(COMMANDS))


def blocks(document: Path, *languages: str) -> Iterator[str]:
    return (text for language, text in BLOCK.findall(document.read_text()) if language in languages)


def shown_commands(document: Path) -> Iterator[str]:
    """The lines of shell blocks."""
    for text in blocks(document, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                yield line.strip()


def mentioned(document: Path) -> list[str]:
    """Text between backquotes, outside of blocks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", document.read_text()))


def options_of(words: list[str]) -> set[str]:
    """The options of a command line's sub-command."""
    found, current = set(), parser()
    for word in ["", *words]:
        choices: Any = next((a.choices for a in current._actions if isinstance(a.choices, dict)), None)
        if word and (choices is None or word not in choices):
            break
        current = choices[word] if word else current
        found |= set(current._option_string_actions)
    return found


@each_document
def test_shown_commands_are_understood(document: Path) -> None:
    for line in shown_commands(document):
        words = shlex.split(line, comments=True)
        while "=" in words[0]:
            words.pop(0)
        if words[0] != "coarse":
            continue
        _, unknown = parser().parse_known_args(words[1:])  # SystemExit contains the reason
        assert not unknown, line


@each_document
def test_mentioned_options_exist(document: Path) -> None:
    for text in mentioned(document):
        if text.startswith("coarse "):
            words = text.split()[1:]
            options = {word.partition("=")[0] for word in words if word.startswith("--")}
            assert options <= options_of(words), text


@each_document
def test_files_in_commands_exist(document: Path) -> None:
    for text in [*shown_commands(document), *mentioned(document)]:
        for path in re.findall(r"\b(?:examples|experiments|benchmarks|tests|docker)/[\w/.-]+\.\w+", text):
            assert (ROOT / path).exists() or (document.parent / path).exists(), text
        for module in re.findall(r"python -m ((?:experiments|coarse|tests|benchmarks)[\w.]*)", text):
            assert importlib.util.find_spec(module), text
        for target in re.findall(r"^make ([a-z][a-z-]*)", text):
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), text


@each_document
def test_python_is_python(document: Path) -> None:
    for text in blocks(document, "python"):
        ast.parse(textwrap.dedent(text))  # blocks in lists are indented


@each_document
def test_names_of_the_packages_exist(document: Path) -> None:
    text = "\n".join([*blocks(document, "python", "diff"), *mentioned(document)])
    names = re.findall(r"\b(coarse\.(?:torch|checkpoint|accelerate|lightning|transformers)\b[\w.]*\w)", text)
    for package, imported in re.findall(r"from (coarse\.torch[\w.]*) import ([\w, ]+)", text):
        names += [f"{package}.{name.strip()}" for name in imported.split(",")]
    for name in names:
        pkgutil.resolve_name(name)


@each_document
def test_settings_exist(document: Path) -> None:
    assert set(VARIABLE.findall(document.read_text())) <= variables_read()


@functools.cache
def variables_read() -> set[str]:
    sources = [path for folder in SOURCES for path in (ROOT / folder).glob("**/*") if path.suffix in SUFFIXES]
    spelt = {name for path in [*sources, ROOT / "setup.py"] for name in VARIABLE.findall(path.read_text())}
    return spelt | {each.variable for each in declarations()}


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", document.read_text())):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (document.parent / path) if path else document
        assert linked.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert anchor in [
                re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings
            ]


def test_settings_are_documented_with_flag_and_default() -> None:
    rows = re.findall(
        r"^\| `(COARSE_\w+)` \| `(--[\w-]+)` \| (.*?) ?\|",
        (ROOT / "docs" / "settings.md").read_text(),
        re.MULTILINE,
    )
    declared = {each.variable: each for each in declarations() if each.name != "failpoints"}  # only for tests
    assert rows == [(name, declared[name].flag, declared[name].default_text) for name, _, _ in rows]
    assert {name for name, _, _ in rows} == set(declared)
    assert {flag for _, flag, _ in rows} <= options_of(["run"])
