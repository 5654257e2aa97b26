"""Parameters of a model as remote data: what epochs and invalidations cost when workers read and update them.

Without a counterpart in the document. Each GPU is home of an equal part of the parameters. In a step all GPUs read,
and then the homes write what changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coarse.simulator.studies.remote_data_cache.accesses.streams import Stream
from coarse.simulator.studies.remote_data_cache.caches.remote_cache import (
    Coherence,
    RemoteOutcome,
    with_cache,
)
from coarse.simulator.studies.study import StateTable

_NUM_GPUS, _NUM_LINES, _NUM_STEPS, _WARM_STEPS = 4, 4096, 24, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How a step uses parameters.

    Args:
        what: In words.
        read_share: Lines that each GPU reads, of all.
        written_share: Lines that are written, of those that any GPU read.
        skew: Reads are of line u**skew, u uniform: 1 is uniform.
    """

    what: str
    read_share: float
    written_share: float
    skew: float = 1.0


TRAININGS: Sequence[Training] = (
    Training(what="dense: all lines read and written", read_share=1.0, written_share=1.0),
    Training(what="most layers frozen: all read, 1% written", read_share=1.0, written_share=0.01),
    Training(what="table: 1% read by each GPU, and written", read_share=0.01, written_share=1.0),
    Training(what="table with hot rows: the same, skewed", read_share=0.01, written_share=1.0, skew=4.0),
)


def update_table(trainings: Sequence[Training] = TRAININGS) -> StateTable:
    """Fetches and messages of each step, under software and hardware coherence."""
    rows = []
    for training in trainings:
        stream = _stream(training)
        software, hardware = (_outcome(stream, each) for each in (Coherence.SOFTWARE, Coherence.HARDWARE))
        rows.append(
            (
                training.what,
                f"{_fetches(stream, software):,.0f}",
                f"{_NUM_GPUS - 1}",
                f"{_fetches(stream, hardware):,.0f}",
                f"{_invalidations(stream, hardware):,.0f}",
            )
        )
    return StateTable(
        title=f"Parameters as remote data, {_NUM_GPUS} GPUs, {_NUM_LINES:,} lines, per step",
        columns=(
            "training",
            "fetches, epochs",
            "messages, epochs",
            "fetches, tracker",
            "invalidations, tracker",
        ),
        rows=rows,
    )


def _stream(training: Training) -> Stream:
    """Each step is two kernels: all GPUs read, then the homes write."""
    rng = np.random.default_rng(0)
    parts = []
    for step in range(_NUM_STEPS):
        reads = [_read_lines(training, rng) for _ in range(_NUM_GPUS)]
        parts += [(2 * step, gpu, line, False) for gpu, lines in enumerate(reads) for line in lines.tolist()]
        used = rng.permutation(np.unique(np.concatenate(reads)))
        written = used[: round(training.written_share * len(used))]
        parts += [(2 * step + 1, line % _NUM_GPUS, line, True) for line in written.tolist()]
    kernel, gpu, line, is_write = (np.array(column) for column in zip(*parts, strict=True))
    return Stream(
        num_gpus=_NUM_GPUS, num_kernels=2 * _NUM_STEPS, kernel=kernel, gpu=gpu, line=line, is_write=is_write
    )


def _read_lines(training: Training, rng: np.random.Generator) -> NDArray[np.int64]:
    if training.read_share == 1:
        return np.arange(_NUM_LINES)
    num = round(training.read_share * _NUM_LINES)
    return np.unique((rng.random(num) ** training.skew * _NUM_LINES).astype(np.int64))


def _outcome(stream: Stream, coherence: Coherence) -> RemoteOutcome:
    return with_cache(
        stream,
        stream.line % _NUM_GPUS != stream.gpu,
        np.zeros(len(stream.line), dtype=bool),
        num_lines=_NUM_LINES,
        coherence=coherence,
        private_probability=0.01,
    )


def _fetches(stream: Stream, outcome: RemoteOutcome) -> float:
    return _per_step(stream, outcome.is_probe & ~outcome.is_hit)


def _invalidations(stream: Stream, outcome: RemoteOutcome) -> float:
    """The writer is the home, so all others are told."""
    return (_NUM_GPUS - 1) * _per_step(stream, outcome.is_broadcast)


def _per_step(stream: Stream, chosen: NDArray[np.bool_]) -> float:
    is_counted = stream.kernel >= 2 * _WARM_STEPS
    return float((chosen & is_counted).sum() / (_NUM_STEPS - _WARM_STEPS))
