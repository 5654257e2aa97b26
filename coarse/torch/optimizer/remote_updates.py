"""The memory devices' updates of an optimizer's parameters: the running one, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coarse.client.tensor_group import UpdateKind
from coarse.process.failpoints import Failpoints
from coarse.torch.gradients.paths.gradient_path import GradientPath
from coarse.torch.gradients.sparse_gradients import SparseGradients
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters
from coarse.torch.optimizer.remote_parameters import RemoteParameters


class RemoteUpdates:
    """The updates of one optimizer's parameters, one after the other. One caller at a time.

    step() makes an update by run(). A backward makes one by begin_backward(), pushes of its gradients and
    end_backward().

    Args:
        remote: The parameters.
        path: The path of their gradients.
        sparse_gradients: Their sparse gradients.
        failpoints: Points at which tests kill this worker.
        before_backward: Called at the beginning of a backward that updates, before any gradient is pushed; None if
            step() updates.
        is_stale: Whether the worker trains with copies of the parameters, which may lack recent updates. The
            processor then waits for updates even if streams could; for one of a backward, only finish() waits.
    """

    def __init__(
        self,
        remote: RemoteParameters,
        path: GradientPath,
        sparse_gradients: SparseGradients,
        failpoints: Failpoints,
        *,
        before_backward: Callable[[], object] | None,
        is_stale: bool,
    ) -> None:
        self._remote = remote
        self._path = path
        self._sparse_gradients = sparse_gradients
        self._failpoints = failpoints
        self._before_backward = before_backward
        self._waits = before_backward is None or not is_stale
        self._waits_here = is_stale
        self._pulled: MirroredParameters | None = None
        self._is_under_way = False
        self.count = remote.recovered_step
        """Number of updates, including the running one."""
        self.is_step_due = False
        """Whether backward has updated without a following step() so far."""

    def mirror(self, parameters: MirroredParameters) -> None:
        """From now on, every update copies its results to `parameters`."""
        if not self._path.mirror(parameters):
            self._pulled = parameters
            self._waits_here = True

    def run(self, *, gradient_scale: float = 1.0) -> None:
        """Waits for the last update and makes the next one by each parameter's `.grad`, which all workers share.

        All slots and all settings are written before the first push, so that memory devices that have begun a step
        can finish it without any worker (docs/design/recovery.md).

        Args:
            gradient_scale: Factor for the gradients, the same on every worker.
        """
        self.finish()
        self.count += 1
        self._reach("step.prepare")
        present = self._stage_gradients()
        self._remote.begin(present, gradient_scale=gradient_scale)
        self._push(present)
        self._end(is_whole=all(present))

    def _stage_gradients(self) -> list[bool]:
        """Copies every parameter's `.grad` to its slot; returns which parameters have one."""
        gradients = [parameter.grad for parameter in self._remote.parameters]
        for index, gradient in enumerate(gradients):
            if gradient is None:
                continue
            if self._sparse_gradients.are_there and index in self._sparse_gradients:
                self._sparse_gradients.replace_mean(index, gradient)
            else:
                self._path.stage(index, gradient)
        self._path.finish_staging()
        return [gradient is not None for gradient in gradients]

    def _push(self, present: Sequence[bool]) -> None:
        has_failpoints = bool(self._failpoints)
        for index, has_gradient in enumerate(present):
            if has_failpoints:
                self._path.flush()
                self._reach("step.push", index)
            self._path.contribute(index, UpdateKind.UPDATE_BY_MEAN, present=has_gradient)

    def begin_backward(self) -> None:
        """Begins the update of a backward; a parameter is updated once all workers have pushed its gradient."""
        assert self._before_backward is not None
        self._before_backward()
        self._remote.begin()

    def end_backward(self, *, is_whole: bool) -> None:
        """Makes the next use of parameters wait for the update of a backward, whose gradients are all pushed.

        Args:
            is_whole: Whether this worker had a gradient for every parameter; if not, contributor counts show which
                parameters are updated.
        """
        self.count += 1
        contributors = self._end(is_whole=is_whole)
        # A backward for another optimizer, which used none of these parameters on any worker, made no update.
        self.is_step_due = is_whole or not contributors or any(contributors)

    def _end(self, *, is_whole: bool) -> Sequence[int]:
        """As end_backward(), for any update.

        Returns:
            Number of workers that had each gradient; empty if the processor does not wait.
        """
        self._is_under_way = True
        if not self._waits:
            self._path.flush()
            return ()
        self._reach("step.pull")
        contributors = self._path.collect(counts=self._waits_here or not is_whole)
        if contributors:
            self._note(contributors)
        else:  # a stream waits
            self._remote.expect()
        self._reach("step.done")
        return contributors

    def finish(self) -> int:
        """Waits until all updates that this worker has pushed are complete; returns their number."""
        if self._is_under_way:
            self._note(self._path.collect(counts=True))
        return self.count

    def _note(self, contributors: Sequence[int]) -> None:
        self._is_under_way = False
        if self._pulled is not None:
            self._pulled.pull()
        self._remote.finish(contributors)

    def _reach(self, place: str, count: int = 0) -> None:
        """Kills this worker if a test requests it at this point, after `count` pushed gradients."""
        self._failpoints.reach(place, step=self.count, count=count)
