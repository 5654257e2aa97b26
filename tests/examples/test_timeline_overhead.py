"""benchmarks/timeline_overhead.py watches jobs as its flags say, and refuses figures of a job that nobody watched."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

import pytest
import timeline_overhead

ALL = "timeline,metrics,dashboard"


def test_a_job_with_everything_is_compared_with_one_without() -> None:
    options = ("--model", "digits", "--rounds", "1", "--steps", "600", "--with", ALL)
    done = subprocess.run(
        [sys.executable, str(timeline_overhead.__file__), *options],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    figures = r"[\d.]+ ms without, [\d.]+ ms with"
    assert re.search(
        rf"round 1 of 1: {ALL}: time {figures} \([+-][\d.]+%\); CPU time of worker 0 {figures}", done.stdout
    )
    assert re.search(rf"{ALL}, time: {figures}; rounds differ by [+-][\d.]+% \(median; ", done.stdout)


def test_the_figures_are_the_differences_of_the_rounds() -> None:
    metrics = ("metrics",)
    rounds = [{(): [0.1, 0.05], metrics: [0.1 + more, 0.05]} for more in (0.001, 0.002, 0.009)]
    time, cpu_time = timeline_overhead.summary(metrics, rounds)
    assert (
        "metrics, time: 100.0 ms without, 102.0 ms with; rounds differ by +2.00% (median; +1.00% to +9.00%)"
        in time
    )
    assert "rounds differ by +0.00% (median; +0.00% to +0.00%)" in cpu_time


@pytest.mark.parametrize(("answers", "trained_s"), [([], 1.0), ([30], 1.0), ([3, 30], 10.0)])
def test_a_job_that_was_not_watched_all_the_time_is_refused(answers: list[int], trained_s: float) -> None:
    watchers = [argparse.Namespace(num_answers=each) for each in answers]
    with pytest.raises(
        timeline_overhead.NobodyAnsweredError, match="with metrics,dashboard: answers per watcher"
    ):
        timeline_overhead.require_answers(("metrics", "dashboard"), watchers, trained_s)


def test_unknown_features_are_named() -> None:
    assert timeline_overhead.features_of("metrics,timeline") == ("metrics", "timeline")
    with pytest.raises(
        argparse.ArgumentTypeError, match=r"\['metric'\] are none of timeline, metrics, dashboard"
    ):
        timeline_overhead.features_of("metric,timeline")
