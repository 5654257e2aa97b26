"""Trains BERT, randomly initialised, to answer questions in the format of SQuAD 1.1.

The workers share the questions and average their gradients in every step.
How to run it: README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import BertConfig, BertForQuestionAnswering

from job import Job, Progress, broadcast_text, join_job
from measure import Recorder
from resuming import Resuming, add_options, choose_optimizer
from squad import Question, SquadFormatError, exact_match, f1, load_squad
from squad_windows import Tokenizer, Window, best_span, collate, cut_windows, train_tokenizer

SMALL_DATA = Path(__file__).parent / "data" / "squad_small.json"
SIZES = {
    "base": {"num_hidden_layers": 12, "hidden_size": 768},
    "small": {"num_hidden_layers": 4, "hidden_size": 512},
    "tiny": {"num_hidden_layers": 2, "hidden_size": 128},
}


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="BERT for question answering, data-parallel.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--data", type=Path, default=SMALL_DATA, help="SQuAD 1.1 file to train on")
    parser.add_argument(
        "--eval-data", type=Path, help="SQuAD 1.1 file to score on; default: the training file"
    )
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="windows of one step on each worker")
    parser.add_argument("--max-length", type=int, default=160, help="tokens of a window, question included")
    parser.add_argument("--doc-stride", type=int, default=80, help="tokens from window to window")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    add_options(parser)
    parser.add_argument("--report", type=Path, help="write what each worker measured: FILE-<rank>.json")
    return parser.parse_args()


def load_questions(path: Path) -> list[Question]:
    try:
        return load_squad(path)
    except (SquadFormatError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


def build_model(arguments: argparse.Namespace) -> BertForQuestionAnswering:
    """BERT of the published sizes, with the published vocabulary of 30,522 pieces (the data may use fewer)."""
    size = SIZES[arguments.size]
    config = BertConfig(
        num_attention_heads=size["hidden_size"] // 64,
        intermediate_size=4 * size["hidden_size"],
        max_position_embeddings=max(512, arguments.max_length),
        **size,
    )
    return BertForQuestionAnswering(config).to(getattr(torch, arguments.dtype))


def build_tokenizer(questions: list[Question], job: Job) -> Tokenizer:
    """The tokenizer of all workers, made by worker 0."""
    made_here = (
        train_tokenizer(questions, vocabulary=BertConfig().vocab_size).to_str() if job.rank == 0 else ""
    )
    return Tokenizer.from_str(broadcast_text(made_here))


def train(model: torch.nn.Module, windows: list[Window], arguments: argparse.Namespace, job: Job) -> Recorder:
    sampler = DistributedSampler(windows, seed=arguments.seed)
    batches = DataLoader(windows, batch_size=arguments.batch, sampler=sampler, collate_fn=collate)
    steps = arguments.epochs * len(batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    optimizer = choose_optimizer(optimizer, model, arguments)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=arguments.lr, total_steps=steps, pct_start=0.1
    )
    recorder = Recorder(job, arguments.report)
    with (
        Resuming(model, optimizer, schedule, arguments) as resuming,
        Progress(job, steps=steps, done=resuming.step) as progress,
    ):
        for epoch in resuming.epochs(arguments.epochs):
            sampler.set_epoch(epoch)
            for batch in resuming.batches(batches):
                with recorder.step(samples=len(batch["input_ids"])):
                    optimizer.zero_grad()
                    loss = model(**batch).loss
                    loss.backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    resuming.save()
                    schedule.step()
                progress.advance(loss.item())
    return recorder


@torch.no_grad()
def answers_of(model: torch.nn.Module, windows: list[Window], batch_size: int) -> dict[int, str]:
    """The most likely answer to each question with a window on this worker, by the question's index."""
    best: dict[int, tuple[float, str]] = {}
    model.eval()
    for first in range(0, len(windows), batch_size):
        batch = windows[first : first + batch_size]
        output = model(**collate(batch))
        for window, start, end in zip(batch, output.start_logits, output.end_logits, strict=True):
            candidate = best_span(window, start, end)
            best[window.question] = max(best.get(window.question, candidate), candidate)
    model.train()
    return {question: text for question, (_, text) in best.items()}


def score(
    model: torch.nn.Module, questions: list[Question], windows: list[Window], batch: int, job: Job
) -> tuple[float, float]:
    """Exact match and F1 in per cent; every worker answers its share of the questions."""
    share = [window for window in windows if window.question % job.world_size == job.rank]
    answers = answers_of(model, share, batch)
    totals = torch.tensor(
        [
            sum(exact_match(text, questions[index]) for index, text in answers.items()),
            sum(f1(text, questions[index]) for index, text in answers.items()),
        ],
        dtype=torch.float64,
    )
    dist.all_reduce(totals)
    exact, overlap = (100 * totals / len(questions)).tolist()
    return exact, overlap


def main() -> None:
    arguments = read_arguments()
    questions = load_questions(arguments.data)
    scored = load_questions(arguments.eval_data) if arguments.eval_data else questions
    with join_job() as job:
        torch.manual_seed(arguments.seed + job.rank)  # different dropout on every worker
        tokenizer = build_tokenizer(questions, job)
        lengths = {"max_length": arguments.max_length, "stride": arguments.doc_stride}
        windows = cut_windows(questions, tokenizer, **lengths)
        model = build_model(arguments)
        model = torch.nn.parallel.DistributedDataParallel(model)
        job.say(
            f"{len(questions)} questions, {len(windows)} windows, {tokenizer.get_vocab_size()} word pieces"
        )
        recorder = train(model, windows, arguments, job)
        exact, overlap = score(
            model.module, scored, cut_windows(scored, tokenizer, **lengths), arguments.batch, job
        )
        job.say(f"exact match {exact:.1f} %, F1 {overlap:.1f} % on {arguments.eval_data or arguments.data}")
        batch = collate(windows[: arguments.batch])
        recorder.write(model, lambda: model(**batch).loss, exact_match=exact, f1=overlap)


if __name__ == "__main__":
    main()
