"""SQuAD 1.1: valid files, messages for invalid ones, and the scores of answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from squad import Answer, Question, SquadFormatError, exact_match, f1, load_squad, normalise

SMALL = Path(__file__).resolve().parents[2] / "examples" / "data" / "squad_small.json"


def document() -> dict[str, Any]:
    answer = {"text": "in the barn", "answer_start": 14}
    question = {"id": "q1", "question": "Where is the owl?", "answers": [answer]}
    paragraph = {"context": "The owl lives in the barn.", "qas": [question]}
    return {"version": "1.1", "data": [{"title": "Owls", "paragraphs": [paragraph]}]}


def load(tmp_path: Path, content: Any) -> list[Question]:
    path = tmp_path / "owls.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return load_squad(path)


def test_reads_a_question_with_its_context(tmp_path: Path) -> None:
    assert load(tmp_path, document()) == [
        Question(
            id="q1",
            text="Where is the owl?",
            context="The owl lives in the barn.",
            answers=(Answer(text="in the barn", start=14),),
        )
    ]


def test_small_file_has_every_answer_where_it_says() -> None:
    questions = load_squad(SMALL)
    assert 30 <= len(questions) <= 60
    assert len({question.context for question in questions}) >= 12
    for question in questions:
        for answer in question.answers:
            assert question.context[answer.start :].startswith(answer.text)


def broken(*keys: str | int, value: Any) -> dict[str, Any]:
    """The document with the entry at `keys` replaced, or removed if `value` is ..."""
    whole = document()
    entry: Any = whole
    for key in keys[:-1]:
        entry = entry[key]
    if value is ...:
        del entry[keys[-1]]
    else:
        entry[keys[-1]] = value
    return whole


PARAGRAPH = ("data", 0, "paragraphs", 0)
QUESTION = (*PARAGRAPH, "qas", 0)
ANSWER = (*QUESTION, "answers", 0)
IN_QUESTION = r"owls\.json: article 0 \('Owls'\), paragraph 0, question 0 \(id 'q1'\): "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"owls\.json: no JSON in UTF-8"),
        ("[]", r"owls\.json: expected an object with 'data', got list"),
        ({"data": []}, r"owls\.json: holds no question"),
        (broken("data", value=...), r"owls\.json: 'data' is missing"),
        (broken("data", 0, "title", value=7), r"article 0: 'title' must be of type str, got int"),
        (
            broken(*PARAGRAPH, "context", value=...),
            r"article 0 \('Owls'\), paragraph 0: 'context' is missing",
        ),
        (broken(*QUESTION, "question", value=" "), IN_QUESTION + "the question is empty"),
        (broken(*QUESTION, "answers", value=[]), IN_QUESTION + r"has no answer. SQuAD 2.0 has"),
        (broken(*ANSWER, "text", value=""), IN_QUESTION + "an answer is empty"),
        (
            broken(*ANSWER, "answer_start", value="14"),
            IN_QUESTION + "'answer_start' must be of type int, got str",
        ),
        (
            broken(*ANSWER, "answer_start", value=True),
            IN_QUESTION + "'answer_start' must be of type int, got bool",
        ),
        (
            broken(*ANSWER, "answer_start", value=15),
            IN_QUESTION + "the answer 'in the barn' is not at 15; the context has 'n the barn.' there",
        ),
        (broken(*ANSWER, "answer_start", value=-11), IN_QUESTION + "the answer 'in the barn' is not at -11"),
        (
            broken(*PARAGRAPH, "qas", value=document()["data"][0]["paragraphs"][0]["qas"] * 2),
            "has this id, too",
        ),
    ],
)
def test_refuses_what_is_no_squad_and_says_where(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(SquadFormatError, match=message):
        load(tmp_path, content)


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Owl!", "owl"),
        ("a b, an c; the d", "b c d"),
        ("Theatre", "theatre"),
        ("it's", "its"),
        ("the", ""),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert normalise(text) == normal


def question(*answers: str) -> Question:
    return Question(id="q", text="?", context="", answers=tuple(Answer(text=a, start=0) for a in answers))


@pytest.mark.parametrize(
    ("prediction", "answers", "exact", "overlap"),
    [
        ("The barn.", ["barn"], 1.0, 1.0),
        ("old barn", ["barn"], 0.0, 2 / 3),
        ("old barn", ["house", "an old barn"], 1.0, 1.0),
        ("old old barn", ["old barn"], 0.0, 0.8),  # a word counts as often as it occurs in both
        ("tree", ["barn"], 0.0, 0.0),
        ("", ["barn"], 0.0, 0.0),
    ],
)
def test_scores(prediction: str, answers: list[str], exact: float, overlap: float) -> None:
    assert exact_match(prediction, question(*answers)) == exact
    assert f1(prediction, question(*answers)) == pytest.approx(overlap)
