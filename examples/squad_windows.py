"""Questions as tokens: a vocabulary made from the data, windows over long contexts, and spans back to text.

A window is an input of BERT: [CLS] question [SEP] part of the context [SEP]. A context that does not fit is split
into several windows, whose starts are `stride` tokens apart.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from squad import Answer, Question

PAD, UNKNOWN, CLS, SEP = "[PAD]", "[UNK]", "[CLS]", "[SEP]"
SPECIAL_TOKENS = (PAD, UNKNOWN, CLS, SEP)
PAD_ID, CLS_ID, SEP_ID = 0, 2, 3
LONGEST_QUESTION = 64
LONGEST_ANSWER = 30


def train_tokenizer(questions: Sequence[Question], *, vocabulary: int) -> Tokenizer:
    """A lower-case WordPiece tokenizer of at most `vocabulary` pieces, trained on contexts and questions.

    The same questions always give the same tokenizer. The trainer alone does not guarantee that: it numbers the
    letters in the order of a hash table and breaks ties by number. Therefore the letters are numbered first.
    """
    texts = sorted({question.context for question in questions} | {question.text for question in questions})
    draft = _tokenizer(models.WordPiece(unk_token=UNKNOWN))
    words = {word for text in texts for word in draft.normalizer.normalize_str(text).split()}
    letters = sorted(set("".join(words)))
    first = [*SPECIAL_TOKENS, *letters, *(f"##{letter}" for letter in letters)]
    draft.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=first, show_progress=False)
    )
    return _tokenizer(models.WordPiece(draft.get_vocab(), unk_token=UNKNOWN))


def _tokenizer(model: models.WordPiece) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


class ContextTokens:
    """The tokens of a context and the code points of each token. Immutable, shared by windows."""

    def __init__(self, text: str, tokenizer: Tokenizer) -> None:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        self.text = text
        self.ids = array("i", encoding.ids)
        self._starts = array("i", (start for start, _ in encoding.offsets))
        self._ends = array("i", (end for _, end in encoding.offsets))

    def __len__(self) -> int:
        return len(self.ids)

    def span_of(self, answer: Answer) -> tuple[int, int]:
        """First and last token that overlap the answer's text."""
        first = bisect_right(self._ends, answer.start)
        last = bisect_left(self._starts, answer.start + len(answer.text)) - 1
        return first, last

    def text_of(self, first: int, last: int) -> str:
        """The text from token `first` to token `last`, both included."""
        return self.text[self._starts[first] : self._ends[last]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One question and the tokens [begin, end) of its context.

    `start` and `stop` are the positions of the answer's first and last token in the window. Both are 0, the
    position of [CLS], if the window does not contain the answer.
    """

    question: int
    question_ids: tuple[int, ...]
    context: ContextTokens
    begin: int
    end: int
    start: int
    stop: int

    @property
    def context_position(self) -> int:
        """Position of the context's first token in the window, after [CLS], question and [SEP]."""
        return len(self.question_ids) + 2

    def input_ids(self) -> list[int]:
        return [CLS_ID, *self.question_ids, SEP_ID, *self.context.ids[self.begin : self.end], SEP_ID]


def cut_windows(
    questions: Sequence[Question], tokenizer: Tokenizer, *, max_length: int, stride: int
) -> list[Window]:
    """All windows of all questions, in order; at least one for each question.

    Raises:
        ValueError: If `stride` < 1, or `max_length` leaves no room for the context after a question.
    """
    if stride < 1:
        raise ValueError(f"a stride of {stride} tokens never ends; choose at least 1")
    contexts: dict[str, ContextTokens] = {}
    windows = []
    for index, question in enumerate(questions):
        if question.context not in contexts:
            contexts[question.context] = ContextTokens(question.context, tokenizer)
        ids = tokenizer.encode(question.text, add_special_tokens=False).ids[:LONGEST_QUESTION]
        room = max_length - len(ids) - 3
        if room < 1:
            raise ValueError(
                f"{max_length} tokens hold question {question.id!r} ({len(ids)} tokens) and nothing of its "
                "context; choose a larger --max-length"
            )
        windows += _windows_of(question, index, tuple(ids), contexts[question.context], room, stride)
    return windows


def _windows_of(
    question: Question, index: int, ids: tuple[int, ...], context: ContextTokens, room: int, stride: int
) -> list[Window]:
    first, last = context.span_of(question.answers[0])
    last_begin = max(0, len(context) - room)
    begins = [*range(0, last_begin, min(stride, room)), last_begin]
    windows = []
    for begin in begins:
        end = min(begin + room, len(context))
        offset = len(ids) + 2 - begin
        inside = begin <= first <= last < end
        windows.append(
            Window(
                question=index,
                question_ids=ids,
                context=context,
                begin=begin,
                end=end,
                start=first + offset if inside else 0,
                stop=last + offset if inside else 0,
            )
        )
    return windows


def collate(windows: Sequence[Window]) -> dict[str, torch.Tensor]:
    """The arguments of BertForQuestionAnswering for a batch of windows, padded to the longest."""
    rows = [window.input_ids() for window in windows]
    shape = (len(rows), max(map(len, rows)))
    input_ids = torch.full(shape, PAD_ID)
    token_type_ids = torch.zeros(shape, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    for row, (ids, window) in enumerate(zip(rows, windows, strict=True)):
        input_ids[row, : len(ids)] = torch.tensor(ids)
        token_type_ids[row, window.context_position : len(ids)] = 1
        attention_mask[row, : len(ids)] = 1
    return {
        "input_ids": input_ids,
        "token_type_ids": token_type_ids,
        "attention_mask": attention_mask,
        "start_positions": torch.tensor([window.start for window in windows]),
        "end_positions": torch.tensor([window.stop for window in windows]),
    }


def best_span(window: Window, start_logits: torch.Tensor, end_logits: torch.Tensor) -> tuple[float, str]:
    """Score and text of the likeliest answer in a window: the span with the highest sum of logits."""
    begin, length = window.context_position, window.end - window.begin
    start, end = start_logits[begin : begin + length].float(), end_logits[begin : begin + length].float()
    allowed = torch.ones(length, length, dtype=torch.bool).triu().tril(LONGEST_ANSWER - 1)
    scores = (start[:, None] + end[None, :]).masked_fill(~allowed, -torch.inf)
    first, last = divmod(int(scores.argmax()), length)
    return float(scores[first, last]), window.context.text_of(window.begin + first, window.begin + last)
