"""A tf.distribute.Strategy of one process per worker, whose collectives go through memory devices."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.experimental.ops.distribute import compute_batch_size
from tensorflow.python.distribute import distribute_lib, distribute_utils, input_util, reduce_util
from tensorflow.python.distribute import values as distributed_values
from tensorflow.python.distribute.one_device_strategy import OneDeviceExtended
from tensorflow.python.eager import context
from tensorflow.python.framework import ops, random_seed
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph

from coarse.client.membership.members import WorldChange
from coarse.env import is_of_tensorflow, process_environment
from coarse.rendezvous.launcher_environment import LauncherEnvironment
from coarse.session import Session
from coarse.tensorflow import keras_patches
from coarse.tensorflow.collectives import Collectives
from coarse.tensorflow.kernel import ReduceKernel, load_kernel
from coarse.tensorflow.operations import Operations
from coarse.tensorflow.session import join_session
from coarse.tensorflow.step_contributors import StepContributors

logger = logging.getLogger(__name__)

_OPS = {reduce_util.ReduceOp.SUM: "sum", reduce_util.ReduceOp.MEAN: "mean"}


class Strategy(tf.distribute.Strategy):  # type: ignore[misc,unused-ignore]
    """Replaces tf.distribute.MultiWorkerMirroredStrategy, with scope(), run() and model.fit().

    Each worker is one process, started by `coarse run`, mpirun or srun, with torchrun's variables or a TF_CONFIG.
    Without any of these, it is the only worker, logs this, and reduces nothing. Variables created in scope() start
    with worker 0's values. All workers get one global random seed, so that they shuffle equally before data is
    distributed; pass `seed` to choose it.

    Args:
        device: Device of this worker; default: the GPU of its local rank if it exists, otherwise the CPU.
        communication_options: tf.distribute.experimental.CommunicationOptions; only `timeout_seconds` is used: how
            long workers wait for each other once all have joined. By default COARSE_TIMEOUT_S.
        seed: For tf.random.set_seed() on all workers; worker 0's is used. By default worker 0's current seed, or a
            new one.

    Raises:
        RendezvousError: If workers are missing, present twice, or do not agree.
        OutOfDeviceMemoryError, MemoryDeviceLostError: If memory devices cannot start.
    """

    def __init__(
        self, device: str | None = None, communication_options: Any = None, *, seed: int | None = None
    ) -> None:
        launch = LauncherEnvironment.from_environment()
        number = _next_number()
        if launch.identity.world_size == 1:
            logger.warning(
                "coarse.tensorflow.Strategy: neither RANK and WORLD_SIZE, TF_CONFIG nor mpirun name other workers; "
                "this process is the only one. Start the script with `coarse run -n N script.py` for more."
            )
        self._coarse_session = join_session(launch, number)
        try:
            timeout_s = getattr(communication_options, "timeout_seconds", None)
            if timeout_s is not None:
                self._coarse_session.limit_waits(timeout_s)
            device = device or _device(self._coarse_session)
            super().__init__(CoarseExtended(self, device, self._coarse_session, number))
            keras_patches.apply(Strategy)
            self.extended._set_common_seed(seed)
        except BaseException:
            self._coarse_session.close(is_finished=False)
            raise
        if launch.identity.world_size > 1:
            _open_strategies.add(self)
        atexit.register(self._close_at_exit, os.getpid())

    @staticmethod
    def has_workers() -> bool:
        """Whether this process has an open strategy of several workers."""
        return bool(_open_strategies)

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self._coarse_session.identity.rank

    @property
    def is_chief(self) -> bool:
        """Whether this worker has the lowest rank of those that are not lost: the one that writes files."""
        return bool(self.extended._is_chief)

    @property
    def session(self) -> Session:
        """The session of this strategy's workers and memory devices."""
        return self._coarse_session

    def reduce(self, reduce_op: Any, value: Any, axis: int | tuple[int, ...] | None) -> Any:
        """As tf.distribute.Strategy.reduce(): "SUM" or "MEAN" over the workers, and over `axis` unless it is None.

        Raises:
            ValueError: For another operation.
        """
        name = reduce_op.value if isinstance(reduce_op, reduce_util.ReduceOp) else str(reduce_op)
        if name.upper() not in ("SUM", "MEAN"):
            raise ValueError(
                f"reduce_op={reduce_op!r}: workers can be reduced by SUM or MEAN; for others gather() and reduce here"
            )
        return super().reduce(reduce_op, value, axis)

    def begin_step(self) -> None:
        """Notes which workers the last step has shown to be lost, and leaves the job if SIGTERM has asked for that.

        Only in a job that goes on without lost workers (docs/guides/elastic.md). `fit` and `train_on_batch` call it,
        and so does run() outside of functions. Call it between two steps if a tf.function calls run().

        Raises:
            SystemExit: If this worker has left.
        """
        self.extended._note_losses()
        if self._coarse_session.is_asked_to_leave:
            self.extended._close()
            self._coarse_session.leave()
            raise SystemExit(0)

    def close(self, *, is_finished: bool = True) -> None:
        """Leaves the job; memory devices end when the last worker has left. Idempotent.

        Args:
            is_finished: As for Session.close().
        """
        _open_strategies.discard(self)
        self.extended._close()
        self._coarse_session.close(is_finished=is_finished)

    def _close_at_exit(self, owner_pid: int) -> None:
        if os.getpid() == owner_pid:  # a fork inherits exit handlers, but no threads
            self.close(is_finished=getattr(sys, "last_value", None) is None)


class _ReplicaContext(distribute_lib.ReplicaContext):  # type: ignore[misc,unused-ignore]
    """One step of one worker.

    Args:
        strategy: The strategy of the step.
        rank: Rank of this worker.
        rows: A variable with the number of this worker's rows; None if the step has no rows. Functions traced in an
            earlier step read the value of the current step.
    """

    _is_for_updates = False

    def __init__(self, strategy: Strategy, rank: int, rows: Any) -> None:
        super().__init__(strategy, rank)
        self._rows = rows
        self._entry = ops.get_default_graph()
        self._fractions: dict[Any, Any] = {}
        self._counted: set[Any] = set()

    @property
    def has_weighed_a_loss(self) -> bool:
        """Whether this step has called row_fraction()."""
        return bool(self._fractions)

    def row_fraction(self) -> Any:
        """This worker's rows over those of all workers: the weight of its mean in the mean of all rows.

        The first call in each function of a step is collective; branches and loops of a function share the value.
        A float32 scalar; 1 / (number of workers) if the step has no rows.
        """
        graph = self._function_graph()
        if graph not in self._fractions:
            with _in_graph(graph):
                self._fractions[graph] = self._measure_fraction()
        return self._fractions[graph]

    def _weights(self) -> Any:
        """Weights for the reduction of gradients, if workers may be lost; None otherwise.

        Counts the workers in each function that has not done so for a loss.
        """
        contributors = self._strategy.extended._counted_contributors
        if contributors is None:
            return None
        graph = self._function_graph()
        if graph not in self._fractions and graph not in self._counted:
            self._counted.add(graph)
            with _in_graph(graph):
                contributors.count(None if self._rows is None else self._rows.read_value())
        return contributors.weights()

    def _function_graph(self) -> Any:
        """The graph of the function being traced, or of the loop within which the step began; None outside."""
        if not ops.inside_function():
            return None
        graph = ops.get_default_graph()
        while graph is not self._entry and isinstance(graph, ControlFlowFuncGraph):
            graph = graph.outer_graph
        return graph

    def _measure_fraction(self) -> Any:
        contributors = self._strategy.extended._counted_contributors
        if contributors is not None:
            return contributors.weigh(None if self._rows is None else self._rows.read_value())
        if self._rows is None:
            return tf.constant(1 / self._strategy.num_replicas_in_sync, tf.float32)
        rows = self._rows.read_value()
        of_all = self._strategy.extended._reduce_nested(reduce_util.ReduceOp.SUM, rows)
        return tf.math.divide_no_nan(tf.cast(rows, tf.float32), tf.cast(of_all, tf.float32))

    @contextlib.contextmanager
    def reducing_for_updates(self) -> Iterator[None]:
        """Makes reductions within the context not differentiable.

        TensorFlow keeps differentiable ones, with their whole graph, until the process ends.
        """
        self._is_for_updates = True
        try:
            yield
        finally:
            self._is_for_updates = False

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """As tf.distribute's."""
        if self._is_for_updates:
            weights = self._weights() if reduce_op == reduce_util.ReduceOp.SUM else None
            return self._strategy.extended._reduce_nested(reduce_op, value, weights=weights)
        return super().all_reduce(reduce_op, value, options)

    @property
    def devices(self) -> Any:
        return self._strategy.extended.worker_devices


def _in_graph(graph: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if graph is None else graph.as_default()


class CoarseExtended(OneDeviceExtended):  # type: ignore[misc,unused-ignore]
    """tf.distribute's interface of a strategy, for one replica in each of several processes."""

    def __init__(self, strategy: Strategy, device: str, session: Session, number: int) -> None:
        self._identity = session.identity
        self._settings = session.settings
        self._cannot_share = session.cannot_update()
        self._members = tuple(range(self._identity.world_size))
        self._contributors: StepContributors | None = None
        self._operations: Operations | None = None
        self._collectives: Collectives | None = None
        self._kernel: ReduceKernel | None = None
        self._is_alone = False
        self._rows: Any = None
        super().__init__(strategy, device)
        self._default_device = self._device
        self.experimental_enable_get_next_as_optional = True
        self._cluster_resolver = _cluster_resolver(session)
        self._task_type, self._task_id = self._cluster_resolver.task_type, self._cluster_resolver.task_id
        if self._identity.world_size > 1:
            self._collectives = Collectives(session)
            self._kernel = self._kernel_of_all(load_kernel(self._collectives, number))
            self._operations = Operations(self._collectives, self._kernel)
            with tf.init_scope(), tf.device("/CPU:0"):
                self._rows = tf.Variable(0, dtype=tf.int64, trainable=False, name="rows_of_step")
            if self._collectives.may_lose_workers:
                self._contributors = StepContributors(self._operations)
                session.on_change(self._follow)

    def _kernel_of_all(self, own: ReduceKernel | None) -> ReduceKernel | None:
        """Returns the op if every worker has it, because all workers must reduce in the same way. Collective."""
        assert self._collectives is not None
        has_it = self._collectives.gather("op", np.array([own is not None], np.int32))
        lacking = [rank for rank, (has,) in has_it.items() if not has]
        if own is None or not lacking:
            return own
        logger.warning(
            "coarse.tensorflow: tensors are reduced through Python, which is slower, because worker(s) %s cannot "
            "build the op; their messages give the reason",
            ", ".join(map(str, lacking)),
        )
        own.close()
        return None

    def _close(self) -> None:
        if self._kernel is not None:
            self._kernel.close()
        if self._collectives is not None:
            self._collectives.close()

    def _follow(self, change: WorldChange) -> None:
        self._members = change.new

    def _note_losses(self) -> None:
        """Notes which workers the last step has shown to be lost. Every worker calls it after the same steps."""
        if self._contributors is not None and (present := self._contributors.present()):
            assert self._collectives is not None
            self._collectives.note_present(present)

    @property
    def _may_lose_workers(self) -> bool:
        """Whether the job goes on without lost workers."""
        return self._contributors is not None

    @property
    def _counted_contributors(self) -> StepContributors | None:
        """Counts who contributes to steps; None if no worker may be lost, or this one acts alone."""
        return None if self._is_alone else self._contributors

    @property
    def _is_chief(self) -> bool:
        return self._identity.rank == self._members[0]

    @property
    def _place(self) -> int:
        """Place of this worker among those that are not lost."""
        return self._members.index(self._identity.rank)

    def _cannot_update(self) -> str:
        """The reason why memory devices cannot run optimizers of this strategy; "" if they can."""
        if self._operations is None:
            return "a job of one worker has no memory devices"
        if not self._operations.has_kernel:
            return "no compiler is available to build the op for it"
        if self._settings.keep_devices or self._settings.replicas:
            return (
                "COARSE_KEEP_DEVICES and COARSE_REPLICAS need a recovery that coarse.tensorflow does not have"
            )
        if self._settings.least_workers:
            return "COARSE_MIN_WORKERS lets the job go on without the worker whose assignments to variables count"
        return self._cannot_share

    def _set_common_seed(self, seed: int | None) -> None:
        if self._collectives is None:
            if seed is not None:
                tf.random.set_seed(seed)
            return
        if seed is None:
            seed = random_seed.get_seed(None)[0]
        chosen = np.array([secrets.randbits(31) if seed is None else seed], np.int64)
        tf.random.set_seed(int(self._collectives.broadcast("taking the random seed", chosen)[0]))

    @contextlib.contextmanager
    def _common_seed(self) -> Iterator[None]:
        """Sets tf.random's global seed to the first worker's within the context."""
        if self._collectives is None:
            yield
            return
        runtime = context.context()
        own, generator = runtime._seed, runtime._rng
        seed = secrets.randbits(31) if own is None else int(own)
        chosen = self._collectives.broadcast("taking the seed of a shuffle", np.array([seed], np.int64))
        common = int(chosen[0])
        if common == own:
            yield
            return
        tf.random.set_seed(common)
        try:
            yield
        finally:
            tf.random.set_seed(own)
            runtime._rng = generator

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Prevents waiting for other workers within the context, for actions of some workers only, such as saving.

        New variables start with this worker's values, and variables that are read over all workers return this
        worker's share.
        """
        before, self._is_alone = self._is_alone, True
        try:
            yield
        finally:
            self._is_alone = before

    def _meet(self, what: str) -> None:
        """Waits until all workers have called it.

        Args:
            what: Name of the operation, for errors.
        """
        if self._collectives is not None:
            self._collectives.broadcast(what, np.zeros(0, np.uint8))
            self._collectives.note_losses()

    # ---- workers and devices ----

    @property
    def _num_replicas_in_sync(self) -> int:
        return len(self._members)

    def _in_multi_worker_mode(self) -> bool:
        return self._operations is not None

    def _use_merge_call(self) -> bool:
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        del replica_id_in_sync_group
        return 0

    def _get_replica_id_in_sync_group(self, replica_id: int) -> int:
        del replica_id
        return self._identity.rank

    @property
    def should_checkpoint(self) -> bool:
        return self._is_chief

    @property
    def should_save_summary(self) -> bool:
        return self._is_chief

    @property
    def experimental_should_init(self) -> bool:
        return self._is_chief

    @property
    def experimental_between_graph(self) -> bool:
        return True

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        strategy = self._container_strategy()
        is_followed = self._counted_contributors is not None and not ops.inside_function()
        if is_followed:
            strategy.begin_step()
        rows = self._rows_of((args, kwargs))
        if (contributors := self._counted_contributors) is not None:
            contributors.begin_step()
        with tf.device(self._device), _ReplicaContext(strategy, self._identity.rank, rows):
            returned = fn(
                *distribute_utils.select_replica(0, args), **distribute_utils.select_replica(0, kwargs)
            )
        if is_followed:
            self._note_losses()
        return returned

    def _rows_of(self, arguments: Any) -> Any:
        """Returns the variable, set to the number of rows of a step's arguments; None if they have no rows."""
        rows = None if self._rows is None else _num_rows(arguments)
        if rows is None:
            return None
        self._rows.assign(rows)
        return self._rows

    def rows_of_step(self) -> int:
        """This worker's rows in its last step that had any; 0 in a job of one worker."""
        return 0 if self._rows is None else int(self._rows.numpy())

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        return (distribute_utils.select_replica(0, value),)

    # ---- variables ----

    def _create_variable(self, next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        operations = self._operations
        if operations is not None and not self._is_alone:
            kwargs["initial_value"] = _first_workers(operations, kwargs)
        variable = super()._create_variable(next_creator, **kwargs)
        aggregation = kwargs.get("aggregation")
        is_read_together = kwargs.get(
            "synchronization"
        ) == tf.VariableSynchronization.ON_READ and aggregation in (
            tf.VariableAggregation.SUM,
            tf.VariableAggregation.MEAN,
        )
        if operations is not None and is_read_together:
            return distributed_values.SyncOnReadVariable(self._container_strategy(), [variable], aggregation)
        return variable

    # ---- reductions ----

    def _reduce_to(self, reduce_op: Any, value: Any, destinations: Any, options: Any) -> Any:
        del destinations, options
        name = ""
        if isinstance(value, distributed_values.DistributedVariable):
            value = value._primary
            name = "" if tf.inside_function() else f"variable {value.name}"
        return self._reduce_nested(reduce_op, distribute_utils.select_replica(0, value), name)

    def _batch_reduce_to(self, reduce_op: Any, value_destination_pairs: Any, options: Any) -> Any:
        del options
        values = [distribute_utils.select_replica(0, value) for value, _ in value_destination_pairs]
        return self._reduce_nested(reduce_op, values)

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        del options
        return self._reduce_nested(reduce_op, value)

    def _reduce_nested(self, reduce_op: Any, value: Any, name: str = "", weights: Any = None) -> Any:
        if self._operations is None or self._is_alone:
            return value
        flat = tf.nest.flatten(value)
        dense = [i for i, each in enumerate(flat) if not isinstance(each, tf.IndexedSlices)]
        reduced = self._operations.reduce(_OPS[reduce_op], [flat[i] for i in dense], name, weights)
        for i, result in zip(dense, reduced, strict=True):
            flat[i] = result
        for i, each in enumerate(flat):
            if isinstance(each, tf.IndexedSlices):
                flat[i] = self._operations.reduce_slices(_OPS[reduce_op], each, weights)
        return tf.nest.pack_sequence_as(value, flat)

    def _gather_to_implementation(self, value: Any, destinations: Any, axis: Any, options: Any) -> Any:
        del destinations, options
        value = tf.convert_to_tensor(distribute_utils.select_replica(0, value))
        if self._operations is None:
            return value
        axis = int(tf.get_static_value(axis))
        if axis == 0:
            return self._operations.gather(value)
        order = [axis, *(i for i in range(value.shape.rank) if i != axis)]
        gathered = self._operations.gather(tf.transpose(value, order))
        return tf.transpose(gathered, np.argsort(order))

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        del destinations
        if self._operations is None:
            return tensor
        return self._operations.broadcast("broadcasting", tensor)

    def _replica_ctx_update(
        self, var: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        if self._operations is not None and not self.variable_created_in_scope(var):
            raise ValueError(
                f"variable {var.name!r} was created outside of strategy.scope(): each worker started with a "
                "different value. Build the model and compile it within `with strategy.scope():`."
            )
        return self._update(var, fn, args, kwargs or {}, group)

    # ---- inputs ----

    def _input_context(self) -> Any:
        return distribute_lib.InputContext(
            num_input_pipelines=len(self._members),
            input_pipeline_id=self._place,
            num_replicas_in_sync=len(self._members),
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        _require_per_worker(options)
        distributed = input_util.get_distributed_dataset(
            _in_memory_of_its_own(dataset) if self._operations is not None else dataset,
            self._input_workers_with_options(options),
            self._container_strategy(),
            num_replicas_in_sync=len(self._members),
            input_context=self._input_context(),
            options=options,
        )
        distributed._distributed_by_coarse = dataset, options, self._members
        return distributed

    def _redistributed(self, distributed: Any) -> Any:
        """The dataset, distributed among the workers that are left; `distributed` itself if none was lost since.

        Collective if workers may be lost.
        """
        if self._counted_contributors is None:
            return distributed
        self._meet("beginning to read data")
        dataset, options, members = getattr(
            distributed, "_distributed_by_coarse", (None, None, self._members)
        )
        if members == self._members:
            return distributed
        return self._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        _require_per_worker(options)
        return input_util.get_distributed_datasets_from_function(
            dataset_fn,
            self._input_workers_with_options(options),
            [self._input_context()],
            self._container_strategy(),
            options=options,
        )

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        return value_fn(distribute_lib.ValueContext(self._place, len(self._members)))

    @property
    def _global_batch_size(self) -> bool:
        return True


def _first_workers(operations: Operations, kwargs: dict[str, Any]) -> Callable[[], Any]:
    """Returns a function that computes the initial value of the first worker that is not lost."""
    initial_value, dtype = kwargs.get("initial_value"), kwargs.get("dtype")
    name = kwargs.get("name") or "without a name"

    def value() -> Any:
        own = initial_value() if callable(initial_value) else initial_value
        own = getattr(own, "wrapped_value", own)  # if a checkpoint is restored on creation
        tensor = tf.convert_to_tensor(own, dtype=dtype)
        if tensor.dtype in (tf.string, tf.resource, tf.variant):
            return tensor
        return operations.broadcast(f"creating variable {name!r}", tensor)

    return value


def _num_rows(arguments: Any) -> Any:
    """The first dimension of the first argument that has one, as an int64 scalar; None if no argument has one."""
    for each in tf.nest.flatten(distribute_utils.select_replica(0, arguments), expand_composites=False):
        if isinstance(each, tf.RaggedTensor):
            return tf.cast(each.nrows(), tf.int64)
        if isinstance(each, tf.SparseTensor):
            return tf.cast(each.dense_shape[0], tf.int64)
        if isinstance(each, (tf.Tensor, np.ndarray)) and each.ndim:
            return tf.shape(each, out_type=tf.int64)[0]
    return None


def _require_per_worker(options: Any) -> None:
    per_replica = tf.distribute.InputReplicationMode.PER_REPLICA
    if options is not None and options.experimental_replication_mode == per_replica:
        raise NotImplementedError("inputs are made per worker, which has one replica; leave out PER_REPLICA")


def _in_memory_of_its_own(dataset: Any) -> Any:
    """Returns a dataset with the same elements, copied out of numpy's memory, as from_generator() may use it.

    TensorFlow distributes slices of batches and reuses a slice's memory, so gradients would overwrite the arrays of
    the generator. TensorFlow itself has assembled batches of known size, so these need no copy.
    """
    if tf.get_static_value(compute_batch_size(dataset)) != -1:
        return dataset
    return dataset.map(lambda *element: tf.nest.map_structure(_copied, element, expand_composites=True))


def _copied(value: Any) -> Any:
    if isinstance(value, tf.Tensor) and value.dtype not in (tf.variant, tf.resource):
        return tf.raw_ops.DeepCopy(x=value)
    return value


_open_strategies: weakref.WeakSet[Strategy] = weakref.WeakSet()  # those with several workers
_num_strategies = 0


def _next_number() -> int:
    """Counts the strategies of this process, equally on all workers, to distinguish their sessions."""
    global _num_strategies
    _num_strategies += 1
    return _num_strategies - 1


def _cluster_resolver(session: Session) -> Any:
    """The cluster resolver that shows libraries the first worker: TF_CONFIG's, or tasks "worker" numbered by rank.

    Without a TF_CONFIG, no process serves TensorFlow's own protocol, and addresses are only names.
    """
    identity = session.identity
    if is_of_tensorflow(process_environment()):
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    workers = [f"worker{rank}:0" for rank in range(identity.world_size)]
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": workers}), task_type="worker", task_id=identity.rank
    )


def _device(session: Session) -> str:
    gpus = tf.config.list_logical_devices("GPU")
    return f"/GPU:{session.identity.local_rank % len(gpus)}" if gpus else "/CPU:0"
