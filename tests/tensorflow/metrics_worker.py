"""A Keras worker that trains with MetricsCallback: python metrics_worker.py DIRECTORY.

Worker 0 writes DIRECTORY/metrics.json: what it scraped and what a function was told.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

import coarse.tensorflow
from coarse.cli.status import describe_job
from coarse.status.address import find_addresses
from coarse.status.requests import ask

ROWS, BATCH, EPOCHS, EVERY = 52, 8, 2, 3


def scrape() -> str:
    url = f"http://127.0.0.1:{os.environ['COARSE_METRICS_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=60) as answer:
        return str(answer.read().decode())


def status() -> list[str]:
    (own,) = [each for each in find_addresses() if each.pid == os.getpid()]
    return list(describe_job(own.job, ask(find_addresses(own.job)), with_stacks=False))


def main() -> None:
    folder = Path(sys.argv[1])
    strategy = coarse.tensorflow.Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32), keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse")
    told: list[tuple[str, float, int]] = []
    model.fit(
        np.ones((ROWS, 8), "f4"),
        np.ones((ROWS, 1), "f4"),
        batch_size=BATCH,
        epochs=EPOCHS,
        verbose=0,
        callbacks=[
            coarse.tensorflow.MetricsCallback(
                folder / "logs", write=lambda *scalar: told.append(scalar), every=EVERY
            )
        ],
    )
    strategy.extended._meet("the end of training")
    if strategy.rank == 0:
        found = {"scraped": scrape(), "told": told, "status": status()}
        (folder / "metrics.json").write_text(json.dumps(found))
    strategy.extended._meet("the end of scraping")


if __name__ == "__main__":
    main()
