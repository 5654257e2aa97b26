"""Updates of a model's parameters that memory devices make: which one is under way, and who waits for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coarse.failpoints import Failpoints
from coarse.torch.gradients.gradient_path import GradientPath
from coarse.torch.optimizer.mirrored_parameters import MirroredParameters
from coarse.torch.optimizer.remote_parameters import RemoteParameters


class UpdateTracker:
    """The updates of one model, one after the other: begin(), its gradients are pushed, end(). One caller at a time.

    Args:
        offloaded: The parameters.
        path: The way of their gradients.
        failpoints: Where tests have this worker die.
        before_backward: Called as a backward begins that updates, before any gradient is pushed; None if step()
            updates.
        waits: Whether whoever uses parameters next waits for their update; else finish() alone does.
        waits_here: Whether the processor waits for updates, where streams could.
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
        """How many updates there were, with the one under way."""
        self.is_step_due = False
        """Whether backward has made one whose step() has not come."""

    def mirror(self, parameters: MirroredParameters) -> None:
        """From now on every update brings its results to these copies."""
        if not self._path.mirror(parameters):
            self._pulled = parameters
            self._waits_here = True

    def begin(self) -> None:
        """Begins the next one, of step(), when the last one is complete."""
        self.finish()
        self.count += 1
        self.reach("step.prepare")

    def begin_backward(self) -> None:
        """Begins the next one, which a backward makes of each parameter when all workers have pushed its gradient."""
        assert self._before_backward is not None
        self._before_backward()
        self._offloaded.begin()

    def expect_one(self, index: int) -> None:
        """Notes that one parameter may be updated from now on, while backward still runs."""
        self._offloaded.expect_one(index)

    def end_backward(self, *, is_whole: bool) -> None:
        """As end(), of the one that a backward has made."""
        self.count += 1
        contributors = self.end(is_whole=is_whole)
        # Another optimizer's backward, which used none of these parameters on any worker, made no update.
        self.is_step_due = is_whole or not contributors or any(contributors)

    def end(self, *, is_whole: bool) -> Sequence[int]:
        """Has whoever uses parameters next wait for what was pushed.

        Args:
            is_whole: Whether this worker had a gradient of every parameter; else others tell which are updated.

        Returns:
            How many workers had each gradient; nothing where nobody waits for it here.
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
        """Dies here where a test says so, when `count` gradients have been pushed."""
        self._failpoints.reach(place, step=self.count, count=count)
