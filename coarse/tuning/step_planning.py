"""Chooses the planners that replan a session's synchronisation during training (COARSE paper, III-E and III-F)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coarse.errors import RendezvousError
from coarse.profiler.dual_sync import AUTO, OFF
from coarse.tuning.tuned_session import TunedSession

if TYPE_CHECKING:  # slow to import, or imports this module
    from coarse.client.tensor_group import TensorGroup
    from coarse.machine.partition_table import PartitionTable
    from coarse.profiler.link_plan import LinkPlan
    from coarse.profiler.profile import Profile
    from coarse.tuning.gpu_dual_sync import GpuDualSync
    from coarse.tuning.gpu_replanner import GpuReplanner
    from coarse.tuning.replanner import Replanner


class StepPlanning:
    """Watches the steps of groups whose times are useful for planning.

    Args:
        session: A session of several workers; only its constant properties are read now.
        table: The workers that each memory device of this node serves.
        profile: The links, measured or simulated from a link table; None without either.
        plan: The plan made from the profile.
    """

    def __init__(
        self, session: TunedSession, table: PartitionTable, *, profile: Profile | None, plan: LinkPlan
    ) -> None:
        self._settings = session.settings
        self._is_emulated = session.emulation is not None
        self._are_devices_on_gpus = table.is_on_gpus
        self._is_one_node = len(session.node_workers) >= session.identity.world_size
        self._profile = profile
        self._plan = plan
        self._replanners: list[Replanner] = []
        self._gpu_planners: list[GpuDualSync] = []
        self._gpu_replanners: list[GpuReplanner] = []
        self._skipped: list[str] = []

    def check(self) -> list[str]:
        """The kinds of planning that are impossible from the start, with reasons, one line each.

        Raises:
            RendezvousError: If the settings request them.
        """
        decisions = []
        wanted = self._settings.dual_sync
        reason = self._cannot_reduce_on_host()
        if wanted != OFF and reason and not (self._are_devices_on_gpus and self._may_use_nccl):
            if wanted != AUTO:
                raise RendezvousError(
                    f"COARSE_DUAL_SYNC={wanted}: the workers cannot reduce tensors themselves: {reason}; set it to "
                    "off or auto"
                )
            where = " of tensors in the host's memory" if self._may_use_nccl else ""
            decisions.append(f"dual synchronisation{where}: none: {reason}")
        if self._settings.replan_steps > 0 and not (self._follows_links or self._follows_gpu_links):
            decisions.append("replanning: none: no routes depend on links that could change")
        return decisions

    def decisions(self) -> list[str]:
        """Decisions since the start, one line each."""
        planners: tuple[GpuDualSync | GpuReplanner | Replanner, ...] = (
            *self._gpu_planners,
            *self._gpu_replanners,
            *self._replanners,
        )
        return [*self._skipped, *(line for each in planners for line in each.decisions)]

    @property
    def may_reduce_on_host(self) -> bool:
        """Whether workers that see each other's slots may use direct all-reduce."""
        return not self._is_emulated and self._settings.dual_sync != OFF and not self._cannot_reduce_on_host()

    def watch(self, session: TunedSession, group: TensorGroup, gpu: str) -> None:
        """Plans from the steps of `group`, if possible; every worker calls it.

        Args:
            session: The session of this object.
            group: A group that was just registered.
            gpu: UUID of the GPU that holds this worker's tensors; "" for the host.
        """
        if (
            self._follows_gpu_links
            and not self._gpu_replanners
            and self._watch_gpu_links(session, group, gpu)
        ):
            return None
        if self._may_plan_by_nccl and group.places.on_gpu == group.num_workers:
            return self._watch_gpu(session, group, gpu)
        if self._are_devices_on_gpus and self._may_use_nccl and self._settings.dual_sync not in (OFF, AUTO):
            self._refuse(group, "not every worker has its tensors on a GPU")
        self._watch_links(session, group)

    def _cannot_reduce_on_host(self) -> str:
        """Why direct all-reduce is impossible in the host's memory, or over emulated links; "" if possible."""
        if not self._is_one_node:
            return "the workers of several nodes share no memory"
        if self._are_devices_on_gpus and not self._is_emulated:
            return "memory devices are on GPUs, so workers cannot access each other's tensors"
        if self._settings.sync_algorithm in ("ring", "nccl"):
            return f"{self._settings.sync_algorithm} needs the contributions of all workers in all memory devices"
        if self._is_emulated and self._settings.sync_algorithm != "exchange":
            return f"over emulated links it is planned for exchange only, not for {self._settings.sync_algorithm}"
        if self._profile is None and self._settings.dual_sync == AUTO:
            return (
                "no profile is available for the estimate; `coarse profile` or COARSE_PROFILE=auto makes one"
            )
        return ""

    @property
    def _follows_links(self) -> bool:
        """Whether routes follow a profile, which changing links make obsolete."""
        # In the host's memory they do not, unless the settings request it (coarse.profiler.link_plan).
        by_profile = self._settings.routing == ("auto" if self._is_emulated else "profile")
        may_move = self._settings.sync_algorithm not in ("ring", "nccl")
        return by_profile and may_move and self._profile is not None and self._is_one_node

    def _watch_links(self, session: TunedSession, group: TensorGroup) -> None:
        plans_dual_sync = self._settings.dual_sync != OFF and not self._cannot_reduce_on_host()
        is_first = not self._replanners  # the steps of one group trigger the link checks
        looks_at_links = is_first and self._follows_links and self._settings.replan_steps != 0
        if not (plans_dual_sync or looks_at_links):
            return
        from coarse.tuning.replanner import Replanner

        replanner = Replanner(
            session,
            group,
            profile=self._profile,
            plan=self._plan,
            dual_sync=self._settings.dual_sync if plans_dual_sync else OFF,
            allreduce_algorithm=self._settings.own_path,
            every_steps=self._settings.replan_steps if looks_at_links else 0,
        )
        self._replanners.append(replanner)

    # ---- tensors on GPUs ----

    @property
    def _follows_gpu_links(self) -> bool:
        """Whether slots follow links between GPUs; only if asked, because the processor then waits in each step."""
        return self._settings.replan_steps > 0 and self._are_devices_on_gpus and self._may_use_nccl

    def _watch_gpu_links(self, session: TunedSession, group: TensorGroup, gpu: str) -> bool:
        """Moves the slots of a group as links change, if possible; returns whether it is."""
        reason = session.cannot_move_slots(group)
        if group.places.on_gpu < group.num_workers:
            reason = "not every worker has its tensors on a GPU"
        if reason:
            self._skipped.append(f"replanning: none in {group.name}: {reason}")
            return False
        from coarse.tuning.gpu_replanner import GpuReplanner

        every_steps = self._settings.replan_steps
        self._gpu_replanners.append(GpuReplanner(session, group, gpu=gpu, every_steps=every_steps))
        return True

    @property
    def _may_use_nccl(self) -> bool:
        """Whether the workers can reduce tensors on GPUs by direct all-reduce."""
        return self._is_one_node and not self._is_emulated

    @property
    def _may_plan_by_nccl(self) -> bool:
        looks_at_links = self._follows_links and self._settings.replan_steps != 0
        return self._may_use_nccl and self._settings.dual_sync != OFF and not looks_at_links

    def _refuse(self, group: TensorGroup, reason: str) -> None:
        self._skipped.append(f"dual synchronisation: none in {group.name}: {reason}")

    def _watch_gpu(self, session: TunedSession, group: TensorGroup, gpu: str) -> None:
        wanted, algorithm = self._settings.dual_sync, self._settings.sync_algorithm
        if wanted == AUTO and algorithm in ("direct", "gather", "exchange"):
            return self._refuse(group, f"{algorithm} is set, which adds in the order of the workers")
        if group.places.with_nccl > 0:
            return self._refuse(group, "another group uses NCCL, and NCCL needs all of its work in one order")
        from coarse.tuning.gpu_dual_sync import GpuDualSync

        self._gpu_planners.append(GpuDualSync(session, group, gpu=gpu, mode=wanted))
