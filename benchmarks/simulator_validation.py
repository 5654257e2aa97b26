"""Steps of the simulator compared with steps of the real runtime: emulated, measured here, and over a cable.

    python benchmarks/simulator_validation.py [--parts emulated,measured,namespaces] [--workers N,N] [--quick]
        [--json FILE]

*emulated*: `coarse bench replay` on the links of other machines, 2 to 16 workers. *measured*: all-reduces and the
gradients of a model in this machine's host memory, 2 to 4 workers. *namespaces*: two nodes, network namespaces of
this machine, whose cable the kernel limits; needs root and iproute2.

The simulator predicts the last two from machine files that are profiled here first, by other programs than the one
that is predicted: the reduction kernel in one thread, and a plain TCP connection. Rows from which a figure of these
files was chosen are *fitted*; all others are *predicted*. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from node_network import Link, address_of, bits_per_s, connected_nodes, enter_namespace

from coarse.bench.harness.commands import WorkerJob
from coarse.bench.harness.worker_pool import WorkerPool, time_for
from coarse.bench.provenance import EMULATED, MEASURED, Provenance, append_records
from coarse.bench.replay.driver import ReplayCommands, ReplayPlan, run_replay
from coarse.bench.replay.trace import ComputeTrace, GradientEvent, load_trace, place_trace
from coarse.bench.sync.systems import CoarseRegistered, SyncCommands, sync_commands
from coarse.bench.timing import slowest_worker
from coarse.errors import CoarseError
from coarse.kernels._native import measure_reduction_limit
from coarse.machine.catalogue import load_machine
from coarse.machine.partition_table import PartitionTable
from coarse.machine.wiring import link_table
from coarse.simulator.events.engine import simulate
from coarse.simulator.events.first_come import FIRST_COME
from coarse.simulator.job import Job
from coarse.simulator.machines.network import LinkNetwork
from coarse.simulator.schemes.offload import offload_step
from coarse.simulator.setup import Setup
from coarse.simulator.training_step import simulate_step

MIB = 1 << 20
TOLERANCE = 0.10
FITTED, PREDICTED = "fitted", "predicted"
_INSTANT_S = 1e-9  # of a computation that there is none of
_ITEM_BYTES = 4
_LARGE_BYTES = 64 * MIB  # of one transfer over a cable
_LEAST_BYTES = 4096
_ROUNDS, _ITERATIONS = 3, 10
_BACKWARD_S = 0.2  # longer than the gradients of bert-small take in memory
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A time of the runtime, and the simulator's.

    Args:
        part: The part of the command.
        what: The case in words.
        basis: FITTED or PREDICTED.
        kind: MEASURED or EMULATED; the other time is simulated.
        real_s: Median of the runtime.
        simulated_s: The simulator's time.
    """

    part: str
    what: str
    basis: str
    kind: str
    real_s: float
    simulated_s: float

    @property
    def residual(self) -> float:
        """Relative to the runtime."""
        return self.simulated_s / self.real_s - 1


# ---- emulated ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """A step of `coarse bench replay`; `tflops` None takes the speed that the machine's GPU would have."""

    machine: str
    num_workers: int
    model: str = "bert-base"
    tflops: float | None = None
    schemes: tuple[str, ...] = ("offload", "workers", "coarse", "dense")
    time_dilation: float = 20.0


EMULATED_STEPS = (
    Emulated(machine="aws-p3", num_workers=2),
    Emulated(machine="aws-p3", num_workers=4),
    Emulated(machine="sdsc-p100", num_workers=2),
    Emulated(machine="aws-g4dn", num_workers=4, model="bert-large", schemes=("offload",)),
    Emulated(machine="sdsc-p100", num_workers=2, model="bert-large", tflops=9.3, schemes=("offload",)),
    Emulated(
        machine="cxl2-switch",
        num_workers=8,
        model="bert-small",
        tflops=5.0,
        schemes=("offload",),
        time_dilation=60.0,
    ),
    Emulated(
        machine="cxl2-switch",
        num_workers=16,
        model="bert-small",
        tflops=5.0,
        schemes=("offload",),
        time_dilation=120.0,
    ),
)
QUICK_STEPS = (replace(EMULATED_STEPS[0], model="bert-small", schemes=("offload",)),)


def emulated_rows(workers: Sequence[int] | None, is_quick: bool) -> Iterator[Row]:
    """The simulator's links serve first come, first served, as the emulator's; `workers` None takes every case."""
    for case in QUICK_STEPS if is_quick else EMULATED_STEPS:
        if workers is not None and case.num_workers not in workers:
            continue
        gpu = load_machine(case.machine).topology.gpu
        trace = place_trace(load_trace(case.model), gpu=gpu, tflops=case.tflops)
        plan = ReplayPlan(
            schemes=case.schemes,
            trace=trace,
            machine=case.machine,
            num_workers=case.num_workers,
            time_dilation=case.time_dilation,
            steps=2 if is_quick else 4,
        )
        setup = Setup(machine=case.machine, trace=trace, num_workers=case.num_workers, service=FIRST_COME)
        for result in run_replay(plan, _progress):
            yield Row(
                part="emulated",
                what=f"{case.machine}, {case.num_workers} workers, {case.model}, {result.scheme}",
                basis=PREDICTED,
                kind=EMULATED,
                real_s=result.step.p50_us * 1e-6,
                simulated_s=simulate_step(setup, result.scheme).step_s,
            )


# ---- measured here ----

_SESSION = {"memory_devices": "1", "sync_cores": 1, "profile": "off"}
"""One memory device with one sync core, whose speed is that of the profile's one thread."""


def measured_rows(workers: Sequence[int], is_quick: bool) -> Iterator[Row]:
    rounds = 1 if is_quick else _ROUNDS
    for num_workers in workers:
        least_s = _median(_sync_seconds(num_workers, _LEAST_BYTES, rounds * 100, spin_us=0))
        latency_us = least_s / 2 * 1e6
        kernel = _kernel_seconds(num_workers, _LEAST_BYTES)
        with _machine_file(_host_memory_file(num_workers, _LEAST_BYTES, kernel, latency_us)) as machine:
            simulated_s = _simulated_step_s(machine, num_workers, _one_tensor(_LEAST_BYTES))
            yield _measured(f"4 KiB, waits that sleep, {num_workers} workers", FITTED, least_s, simulated_s)
        for nbytes in (16 * MIB,) if is_quick else (16 * MIB, 64 * MIB):
            trace = _one_tensor(nbytes)
            run = partial(_sync_seconds, num_workers, nbytes)
            yield _measured_row(f"{nbytes // MIB} MiB", num_workers, trace, rounds, run, latency_us)
        trace = replace(load_trace("bert-small"), forward_s=_INSTANT_S, backward_s=_INSTANT_S)
        for what, each in (
            ("gradients of bert-small at once", trace),
            ("gradients of bert-small in a backward pass", replace(trace, backward_s=_BACKWARD_S)),
        ):
            run = partial(_step_seconds, num_workers, each)
            yield _measured_row(what, num_workers, each, rounds, run, latency_us)


def _measured_row(
    what: str,
    num_workers: int,
    trace: ComputeTrace,
    rounds: int,
    run: Callable[[int], Sequence[float]],
    latency_us: float,
) -> Row:
    """Kernel and runtime in turns, so that both see the same neighbours of this machine."""
    _progress(f"{what}, {num_workers} workers")
    kernel: list[float] = []
    real: list[float] = []
    for _ in range(rounds):
        kernel += _kernel_seconds(num_workers, trace.nbytes)
        real += run(_ITERATIONS)
    with _machine_file(_host_memory_file(num_workers, trace.nbytes, kernel, latency_us)) as machine:
        simulated_s = _simulated_step_s(machine, num_workers, trace)
    return _measured(f"{what}, {num_workers} workers", PREDICTED, _median(real), simulated_s)


def _measured(what: str, basis: str, real_s: float, simulated_s: float) -> Row:
    return Row(part="measured", what=what, basis=basis, kind=MEASURED, real_s=real_s, simulated_s=simulated_s)


def _kernel_seconds(num_workers: int, nbytes: int) -> list[float]:
    """Seconds of the reduction kernel in one thread on as many arrays, without the runtime."""
    return list(measure_reduction_limit(num_workers, nbytes, _ITERATIONS, 1))


def _sync_seconds(num_workers: int, nbytes: int, iterations: int, spin_us: int = -1) -> Sequence[float]:
    """Seconds of `coarse bench sync`'s all-reduce on its slowest worker.

    Args:
        num_workers: Number of workers.
        nbytes: Size of each worker's array.
        iterations: Number of all-reduces.
        spin_us: The session's; with 0 every wait sleeps, as those for large arrays do with any value.
    """
    with WorkerPool("coarse", sync_commands, num_workers, {**_SESSION, "spin_us": spin_us}) as pool:
        return _all_reduces(pool, nbytes, iterations)


def _all_reduces(pool: WorkerPool, nbytes: int, iterations: int) -> Sequence[float]:
    pool.ask("prepare", nbytes=nbytes, dtype="float32")
    pool.ask("verify")
    return [float(each) for each in slowest_worker(pool.ask("run", iterations=iterations))]


def _step_seconds(num_workers: int, trace: ComputeTrace, steps: int) -> Sequence[float]:
    """Seconds of a step of `coarse bench replay` on its slowest worker, without emulated links."""
    options = {
        "trace": trace.to_json(),
        "has_compute": True,
        "known_ways": {},
        "num_nodes": 1,
        "time_dilation": 1.0,
        **_SESSION,
    }
    with WorkerPool("offload", ReplayCommands, num_workers, options) as pool:
        pool.ask("verify")
        run = pool.ask("run", time_for(steps), steps=steps, has_compute=True)
    return [float(each) for each in slowest_worker(run)]


def _host_memory_file(num_workers: int, nbytes: int, kernel_s: Sequence[float], latency_us: float) -> str:
    """Host memory: the kernel reads and writes each worker's array once."""
    arrays = f"{num_workers} arrays of {nbytes} bytes"
    gbytes_per_s = 2 * num_workers * nbytes / _median(kernel_s) / 1e9
    rate = _figure(gbytes_per_s, f"the reduction kernel in one thread, {arrays}")
    latency = _figure(latency_us, f"half of an all-reduce of 4 KiB whose waits sleep, {num_workers} workers")
    return f"""description = "host memory of the machine on which it was measured"

[topology]
kind = "expanders"

[link.memory]
scope = "host"
gbytes_per_s = {rate}
duplex_gbytes_per_s = {rate}

{_paths(latency, "memory")}"""


def _paths(latency: str, link: str) -> str:
    names = ("worker-device", "device-device", "worker-worker")
    return "\n".join(f'[path.{name}]\nlatency_us = {latency}\nover = ["{link}"]\n' for name in names)


def _figure(value: float, source: str) -> str:
    return f'{{ value = {value:.6g}, source = "{source}", kind = "measured" }}'


def _simulated_step_s(machine: str, num_workers: int, trace: ComputeTrace) -> float:
    """With one memory device for all workers."""
    setup = Setup(machine=machine, trace=trace, num_workers=num_workers, workers_per_device=num_workers)
    return simulate_step(setup, "offload").step_s


def _one_tensor(nbytes: int) -> ComputeTrace:
    event = GradientEvent(name="tensor", num_elements=nbytes // _ITEM_BYTES, dtype="float32", ready=0.0)
    return ComputeTrace(
        model="one tensor",
        batch=1,
        sequence=0,
        forward_s=_INSTANT_S,
        backward_s=_INSTANT_S,
        flops=1.0,
        events=(event,),
        source="made up",
    )


# ---- over a cable ----


def namespace_rows(is_quick: bool) -> Iterator[Row]:
    """Two nodes with a worker each; the rate of the cable that carries payload is fitted at 1 Gbit/s."""
    iterations = 3 if is_quick else 7
    sizes = (16 * MIB,) if is_quick else (32 * MIB, 64 * MIB)
    share = 0.0
    row = partial(Row, part="namespaces", kind=MEASURED)
    for rate in ("1gbit",) if is_quick else ("1gbit", "500mbit", "2gbit"):
        nominal = bits_per_s(rate) / 8
        with connected_nodes(Link(rate=rate), 2) as names, _nodes(names) as pool:
            if not share:
                seconds = max(pool.ask("transfer", nbytes=_LARGE_BYTES))
                share = _LARGE_BYTES / seconds / nominal
                yield row(
                    what=f"64 MiB by one TCP connection, {rate}",
                    basis=FITTED,
                    real_s=seconds,
                    simulated_s=_LARGE_BYTES / (share * nominal),
                )
            for nbytes in sizes:
                _progress(f"all-reduce of {nbytes} bytes over {rate}")
                real_s = _median(_all_reduces(pool, nbytes, iterations))
                pool.ask("release")
                yield row(
                    what=f"all-reduce of {nbytes // MIB} MiB, 2 nodes, {rate}",
                    basis=PREDICTED,
                    real_s=real_s,
                    simulated_s=_simulated_over_cable_s(share * nominal / 1e9, nbytes),
                )


def _nodes(namespaces: Sequence[str]) -> WorkerPool:
    return WorkerPool("coarse", NamespaceCommands, len(namespaces), {"namespaces": list(namespaces)})


class NamespaceCommands(SyncCommands):
    """The commands of a worker on a node of its own."""

    def __init__(self, job: WorkerJob) -> None:
        self._job, self._namespace = job, job.options["namespaces"][job.rank]
        node = {"node": f"n{job.rank}", "node_address": address_of(job.rank)}
        super().__init__(replace(job, options={**_SESSION, **node}), CoarseRegistered)

    def setup(self) -> int:
        enter_namespace(self._namespace)
        return super().setup()

    def transfer(self, nbytes: int) -> float:
        """Seconds in which the second node sends bytes to the first one, over one connection."""
        address = self._job.directory / "transfer"
        if self._job.rank:
            payload = bytes(nbytes)
            with _connected(address) as peer:
                return _timed(lambda: (peer.sendall(payload), peer.recv(1)))
        with socket.create_server((address_of(0), 0)) as server:
            address.with_suffix(".new").write_text(str(server.getsockname()[1]))
            address.with_suffix(".new").rename(address)
            peer, _ = server.accept()
            with peer:
                left = nbytes
                while left:
                    left -= len(peer.recv(min(left, _PIECE_BYTES)))
                peer.sendall(b"1")
        return 0.0


def _connected(address: Path) -> socket.socket:
    """A connection to the server that writes its port to a file."""
    deadline = time.monotonic() + 30
    while not address.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no server has written its port to {address} in 30 s")
        time.sleep(0.01)
    return socket.create_connection((address_of(0), int(address.read_text())))


def _timed(action: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    action()
    return time.perf_counter() - begin_s


def _simulated_over_cable_s(gbytes_per_s: float, nbytes: int) -> float:
    """Nodes whose memory is a hundred times faster than their network."""
    rate = _figure(gbytes_per_s, "one TCP connection over the cable")
    memory = _figure(100 * gbytes_per_s, "far above the cable's")
    latency = _figure(100.0, "far below the transfer's time")
    text = f"""description = "two namespaces and a cable"

[topology]
kind = "expanders"

[link.memory]
scope = "host"
gbytes_per_s = {memory}

{_paths(latency, "memory")}
[network]
latency_us = {latency}
gbytes_per_s = {rate}
"""
    with _machine_file(text) as machine:
        table = PartitionTable.even(num_workers=1, num_devices=1)
        links = link_table(load_machine(machine), table, num_nodes=2)
    step = offload_step(
        Job(network=LinkNetwork(links=links, local_devices=(0, 1)), trace=_one_tensor(nbytes))
    )
    capacities = {**step.network.capacities, **step.extra_capacities}
    return simulate(step.tasks, capacities, channels=step.channels).end_s


@contextlib.contextmanager
def _machine_file(text: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "profiled.toml")
        path.write_text(text, encoding="utf-8")
        yield str(path)


# ---- command ----


def main() -> int:
    arguments = _parse()
    parts: dict[str, Callable[[], Iterator[Row]]] = {
        "emulated": lambda: emulated_rows(arguments.workers, arguments.quick),
        "measured": lambda: measured_rows((2,) if arguments.quick else (2, 3, 4), arguments.quick),
        "namespaces": lambda: namespace_rows(arguments.quick),
    }
    rows: list[Row] = []
    failures = 0
    for name in arguments.parts:
        try:
            for row in parts[name]():
                _print_row(row)
                rows.append(row)
        except (CoarseError, OSError, ValueError) as error:
            print(
                f"{name}: stopped after {sum(row.part == name for row in rows)} rows: {error}",
                file=sys.stderr,
            )
            failures += 1
    _print_summary(rows)
    if arguments.json is not None:
        provenance = Provenance.here()
        for kind in (MEASURED, EMULATED):
            records = [{**asdict(row), "residual": row.residual} for row in rows if row.kind == kind]
            append_records(arguments.json, records, provenance, kind=kind)
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--parts",
        type=lambda text: text.split(","),
        default=["emulated", "measured", "namespaces"],
        help="default: all three",
    )
    parser.add_argument(
        "--workers",
        type=lambda text: [int(each) for each in text.split(",")],
        metavar="N[,N]",
        help="of emulated steps; default: 2 to 16",
    )
    parser.add_argument("--quick", action="store_true", help="few repeats: checks that the command works")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    return parser.parse_args()


def _print_row(row: Row) -> None:
    print(
        f"{row.part:<11}{row.what:<52}{row.real_s * 1e3:>11.3f} ms {row.kind:<9}{row.simulated_s * 1e3:>11.3f} ms "
        f"simulated{row.residual:>+8.1%}  {row.basis}",
        flush=True,
    )


def _print_summary(rows: Sequence[Row]) -> None:
    for basis in (FITTED, PREDICTED):
        some = [row for row in rows if row.basis == basis]
        near = sum(abs(row.residual) <= TOLERANCE for row in some)
        print(f"{basis}: {near} of {len(some)} within {TOLERANCE:.0%}")
    print(f"on {Provenance.here().machine}, load {os.getloadavg()[0]:.1f}")


def _median(seconds: Sequence[float]) -> float:
    return float(statistics.median(seconds))


def _progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
