"""Windows: conversions between code points, tokens and windows lose no answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from squad import Answer, Question, load_squad
from squad_windows import CLS_ID, SEP_ID, Window, best_span, collate, cut_windows, train_tokenizer

SMALL = Path(__file__).resolve().parents[2] / "examples" / "data" / "squad_small.json"
QUESTIONS = load_squad(SMALL)
TOKENIZER = train_tokenizer(QUESTIONS, vocabulary=600)


def answer_in(window: Window) -> str:
    offset = window.begin - window.context_position
    return window.context.text_of(window.start + offset, window.stop + offset)


def test_tokenizer_is_the_same_every_time() -> None:
    again = train_tokenizer(list(reversed(QUESTIONS)), vocabulary=600)
    assert again.get_vocab() == TOKENIZER.get_vocab()
    assert TOKENIZER.get_vocab_size() <= 600


def test_one_window_where_the_context_fits() -> None:
    windows = cut_windows(QUESTIONS, TOKENIZER, max_length=512, stride=128)
    assert [window.question for window in windows] == list(range(len(QUESTIONS)))
    assert [answer_in(window) for window in windows] == [question.answers[0].text for question in QUESTIONS]


@pytest.mark.parametrize(("max_length", "stride"), [(64, 16), (64, 1000), (100, 7)])
def test_windows_cover_the_context_and_never_exceed_the_length(max_length: int, stride: int) -> None:
    windows = cut_windows(QUESTIONS, TOKENIZER, max_length=max_length, stride=stride)
    for index in range(len(QUESTIONS)):
        own = [window for window in windows if window.question == index]
        covered = {token for window in own for token in range(window.begin, window.end)}
        assert covered == set(range(len(own[0].context)))
        assert len({window.begin for window in own}) == len(own)
    assert max(len(window.input_ids()) for window in windows) <= max_length


def test_answer_is_in_a_window_or_points_at_cls() -> None:
    windows = cut_windows(QUESTIONS, TOKENIZER, max_length=64, stride=16)
    for window in windows:
        if window.start:
            assert answer_in(window) == QUESTIONS[window.question].answers[0].text
        else:
            assert window.stop == 0
            assert window.input_ids()[0] == CLS_ID
    found = {window.question for window in windows if window.start}
    assert found == set(range(len(QUESTIONS)))


def test_accents_and_wide_characters_keep_their_places() -> None:
    context = "Zoë's café — 𝄞 — sells crème brûlée at 5 €."
    answer = Answer(text="crème brûlée", start=context.index("crème"))
    question = Question(id="q", text="What does Zoë sell?", context=context, answers=(answer,))
    (window,) = cut_windows(
        [question], train_tokenizer([question], vocabulary=200), max_length=128, stride=64
    )
    assert answer_in(window) == "crème brûlée"


def test_answer_inside_a_word_gives_the_word() -> None:
    context = "A barnowl lives here."
    question = Question(id="q", text="Who?", context=context, answers=(Answer(text="owl", start=6),))
    (window,) = cut_windows([question], train_tokenizer([question], vocabulary=200), max_length=64, stride=8)
    assert "owl" in answer_in(window)


def test_too_short_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"memory-hierarchy-01.*--max-length"):
        cut_windows(QUESTIONS, TOKENIZER, max_length=8, stride=4)
    with pytest.raises(ValueError, match="stride of 0"):
        cut_windows(QUESTIONS, TOKENIZER, max_length=64, stride=0)


def test_collate_pads_and_marks_the_context() -> None:
    windows = cut_windows(QUESTIONS, TOKENIZER, max_length=64, stride=32)[:3]
    batch = collate(windows)
    for row, window in enumerate(windows):
        length = len(window.input_ids())
        assert batch["attention_mask"][row].sum() == length
        assert batch["token_type_ids"][row].sum() == window.end - window.begin + 1
        assert batch["input_ids"][row, length - 1] == SEP_ID
        assert batch["start_positions"][row] == window.start


def test_best_span_is_the_highest_sum_within_the_context() -> None:
    (window, *_) = cut_windows(QUESTIONS, TOKENIZER, max_length=512, stride=128)
    start, end = torch.zeros(512), torch.zeros(512)
    start[0] = end[0] = 100.0  # [CLS] is not an answer
    start[window.start], end[window.stop] = 2.0, 3.0
    start[window.stop + 1] = 2.5  # a span cannot end before its start
    assert best_span(window, start, end) == (5.0, QUESTIONS[0].answers[0].text)
