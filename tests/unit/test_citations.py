"""Sections and figures of the paper, and commits, that texts name exist; topics are cited from where they are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from experiments.paper import FIGURES, PANELS, SECTIONS, is_citation  # noqa: E402

FOLDERS = ("coarse", "docs", "experiments", "benchmarks", "examples", "tests")
ENDINGS = {".md", ".py", ".hpp", ".cpp", ".cu", ".toml"}
LEFT_OUT = {"paper.py", Path(__file__).name, "test_expectation.py", "test_results.py", "test_resuming.py"}
"""The list itself, and tests that name figures which do not exist."""

_SECTION = re.compile(r"\b([IVX]+-[A-Z])\b|\b[Ss]ections? ([IVX]+)\b(?!-)")
_FIGURE = re.compile(r"\b(?:Fig|Figure)s?\.? (\d+)(?: ?\(([a-z])\)|([a-z])\b)?")
_COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b")

TOPICS = {
    "opy-on-write|copied on write|[Ss]napshot": {"IV-A"},
    "sync core": {"IV-A"},
    "blocked|blocks computation": {"V-E"},
    "images per GPU|largest batch|batch of 4": {"V-D"},
    "partition table": {"IV-B"},
    "eadlock": {"III-F"},
    "ual synchronisation": {"III-F"},
}
"""Sections of topics: a sentence that has the topic and cites sections cites one of these."""


@cache
def files():
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    return [*ROOT.glob("*.md"), *(path for path in found if path.name not in LEFT_OUT)]


def cited_sections(text):
    return [number or letter for number, letter in _SECTION.findall(text)]


def cited_figures(text):
    return [f"Fig {number}{one or other}" for number, one, other in _FIGURE.findall(text)]


def unknown_names(text):
    return [name for name in (*cited_sections(text), *cited_figures(text)) if not is_citation(name)]


def misplaced_topics(text):
    sentences = re.split(r"[.;:|](?:\s|$)|\n\s*\n", text)
    for sentence in sentences:
        cited = set(cited_sections(sentence))
        for topic, homes in TOPICS.items():
            if cited and re.search(topic, sentence) and not cited & homes:
                yield sentence


def test_sections_and_figures_that_texts_name_are_in_the_paper():
    wrong = {
        str(path.relative_to(ROOT)): names for path in files() if (names := unknown_names(path.read_text()))
    }
    assert not wrong


def test_topics_are_cited_from_their_sections():
    wrong = {
        str(path.relative_to(ROOT)): sentences
        for path in files()
        if (sentences := list(misplaced_topics(path.read_text())))
    }
    assert not wrong


@pytest.mark.parametrize(
    "text", ["as in III-G", "(section VIII)", "Fig 18", "Figure 16 (g)", "Fig 9a", "IV-D"]
)
def test_a_name_that_the_paper_does_not_have_is_found(text):
    assert unknown_names(text)


@pytest.mark.parametrize(
    "text", ["III-E and V-C", "section VI", "Fig 16e", "Figure 16 (e)", "Figure 8 shows", "Fig 5 to 7"]
)
def test_a_name_that_the_paper_has_is_none(text):
    assert unknown_names(text) == []
    assert cited_sections(text) or cited_figures(text)


def test_a_topic_from_another_section_is_found():
    assert list(misplaced_topics("Copy-on-write snapshots (paper, section III-D)"))
    assert list(misplaced_topics("trains ResNet-50 at 64 images per GPU (V-A, V-B)"))
    assert not list(misplaced_topics("Copy-on-write snapshots (paper, section IV-A). Storage (III-D)"))


def test_figures_have_topics_and_panels_have_figures():
    assert set(PANELS) <= set(FIGURES)
    assert [int(name.split()[1]) for name in FIGURES] == list(range(1, 18))
    assert all(section.split("-")[0] in SECTIONS for section in SECTIONS)


def git(*arguments, folder=ROOT):
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def is_in_history(commit, folder=ROOT):
    """Whether each clone has it. One that no branch has is only where it was made, until it is collected there."""
    return git("merge-base", "--is-ancestor", commit, "HEAD", folder=folder).returncode == 0


def test_commits_that_texts_and_results_name_are_in_the_history():
    if not (ROOT / ".git").exists() or git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the whole history of a git checkout")
    documents = [path for path in files() if path.suffix == ".md"]
    named = {commit: path for path in documents for commit in _COMMIT.findall(path.read_text())}
    for path in (ROOT / "experiments").glob("*/results/results.json"):
        named[json.loads(path.read_text())["commit"].removesuffix("-dirty")] = path
    assert named
    missing = {
        commit: str(path.relative_to(ROOT)) for commit, path in named.items() if not is_in_history(commit)
    }
    assert not missing


def test_a_commit_that_no_clone_has_is_found(tmp_path):
    def commit(text):
        person = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
        git(*person, "commit", "--allow-empty", "--message", text, folder=tmp_path)
        return git("rev-parse", "--short=7", "HEAD", folder=tmp_path).stdout.strip()

    git("init", folder=tmp_path)
    kept, dropped = commit("kept"), commit("dropped")
    git("reset", "--hard", kept, folder=tmp_path)
    assert git("cat-file", "-e", dropped, folder=tmp_path).returncode == 0
    assert [is_in_history(each, tmp_path) for each in (kept, dropped, "0" * 7)] == [True, False, False]
