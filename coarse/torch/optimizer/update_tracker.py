"""Tracks the memory devices' updates of a model's parameters: the running one, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coarse.failpoints import Failpoints
from coarse.torch.gradients.gradient_path import GradientPath
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters
from coarse.torch.optimizer.remote_parameters import RemoteParameters


class UpdateTracker:
    """The updates of one model, one after the other: begin(), pushes of its gradients, end(). One caller at a time.

    Args:
        offloaded: The parameters.
        path: The path of their gradients.
        failpoints: Points at which tests kill this worker.
        before_backward: Called at the beginning of a backward that updates, before any gradient is pushed; None if
            step() updates.
        waits: Whether the next use of parameters waits for their update; otherwise only finish() waits.
        waits_here: Whether the processor waits for updates even if streams could.
    """

    def __init__(
        self,
        offloaded: RemoteParameters,
        path: GradientPath,
        failpoints: Failpoints,
        *,
        before_backward: Callable[[], object] | None,
        waits: bool,
        waits_here: bool,
    ) -> None:
        self._offloaded = offloaded
        self._path = path
        self._failpoints = failpoints
        self._before_backward = before_backward
        self._waits = waits
        self._waits_here = waits_here
        self._pulled: MirroredParameters | None = None
        self._is_under_way = False
        self.count = offloaded.recovered_step
        """Number of updates, including the running one."""
        self.is_step_due = False
        """Whether backward has updated without a following step() so far."""

    def mirror(self, parameters: MirroredParameters) -> None:
        """From now on, every update copies its results to `parameters`."""
        if not self._path.mirror(parameters):
            self._pulled = parameters
            self._waits_here = True

    def begin(self) -> None:
        """Waits for the last update and begins the next one, of step()."""
        self.finish()
        self.count += 1
        self.reach("step.prepare")

    def begin_backward(self) -> None:
        """Begins the update of a backward; a parameter is updated once all workers have pushed its gradient."""
        assert self._before_backward is not None
        self._before_backward()
        self._offloaded.begin()

    def expect_one(self, index: int) -> None:
        """Records that one parameter may be updated from now on, while backward still runs."""
        self._offloaded.expect_one(index)

    def end_backward(self, *, is_whole: bool) -> None:
        """As end(), for an update in a backward."""
        self.count += 1
        contributors = self.end(is_whole=is_whole)
        # A backward for another optimizer, which used none of these parameters on any worker, made no update.
        self.is_step_due = is_whole or not contributors or any(contributors)

    def end(self, *, is_whole: bool) -> Sequence[int]:
        """Makes the next use of parameters wait for the pushed update.

        Args:
            is_whole: Whether this worker had a gradient for every parameter; if not, contributor counts show which
                parameters are updated.

        Returns:
            Number of workers that had each gradient; empty if the processor does not wait.
        """
        self._is_under_way = True
        if not self._waits:
            self._path.flush()
            return ()
        self.reach("step.pull")
        contributors = self._path.collect(counts=self._waits_here or not is_whole)
        if contributors:
            self._note(contributors)
        else:  # a stream waits
            self._offloaded.expect()
        self.reach("step.done")
        return contributors

    def finish(self) -> None:
        """Waits until all updates that this worker has pushed are complete."""
        if self._is_under_way:
            self._note(self._path.collect(counts=True))

    def _note(self, contributors: Sequence[int]) -> None:
        self._is_under_way = False
        if self._pulled is not None:
            self._pulled.pull()
        self._offloaded.finish(contributors)

    def reach(self, place: str, count: int = 0) -> None:
        """Kills this worker if a test requests it at this point, after `count` pushed gradients."""
        self._failpoints.reach(place, step=self.count, count=count)
