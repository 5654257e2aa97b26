"""The timeline of a Keras job: steps, pushes, reductions and pulls of its variables."""

from __future__ import annotations

import sys

from chrome_trace import read_trace
from jobs import Job

SCRIPT = """\
import keras
import numpy as np

import coarse.tensorflow

strategy = coarse.tensorflow.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("sgd", "mse")
model.fit(np.ones((12, 4)), np.ones((12, 3)), batch_size=4, epochs=1, verbose=0)
"""
STEPS = 3


def test_a_trace_shows_steps_and_the_way_of_gradients(tmp_path):
    script, target = tmp_path / "train.py", tmp_path / "trace.json"
    script.write_text(SCRIPT)
    run = ("-m", "coarse", "run", "-n", "2", "--timeline", str(target), str(script))
    code, said = Job(sys.executable, *run).finish()
    assert code == 0, said
    trace = read_trace(target)
    for worker in ("worker 0", "worker 1"):
        steps = trace.named("train step", worker)
        pushes, pulls = trace.named("push", worker), trace.named("pull", worker)
        assert len(steps) == STEPS
        for step in steps:
            during = [each for each in pushes if step.begin_ns <= each.begin_ns <= each.end_ns <= step.end_ns]
            assert during
            for push in during:
                (pull,) = [
                    each
                    for each in pulls
                    if each.name == push.name.replace("push", "pull")
                    and each.arguments["step"] == push.arguments["step"]
                    and each.arguments["group"] == push.arguments["group"]
                ]
                assert push.end_ns <= pull.end_ns
    assert {each.process for each in trace.named("reduce")} <= {"memory device md0", "memory device md1"}
    assert trace.arrows
    assert "coarse results" in trace.threads.values()
