"""Keras training loops as data: models of random parts, random compile options, and a sequence of actions.

`training_loops()` creates them in the test process, which does not import TensorFlow; loop_worker.py runs them.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st

NUM_ROWS = 48
WHOLE = 16
"""Rows of a batch that leaves no rest of NUM_ROWS, nor of a half of it."""

PIECES = (
    "dense",
    "wide",
    "conv",
    "layer norm",
    "group norm",
    "synchronized batch norm",
    "attention",
    "recurrent",
    "looked up",
    "scaled",
    "frozen",
    "penalised",
    "constrained",
    "with unused",
    "residual",
)
ROWS_MATTER = ("batch norm", "activity penalised")
"""Whose results depend on which rows a worker has."""
RANDOM = ("dropout", "noise")
TWICE = "first again"

OPTIMIZERS = (
    "sgd",
    "momentum",
    "nesterov",
    "adam",
    "amsgrad",
    "adamw",
    "nadam",
    "adamax",
    "rmsprop",
    "centered rmsprop",
    "adagrad",
    "adadelta",
    "ftrl",
    "lamb",
    "adafactor",
    "muon",
    "lion",
)
OFFLOADABLE = ("sgd", "momentum", "nesterov", "adam", "amsgrad", "adamw")
OPTIONS = ("ema", "ema overwrites", "accumulates", "decays", "decays but biases", "schedule", "clipvalue")
CLIPS_OF_WORKERS = ("clipnorm", "global_clipnorm", "clipvalue")
NOT_MIRRORED = ("accumulates", "ema overwrites")
"""What Keras refuses to do in graphs of MirroredStrategy."""
CALLBACKS = (
    "early stopping",
    "plateau",
    "scheduler",
    "checkpoint",
    "backup",
    "writes weights",
    "lr by batch",
    "csv",
    "nan",
)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A call of fit()."""

    data: str
    batch_size: int
    epochs: int
    weights: str
    validation: str
    shuffles: bool
    callbacks: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Other:
    """Something else that is done with a model."""

    kind: str
    batch_size: int
    data: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What compile() is given."""

    optimizer: str
    options: tuple[str, ...]
    offloads: bool
    runs_eagerly: bool
    steps_per_execution: int


@dataclasses.dataclass(frozen=True)
class TrainingLoop:
    """A model, how it is compiled, and what is done with it."""

    kind: str
    pieces: tuple[str, ...]
    num_inputs: int
    loss: str
    num_outputs: int
    policy: str
    compiled: Compiled
    again: Compiled
    actions: tuple[Fit | Other, ...]
    reference: str
    """"one process" has whole batches, "mirrored" is tf.distribute's own strategy with two replicas."""

    @property
    def is_random(self) -> bool:
        return any(piece in RANDOM for piece in self.pieces)

    @property
    def tolerance(self) -> float:
        if "lion" in (self.compiled.optimizer, self.again.optimizer):
            return 3e-2
        if self.policy == "float64":
            return 1e-7
        return 1e-3 if self.policy == "float32" else 0.1


@st.composite
def compilations(draw: st.DrawFn, *, policy: str, rows_matter: bool) -> Compiled:
    offloads = policy != "float64" and draw(st.booleans())
    optimizer = draw(st.sampled_from(OFFLOADABLE if offloads else OPTIMIZERS))
    options = set(draw(st.lists(st.sampled_from(OPTIONS), max_size=2)))
    options -= {*NOT_MIRRORED} if rows_matter else {"clipvalue"}
    if rows_matter and draw(st.booleans()):
        options = {each for each in options if each not in CLIPS_OF_WORKERS}
        options.add(draw(st.sampled_from(CLIPS_OF_WORKERS)))
    if optimizer in ("adamw", "lamb") or {"decays", "decays but biases"} <= options:
        options.discard("decays")
    return Compiled(
        optimizer=optimizer,
        options=tuple(sorted(options)),
        offloads=offloads,
        runs_eagerly=draw(st.sampled_from([False, False, False, True])),
        steps_per_execution=draw(st.sampled_from([1, 1, 2, 3])),
    )


DATA = (
    "arrays",
    "dataset",
    "pydataset",
    "generator",
    "unknown size",
    "repeated",
    "files",
    "not sharded",
    "dict",
)
FROM_PYTHON = ("pydataset", "generator")
"""Which replicas of MirroredStrategy take by threads of their own, so that it is chance what rows make a batch."""


@st.composite
def training_loops(draw: st.DrawFn) -> TrainingLoop:
    policies = ["float64", "float64", "float32", "float32", "mixed_bfloat16", "mixed_float16"]
    reference = draw(st.sampled_from(["one process", "mirrored"]))
    rows_matter = reference == "mirrored"
    policy = draw(st.sampled_from(policies[:-1] if rows_matter else policies))
    names = [*PIECES, *RANDOM, *(ROWS_MATTER if rows_matter else ()), TWICE]
    pieces = draw(st.lists(st.sampled_from(names), max_size=3))
    if TWICE in pieces and pieces[0] == TWICE:
        pieces = ["dense", *pieces]
    # For custom train steps, MirroredStrategy logs means over the replicas.
    kinds = ["functional", "functional", "subclassed", "own step"][: 3 if rows_matter else 4]
    kind = draw(st.sampled_from(kinds))
    num_outputs = 1 if kind == "own step" else draw(st.sampled_from([1, 1, 2]))
    loss = draw(st.sampled_from(["mse", "classes", "huber", "binary"]))
    compiled, again = (draw(compilations(policy=policy, rows_matter=rows_matter)) for _ in range(2))
    # Where a worker has no rows, Keras takes what it adds for a bias, unless it traces a graph.
    leaves_none = [] if compiled.runs_eagerly or again.runs_eagerly else [1, 47]
    batch_sizes = st.sampled_from([WHOLE, WHOLE, 7, 11, *leaves_none[1:]] if rows_matter else [WHOLE, 8])
    # Several steps at once, which tf.distribute's own strategies cannot do, are one batch for callbacks.
    callbacks = [name for name in CALLBACKS if not (rows_matter and name == "lr by batch")]
    data = st.sampled_from([each for each in DATA if not (rows_matter and each in FROM_PYTHON)])
    fit = st.builds(
        Fit,
        data=data,
        batch_size=batch_sizes,
        epochs=st.sampled_from([1, 2]),
        weights=st.sampled_from(["none", "none", "samples", "classes"]),
        validation=st.sampled_from(["none", "split", "arrays", "dataset"]),
        shuffles=st.sampled_from([False, False, False, True]),
        callbacks=st.lists(st.sampled_from(callbacks), max_size=2, unique=True).map(tuple),
    )
    other = st.builds(
        Other,
        kind=st.sampled_from(
            [
                "evaluate",
                "predict",
                "train_on_batch",
                "test_on_batch",
                "predict_on_batch",
                "keras file",
                "weights file",
                "tf checkpoint",
                "recompile",
                "freeze",
                "scale weights",
                "set lr",
                "own loop",
            ]
        ),
        batch_size=st.sampled_from([WHOLE, 5, 31, *leaves_none[:1]]),
        data=data,
    )
    actions = [draw(fit), *draw(st.lists(st.one_of(fit, other, other), max_size=3))]
    return TrainingLoop(
        kind=kind,
        pieces=tuple(pieces),
        num_inputs=draw(st.sampled_from([1, 1, 2])),
        loss=loss,
        num_outputs=num_outputs,
        policy=policy,
        compiled=compiled,
        again=again,
        actions=tuple(actions),
        reference=reference,
    )
