"""Trains the BERT of torch_bert_squad.py with transformers.Trainer; one line adds COARSE.

How to run it: README.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import TrainingArguments

from coarse.transformers import Trainer
from squad import load_squad
from squad_windows import collate, cut_windows, train_tokenizer
from torch_bert_squad import SIZES, SMALL_DATA, build_model


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="BERT on SQuAD with transformers.Trainer.")
    parser.add_argument("--data", type=Path, default=SMALL_DATA, help="file in the format of SQuAD 1.1")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--max-length", type=int, default=96)
    parser.add_argument("--doc-stride", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="windows of one step of a worker")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--output", default="runs/transformers", help="folder of the Trainer's own files")
    parser.add_argument("--offload-optimizer", action="store_true", help="run it in the memory devices")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    torch.manual_seed(0)
    questions = load_squad(arguments.data)
    tokenizer = train_tokenizer(questions, vocabulary=30_522)
    windows = cut_windows(questions, tokenizer, max_length=arguments.max_length, stride=arguments.doc_stride)
    trainer = Trainer(
        build_model(arguments),
        TrainingArguments(
            arguments.output,
            use_cpu=not torch.cuda.is_available(),
            num_train_epochs=arguments.epochs,
            per_device_train_batch_size=arguments.batch,
            learning_rate=arguments.lr,
            remove_unused_columns=False,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
        ),
        data_collator=collate,
        train_dataset=windows,
        offload_optimizer=arguments.offload_optimizer,
    )
    outcome = trainer.train()
    if trainer.is_world_process_zero():
        print(f"mean loss of all steps {outcome.training_loss:.4f}")


if __name__ == "__main__":
    main()
