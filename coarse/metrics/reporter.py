"""Reports metrics during training to a function, such as the `add_scalar` of TensorBoard's writer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from coarse.metrics.values import Histogram, Metrics

WriteScalar: TypeAlias = Callable[[str, float, int], object]
"""Takes a tag, a value and a step."""

_Series: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


class MetricsReporter:
    """Reports metrics every few steps, as rates where Prometheus would compute them by a query.

    A counter becomes its rate per second since the last report, with the tag `<name>_per_second`. A histogram becomes
    the mean of the durations since then, `<name>_mean`, if there were any. A gauge stays as it is. Labels follow:
    `coarse_pushed_bytes_per_second/worker0/md1/direct`.

    Args:
        read: Reads the metrics, such as Session.metrics.
        write: Takes each scalar: `SummaryWriter.add_scalar`, or any function of tag, value and step.
        every: Steps between two reports.

    Raises:
        ValueError: If `every` is below 1.
    """

    def __init__(self, read: Callable[[], Metrics], write: WriteScalar, *, every: int = 100) -> None:
        if every < 1:
            raise ValueError(f"every={every} must be at least 1 step")
        self._read = read
        self._write = write
        self._every = every
        self._num_steps = 0
        self._last = read()

    def step(self) -> None:
        """Counts a step of the training; reports if a report is due."""
        self._num_steps += 1
        if self._num_steps % self._every == 0:
            self.report(self._num_steps)

    def report(self, step: int) -> None:
        """Reports what happened since the last report.

        Args:
            step: The step for which to report.
        """
        metrics = self._read()
        for tag, value in scalars(self._last, metrics):
            self._write(tag, value, step)
        self._last = metrics


def scalars(before: Metrics, after: Metrics) -> Iterator[tuple[str, float]]:
    """Tag and value of each scalar of a report, from what was read at its begin and at its end."""
    earlier = _by_series(before)
    elapsed_s = max(1e-9, after.taken_s - before.taken_s)
    kinds = {family.declaration.name: family.declaration.kind for family in after.families()}
    for (name, labels), value in _by_series(after).items():
        old = earlier.get((name, labels))
        if isinstance(value, Histogram):
            old_count, old_s = (old.count, old.sum_s) if isinstance(old, Histogram) else (0, 0.0)
            if value.count > old_count:
                mean_s = (value.sum_s - old_s) / (value.count - old_count)
                yield _tag(f"{name}_mean", dict(labels)), mean_s
        elif kinds[name] == "counter":
            was = old if isinstance(old, float) else 0.0
            yield _tag(f"{name.removesuffix('_total')}_per_second", dict(labels)), (value - was) / elapsed_s
        else:
            yield _tag(name, dict(labels)), value


def _by_series(metrics: Metrics) -> dict[_Series, float | Histogram]:
    return {
        (family.declaration.name, tuple(series.labels.items())): series.value
        for family in metrics.families()
        for series in family.series
    }


def _tag(name: str, labels: Mapping[str, str]) -> str:
    parts = [f"worker{value}" if label == "worker" else value for label, value in labels.items()]
    return "/".join([name, *parts])
