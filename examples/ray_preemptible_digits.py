"""Trains preemptible_digits.py with Ray Train on a cluster, where Ray starts the workers again if one is lost.

How to run it: docs/clusters.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

import preemptible_digits


def train(options: dict[str, Any]) -> None:
    """Runs in each of Ray's workers, in a thread, where Python handles no signals."""
    preemptible_digits.train(argparse.Namespace(**options), on_signal=False)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Handwritten digits with Ray Train, with checkpoints.")
    preemptible_digits.add_training_arguments(parser)
    parser.add_argument("--address", help="of the cluster; `auto` for that of this machine (a new one)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--max-failures", type=int, default=3, help="times that lost workers are replaced")
    parser.add_argument("--results", type=Path, default=Path("runs/ray"), help="folder that all nodes share")
    return parser.parse_args()


def main() -> None:
    arguments = read_arguments()
    here = str(Path(__file__).resolve().parent)
    ray.init(address=arguments.address, runtime_env={"env_vars": {"PYTHONPATH": here}})
    options = vars(arguments) | {"checkpoints": arguments.checkpoints.resolve()}
    trainer = TorchTrainer(
        train,
        train_loop_config=options,
        scaling_config=ScalingConfig(num_workers=arguments.workers),
        torch_config=TorchConfig(backend="coarse"),
        run_config=RunConfig(
            storage_path=str(arguments.results.resolve()),
            failure_config=FailureConfig(max_failures=arguments.max_failures),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
