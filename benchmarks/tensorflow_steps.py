"""Step times of Keras models under coarse.tensorflow.Strategy, and the share of synchronisation.

    python benchmarks/tensorflow_steps.py [--models resnet50 bert-small] [--workers 2] [--steps 10] [--batch 8]
                                          [--json]

Every system trains the same model with Adam in a separate job: COARSE with its ops, COARSE with the optimizer in the
memory devices, COARSE through tf.numpy_function, TensorFlow's MultiWorkerMirroredStrategy, and a single process that
reduces nothing and uses the batch of one worker. Keras 3's fit() fails under MultiWorkerMirroredStrategy. That system
uses its own loop around one tf.function, which does less than fit(). ResNet-50 uses images of 64 x 64. BERT-small
(4 layers of 512) uses 32 tokens; its embeddings have sparse gradients.

In the jobs of COARSE without DistributedOptimizer, worker 0 also times the reduction of whole gradients alone:
through a function of collectives and through the session's client, on the same values. Sums are verified before
anything is timed. All figures are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coarse.bench.timing import timed

SYSTEMS = {
    "op": "COARSE",
    "offload": "COARSE, DistributedOptimizer",
    "python": "COARSE by numpy_function",
    "mirrored": "MultiWorkerMirroredStrategy, own loop",
    "alone": "one process, no sync",
}
MODELS = ("resnet50", "bert-small", "tiny")


def main() -> int:
    """Runs all jobs and prints the table, or runs as one of their workers."""
    options = read_options()
    if options.worker:
        work(options)
        return 0
    results = [
        {"model": model, "system": system, **run(model, system, options)}
        for model in options.models
        for system in SYSTEMS
    ]
    lines = [json.dumps({"kind": "measured", "workers": options.workers, **result}) for result in results]
    if options.json:
        print(*lines, sep="\n")
    else:
        print_table(results)
    if options.output is not None:
        with options.output.open("a") as output:
            output.writelines(f"{line}\n" for line in lines)
    return 0


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["resnet50", "bert-small"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--batch", type=int, default=8, help="of each worker")
    parser.add_argument("--json", action="store_true", help="print a JSON line for each system and model")
    parser.add_argument("--output", type=Path, help="append a JSON line for each system and model")
    parser.add_argument("--worker", metavar="SYSTEM", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def run(model: str, system: str, options: argparse.Namespace) -> dict[str, float]:
    """Trains once; returns the measurements of worker 0, in milliseconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        numbers = ["--steps", str(options.steps), "--batch", str(options.batch)]
        script = [__file__, "--worker", system, "--models", model, *numbers, "--report", str(report)]
        launcher = [] if system == "alone" else ["-m", "coarse", "run", "-n", str(options.workers)]
        environment = {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "2", **os.environ}
        if system == "mirrored":
            environment["MIRRORED_WORKERS"] = json.dumps(free_addresses(options.workers))
        command = [sys.executable, *launcher, *script]
        subprocess.run(command, env=environment, check=True, stdout=sys.stderr)
        figures: dict[str, float] = json.loads(report.read_text())
    return figures


def free_addresses(count: int) -> list[str]:
    """Addresses that are free now; TensorFlow needs them before its workers start."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def print_table(results: list[dict[str, Any]]) -> None:
    print("| model | system | step p50, ms | gradients alone, ms | client alone, ms | overhead |")
    print("|---|---|---|---|---|---|")
    for each in results:
        sync, client = each.get("sync_ms"), each.get("client_ms")
        overhead = "" if sync is None else f"{100 * (sync / client - 1):.0f} %"
        shown = ["" if value is None else f"{value:.1f}" for value in (each["step_ms"], sync, client)]
        print(f"| {each['model']} | {SYSTEMS[each['system']]} | {' | '.join(shown)} | {overhead} |")


def work(options: argparse.Namespace) -> None:
    """One worker of a job."""
    if options.worker == "mirrored":
        work_mirrored(options)
        return
    import keras
    import tensorflow as tf

    import coarse.tensorflow

    tf.config.threading.set_intra_op_parallelism_threads(1)
    if options.worker == "python":
        os.environ["CXX"] = "/nonexistent"  # prevents building the op
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    keras.utils.set_random_seed(1)
    strategy = coarse.tensorflow.Strategy()
    with strategy.scope():
        model, inputs, targets = build(options.models[0], options.batch)
        optimizer = keras.optimizers.Adam(1e-4)
        if options.worker == "offload":
            optimizer = coarse.tensorflow.DistributedOptimizer(optimizer)
        model.compile(optimizer, "sparse_categorical_crossentropy")
    global_inputs, global_targets = (
        np.concatenate([each] * strategy.num_replicas_in_sync) for each in (inputs, targets)
    )
    dataset = tf.data.Dataset.from_tensors((global_inputs, global_targets)).unbatch()
    dataset = dataset.batch(len(global_targets)).repeat()
    step_times = StepTimes()
    model.fit(
        dataset,
        epochs=1,
        steps_per_epoch=options.steps + 2,
        verbose=0,
        callbacks=[step_times.callback(keras)],
    )
    figures = {"step_ms": 1e3 * statistics.median(step_times.seconds[2:])}
    if strategy.num_replicas_in_sync > 1 and options.worker != "offload":
        figures.update(sync_times(strategy, model, options.steps))
    if strategy.rank == 0:
        options.report.write_text(json.dumps(figures))


def work_mirrored(options: argparse.Namespace) -> None:
    """One worker of a job of TensorFlow's own strategy, which averages through its collectives over gRPC."""
    rank, workers = int(os.environ["RANK"]), json.loads(os.environ["MIRRORED_WORKERS"])
    task = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": rank}}
    os.environ["TF_CONFIG"] = json.dumps(task)
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model, inputs, targets = build(options.models[0], options.batch)
        optimizer = keras.optimizers.Adam(1e-4)
        optimizer.build(model.trainable_variables)
    batch = (tf.constant(inputs), tf.constant(targets))

    def train(batch: Any) -> Any:
        samples, labels = batch
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(labels, model(samples, training=True))
            loss = tf.reduce_mean(losses) / len(workers)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    step = tf.function(lambda: strategy.reduce("SUM", strategy.run(train, args=(batch,)), axis=None))
    for _ in range(2):
        step()
    figures = {"step_ms": 1e3 * median_s(lambda: step().numpy(), options.steps)}
    if rank == 0:
        options.report.write_text(json.dumps(figures))


class StepTimes:
    """Durations of steps."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began_at = 0.0

    def callback(self, keras: Any) -> Any:
        """The Keras callback that times each step."""
        return keras.callbacks.LambdaCallback(on_train_batch_begin=self._begin, on_train_batch_end=self._end)

    def _begin(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self._began_at = time.perf_counter()

    def _end(self, batch: int, logs: Any = None) -> None:
        del batch, logs
        self.seconds.append(time.perf_counter() - self._began_at)


def sync_times(strategy: Any, model: Any, num_steps: int) -> dict[str, float]:
    """Times of the reduction of all gradients: through TensorFlow, and through the client's push and pull.

    The reduction overwrites its input, as in a step. Therefore every timed call creates gradients first; the time for
    creating them alone is subtracted.
    """
    import tensorflow as tf

    gradients = [
        tf.ones_like(variable.value) * (0.5 + strategy.rank / 2) for variable in model.trainable_variables
    ]
    expected = sum(range(1, strategy.num_replicas_in_sync + 1))

    def make(tensors: Any) -> Any:
        return [2.0 * tensor for tensor in tensors]

    def reduce(tensors: Any) -> Any:
        return tf.distribute.get_replica_context().all_reduce("SUM", make(tensors))

    @tf.function
    def make_all(tensors: Any) -> Any:
        return make(tensors)

    @tf.function
    def reduce_all(tensors: Any) -> Any:
        return strategy.run(reduce, args=(tensors,))

    assert all(np.all(each.numpy() == expected) for each in reduce_all(gradients))
    make_all(gradients)
    sync_s = median_s(lambda: reduce_all(gradients), num_steps) - median_s(
        lambda: make_all(gradients), num_steps
    )

    strategy.close()
    from coarse.rendezvous.launcher_environment import LauncherEnvironment
    from coarse.schema import TensorSpec
    from coarse.tensorflow.session import join_session

    session = join_session(LauncherEnvironment.from_environment(), 1)
    arrays = [2 * each.numpy() for each in gradients]
    group = session.register(
        "gradients",
        [
            TensorSpec(name=str(i), dtype="float32", num_elements=a.size, op="sum")
            for i, a in enumerate(arrays)
        ],
    )
    results = [np.empty_like(array) for array in arrays]

    def push_and_pull() -> None:
        for i, array in enumerate(arrays):
            group.push(i, source=array.ctypes.data)
        for i, result in enumerate(results):
            group.pull(i, destination=result.ctypes.data)

    push_and_pull()
    assert all(np.all(result == expected) for result in results)
    client_s = median_s(push_and_pull, num_steps)
    session.close()
    return {"sync_ms": 1e3 * sync_s, "client_ms": 1e3 * client_s}


def median_s(action: Callable[[], object], count: int) -> float:
    """The median duration of an action, in seconds."""
    return statistics.median(timed(action, count))


def build(name: str, batch: int) -> tuple[Any, Any, Any]:
    """A model with its inputs and targets for one worker."""
    import keras

    rng = np.random.default_rng(0)
    if name == "resnet50":
        model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=100)
        return model, rng.normal(size=(batch, 64, 64, 3)).astype("f4"), rng.integers(0, 100, batch)
    layers, width, vocabulary = (4, 512, 30522) if name == "bert-small" else (1, 16, 100)
    length = 32
    entry = keras.Input((length,), dtype="int32")
    hidden = keras.layers.Embedding(vocabulary, width)(entry)
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(8, width // 8)(hidden, hidden)
        hidden = keras.layers.LayerNormalization()(hidden + attended)
        dense = keras.layers.Dense(width)(keras.layers.Dense(4 * width, activation="gelu")(hidden))
        hidden = keras.layers.LayerNormalization()(hidden + dense)
    outputs = keras.layers.Dense(2, activation="softmax")(hidden[:, 0])
    return (
        keras.Model(entry, outputs),
        rng.integers(0, vocabulary, (batch, length)),
        rng.integers(0, 2, batch),
    )


if __name__ == "__main__":
    sys.exit(main())
