"""Questions in the format of SQuAD 1.1: reading and checking a file, and scoring answers.

The format: https://rajpurkar.github.io/SQuAD-explorer. A file is a list of articles, an article has
paragraphs, a paragraph has a context and questions, and a question has one or more answers: spans of the
context, counted in code points.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class SquadFormatError(ValueError):
    """A file is not in SQuAD 1.1 format; the message names file, article, paragraph and question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A span of a context: `text` begins at code point `start`."""

    text: str
    start: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question about `context` with the answers of one or more readers; training uses the first one."""

    id: str
    text: str
    context: str
    answers: tuple[Answer, ...]


def load_squad(path: Path) -> list[Question]:
    """Reads all questions of a SQuAD 1.1 file, in the order of the file.

    Raises:
        SquadFormatError: If anything is missing, has a wrong type or is contradictory (an answer not at its
            stated position, two questions with one id), or if the file has no questions.
        OSError: If the file cannot be read.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SquadFormatError(f"{path}: no JSON in UTF-8: {error}") from None
    questions: dict[str, Question] = {}
    for question, where in _questions(document, str(path)):
        if question.id in questions:
            raise SquadFormatError(f"{where}: another question has this id, too")
        questions[question.id] = question
    if not questions:
        raise SquadFormatError(f"{path}: holds no question")
    return list(questions.values())


def _questions(document: Any, where: str) -> Iterator[tuple[Question, str]]:
    for number, article in enumerate(_field(document, "data", list, where)):
        in_article = f"{where}: article {number}"
        in_article += f" ({_field(article, 'title', str, in_article)!r})"
        for paragraph_number, paragraph in enumerate(_field(article, "paragraphs", list, in_article)):
            in_paragraph = f"{in_article}, paragraph {paragraph_number}"
            context = _field(paragraph, "context", str, in_paragraph)
            for question_number, entry in enumerate(_field(paragraph, "qas", list, in_paragraph)):
                yield _question(entry, context, f"{in_paragraph}, question {question_number}")


def _question(entry: Any, context: str, where: str) -> tuple[Question, str]:
    identifier = _field(entry, "id", str, where)
    where += f" (id {identifier!r})"
    text = _field(entry, "question", str, where)
    if not text.strip():
        raise SquadFormatError(f"{where}: the question is empty")
    answers = tuple(_answer(item, context, where) for item in _field(entry, "answers", list, where))
    if not answers:
        raise SquadFormatError(f"{where}: has no answer. SQuAD 2.0 has such questions, SQuAD 1.1 has none.")
    return Question(id=identifier, text=text, context=context, answers=answers), where


def _answer(entry: Any, context: str, where: str) -> Answer:
    text = _field(entry, "text", str, where)
    start = _field(entry, "answer_start", int, where)
    if not text.strip():
        raise SquadFormatError(f"{where}: an answer is empty")
    if start < 0 or context[start : start + len(text)] != text:
        found = context[max(start, 0) : max(start, 0) + len(text)]
        raise SquadFormatError(
            f"{where}: the answer {text!r} is not at {start}; the context has {found!r} there"
        )
    return Answer(text=text, start=start)


def _field(entry: Any, name: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict):
        raise SquadFormatError(f"{where}: expected an object with {name!r}, got {type(entry).__name__}")
    if name not in entry:
        raise SquadFormatError(f"{where}: {name!r} is missing")
    if not isinstance(entry[name], kind) or isinstance(entry[name], bool):
        got = type(entry[name]).__name__
        raise SquadFormatError(f"{where}: {name!r} must be of type {kind.__name__}, got {got}")
    return entry[name]


def normalise(text: str) -> str:
    """`text` in the form that SQuAD compares: lower case, no punctuation, no articles, single spaces."""
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, question: Question) -> float:
    """1.0 if the prediction equals one of the answers after `normalise`, else 0.0."""
    return float(any(normalise(prediction) == normalise(answer.text) for answer in question.answers))


def f1(prediction: str, question: Question) -> float:
    """Harmonic mean of precision and recall over words, for the best answer, in 0..1."""
    return max(_f1(normalise(prediction).split(), normalise(a.text).split()) for a in question.answers)


def _f1(predicted: list[str], expected: list[str]) -> float:
    common = sum((Counter(predicted) & Counter(expected)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(predicted), common / len(expected)
    return 2 * precision * recall / (precision + recall)
