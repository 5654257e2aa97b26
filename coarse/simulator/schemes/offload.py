"""COARSE: gradients through the memory devices, all of them or those that the planner gives them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from coarse.simulator.coarse_plan import CoarsePlan, Shard, direct_allreduce_shards, plan_job
from coarse.simulator.collectives import DIRECT_ALLREDUCES, Collective, add_usages
from coarse.simulator.events.fair_sharing import Usage
from coarse.simulator.events.tasks import Task
from coarse.simulator.job import Job
from coarse.simulator.machines.network import Transfer, usage_of, worker_copies
from coarse.simulator.memory_devices import EXCHANGE, Stage, bytes_read, stages
from coarse.simulator.schemes.step import MemoryUse, Step

COPY_CHANNELS = 2
"""Transfers that a copy engine has in flight on a path: double buffering (docs/simulator.md has other numbers)."""

OFF, AUTO, WORKERS = "off", "auto", 0


def offload_step(job: Job, *, algorithm: str = EXCHANGE, dual_sync: str | int = OFF) -> Step:
    """A step of COARSE.

    Args:
        job: The job.
        algorithm: How memory devices reduce: exchange, ring or direct.
        dual_sync: "off" for memory devices alone, "auto" for the planner's split, 0 for the workers alone.
    """
    return _OffloadStep(job, algorithm, dual_sync).step()


class _OffloadStep:
    """Builds the tasks of one step; shards with the same proxies share their usages."""

    def __init__(self, job: Job, algorithm: str, dual_sync: str | int) -> None:
        self._job, self._network = job, job.network
        self._plan: CoarsePlan = plan_job(job, algorithm=algorithm)
        self._stages = cache(lambda proxies: stages(job.network, proxies, algorithm))
        self._path = cache(self._path_of)
        self._patterns: dict[Usage, int] = {}
        self._own: Mapping[int, str] = {}
        if dual_sync != OFF:
            self._own = direct_allreduce_shards(job, self._plan, self._bulk_usage(), mode=dual_sync)
        self._collective = cache(lambda name: DIRECT_ALLREDUCES[name](job.network))

    def step(self) -> Step:
        shards = self._plan.shards
        tasks = [
            task
            for number, shard in enumerate(shards)
            for task in (
                self._direct_allreduce(number, shard)
                if number in self._own
                else self._through_devices(number, shard)
            )
        ]
        own_bytes = sum(shards[number].nbytes for number in self._own)
        total = sum(shard.nbytes for shard in shards)
        return Step(
            network=self._network,
            tasks=tuple(tasks),
            memory=self._memory(),
            extra_capacities=self._core_capacities(),
            channels={task.queue: COPY_CHANNELS for task in tasks if task.queue},
            decisions=(
                f"{len(shards)} shards of at least {self._plan.shard_bytes} bytes",
                f"{total - own_bytes} of {total} bytes through the memory devices",
                *(f"w{worker}: {table}" for worker, table in enumerate(self._plan.tables)),
            ),
        )

    def _direct_allreduce(self, number: int, shard: Shard) -> Iterator[Task]:
        way: Collective = self._collective(self._own[number])
        yield Task(
            name=f"direct all-reduce {number}",
            ready_s=shard.ready_s * self._job.slowest,
            queue="direct all-reduce",
            order=number,
            overhead_s=way.num_messages * self._job.overhead_s,
            nbytes=shard.nbytes if way.usage else 0,
            usage=way.usage,
            latency_s=way.latency_s,
        )

    def _through_devices(self, number: int, shard: Shard) -> Iterator[Task]:
        pushes = [self._push(number, shard, worker) for worker in self._network.workers]
        yield from pushes
        before, after = self._stages(shard.proxies)
        names = tuple(task.name for task in pushes)
        gathered = self._between(f"contributions {number}", number, shard, before, names)
        reduced = self._reduction(number, shard, gathered.name)
        results = self._between(f"results {number}", number, shard, after, (reduced.name,))
        yield from (gathered, reduced, results)
        yield from (self._pull(number, shard, worker, results.name) for worker in self._network.workers)

    def _push(self, number: int, shard: Shard, worker: int) -> Task:
        usage, latency_s = self._path(worker, shard.proxies[worker])
        return Task(
            name=f"push {number} w{worker}",
            ready_s=shard.ready_s * self._job.disturbances.compute_factor(worker),
            queue=f"push w{worker} > {shard.proxies[worker]}",
            order=number,
            overhead_s=self._job.overhead_s,
            nbytes=shard.nbytes,
            usage=usage,
            latency_s=latency_s,
        )

    def _pull(self, number: int, shard: Shard, worker: int, after: str) -> Task:
        usage, latency_s = self._path(shard.proxies[worker], worker)
        return Task(
            name=f"pull {number} w{worker}",
            after=(after,),
            queue=f"pull w{worker} < {shard.proxies[worker]}",
            order=number,
            overhead_s=self._job.overhead_s,
            nbytes=shard.nbytes,
            usage=usage,
            latency_s=latency_s,
        )

    def _between(self, name: str, number: int, shard: Shard, stage: Stage, after: tuple[str, ...]) -> Task:
        return Task(
            name=name,
            after=after,
            queue=self._queue_of(name.split()[0], stage.usage),
            order=number,
            overhead_s=stage.num_messages * self._job.overhead_s,
            nbytes=shard.nbytes if stage.usage else 0,
            usage=stage.usage,
            latency_s=stage.latency_s,
        )

    def _queue_of(self, stage: str, usage: Usage) -> str:
        """Shards that take the same links between memory devices follow each other."""
        return f"{stage} {self._patterns.setdefault(usage, len(self._patterns))}" if usage else ""

    def _reduction(self, number: int, shard: Shard, after: str) -> Task:
        cores, name = self._job.sync_cores, f"reduce {number}"
        if cores is None:
            return Task(name=name, after=(after,), order=number)
        seconds = cores.seconds_per_byte("mean", shard.dtype)
        usage = tuple(
            (self._core_bucket(device), read * seconds)
            for device, read in bytes_read(self._network, shard.proxies).items()
        )
        return Task(name=name, after=(after,), order=number, nbytes=shard.nbytes, usage=usage)

    def _path_of(self, source: int, target: int) -> tuple[Usage, float]:
        copies = worker_copies(self._network)
        usage = usage_of(self._network, [Transfer(source, target, 1.0, copies)])
        return usage, self._network.route(source, target).latency_s

    def _core_bucket(self, device: int) -> str:
        return f"md{device - self._network.num_workers} sync cores"

    def _core_capacities(self) -> dict[str, float]:
        cores = self._job.sync_cores
        if cores is None:
            return {}
        return {self._core_bucket(device): float(cores.num_cores) for device in self._network.devices}

    def _bulk_usage(self) -> Usage:
        """Bytes in each bucket per byte of a large shard that goes through the memory devices."""
        largest = max(self._plan.shards, key=lambda shard: shard.nbytes)
        paths = [
            self._path(*ends)[0]
            for worker in self._network.workers
            for ends in ((worker, largest.proxies[worker]), (largest.proxies[worker], worker))
        ]
        return add_usages([*paths, *(stage.usage for stage in self._stages(largest.proxies))])

    def _memory(self) -> MemoryUse:
        """Workers keep parameters, gradients and states; memory devices a slot for each gradient of each client."""
        nbytes = self._job.trace.nbytes
        clients = self._network.num_workers / self._network.num_devices
        return MemoryUse(worker_bytes=nbytes * (2 + self._job.num_states), device_bytes=nbytes * clients)
