"""How exactly an emulated session paces its machine's links, seen from its workers: one JSON record per row.

    python benchmarks/pacing_error.py [--machine aws-p3] [--time-dilation 10] [--repeats 15] [--json FILE]

A worker times transfers of every kind, alone on idle links, and the reduction of one shard by every algorithm, with
its push and pull. The error is the median time divided by the link table's time, minus one. The benchmark fails if
the error exceeds 5% for 1 MiB or more. Run it on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from coarse.bench.harness.rendezvous import SessionCommands
from coarse.bench.harness.worker_pool import WorkerPool
from coarse.bench.provenance import EMULATED, Provenance, append_records
from coarse.client.link_probes import Probe
from coarse.kernels._native import ProbeKind
from coarse.machine.links import LinkTable
from coarse.schema import TensorSpec
from coarse.session import Session

NUM_WORKERS = 2
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
ALGORITHMS = ("exchange", "ring", "direct")
SHARD_SIZES = (1 << 20, 16 << 20)
RING_MESSAGE_BYTES = 64 << 10
JUDGED_FROM_BYTES = 1 << 20
MOST_ERROR = 0.05


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--machine", default="aws-p3", help="default: %(default)s")
    parser.add_argument("--time-dilation", type=float, default=10.0, metavar="X", help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the records to FILE")
    arguments = parser.parse_args()
    records = measure(arguments.machine, arguments.time_dilation, arguments.repeats)
    provenance = Provenance.here()
    print(
        f"links of {arguments.machine}, {arguments.time_dilation:g} times slower; emulated on {provenance.machine}"
    )
    print(f"{'transfer':<22}{'KiB':>8}{'expected us':>14}{'median us':>14}{'error':>9}{'worst':>9}")
    for record in records:
        print(
            f"{record['transfer']:<22}{record['bytes'] >> 10:>8}{record['expected_us']:>14.1f}"
            f"{record['median_us']:>14.1f}{record['error']:>9.2%}{record['worst_error']:>9.2%}"
        )
    if arguments.json is not None:
        append_records(arguments.json, records, provenance, kind=EMULATED)
    largest = max(abs(record["error"]) for record in records if record["bytes"] >= JUDGED_FROM_BYTES)
    print(f"largest median error from 1 MiB on: {largest:.2%} (at most {MOST_ERROR:.0%} is exact enough)")
    return 0 if largest <= MOST_ERROR else 1


def measure(machine: str, time_dilation: float, repeats: int) -> list[dict[str, Any]]:
    """Times the links, then each algorithm."""
    settings = {"machine": machine, "time_dilation": time_dilation}
    records = _run(settings, "probe", repeats)
    for algorithm in ALGORITHMS:
        reduction = {"algorithm": algorithm, "routing": "local", "dual_sync": "off"}
        records += _run({**settings, **reduction, "shard_bytes": SHARD_SIZES[-1]}, "reduce", repeats)
    return records


def _run(settings: dict[str, Any], command: str, repeats: int) -> list[dict[str, Any]]:
    """Starts a job of NUM_WORKERS workers and as many memory devices; returns the records of worker 0."""
    with WorkerPool("pacing error", PacingCommands, NUM_WORKERS, settings) as pool:
        records: list[dict[str, Any]] = pool.ask(command, repeats=repeats)[0]
    return records


class PacingCommands(SessionCommands):
    """The commands of a worker."""

    def probe(self, repeats: int) -> list[dict[str, Any]]:
        """Worker 0 times all transfers, while the links are otherwise idle."""
        records = _time_probes(self.session, repeats)
        self.session.barrier()
        return records

    def reduce(self, repeats: int) -> list[dict[str, Any]]:
        """Times a reduction of each size."""
        records = _time_reductions(self.session, repeats)
        self.session.barrier()
        return records


def _time_probes(session: Session, repeats: int) -> list[dict[str, Any]]:
    assert session.emulation is not None
    probes = session.open_probes(SIZES[-1])
    session.barrier()
    records = []
    if session.identity.rank == 0:
        for name, nbytes, together, expected_s in _cases(session.emulation.links):
            probes.time_s(together, nbytes)  # touches the memory
            times_s = [probes.time_s(together, nbytes) for _ in range(repeats)]
            records.append(_record(session, name, nbytes, expected_s, times_s))
    return records


def _time_reductions(session: Session, repeats: int) -> list[dict[str, Any]]:
    assert session.emulation is not None
    algorithm, records = session.settings.algorithm, []
    for nbytes in SHARD_SIZES:
        spec = TensorSpec(name="shard", dtype="float32", num_elements=nbytes // 4, op="sum")
        group = session.register(f"{nbytes} bytes", [spec])
        times_s = []
        for _ in range(1 + repeats):  # the first one touches the memory
            session.barrier()
            begin_s = time.perf_counter()
            group.push(0)
            group.pull_all()
            times_s.append((time.perf_counter() - begin_s) / session.emulation.time_dilation)
        expected_s = _reduction_seconds(session.emulation.links, algorithm, nbytes)
        records.append(_record(session, f"by {algorithm}", nbytes, expected_s, times_s[1:]))
    return records


def _record(
    session: Session, transfer: str, nbytes: int, expected_s: float, times_s: list[float]
) -> dict[str, Any]:
    assert session.emulation is not None
    errors = [time_s / expected_s - 1 for time_s in times_s]
    return {
        "bench": "pacing-error",
        "machine_emulated": session.emulation.machine,
        "time_dilation": session.emulation.time_dilation,
        "transfer": transfer,
        "bytes": nbytes,
        "repeats": len(times_s),
        "expected_us": expected_s * 1e6,
        "median_us": statistics.median(times_s) * 1e6,
        "error": statistics.median(errors),
        "worst_error": max(errors, key=abs),
    }


def _cases(links: LinkTable) -> Iterator[tuple[str, int, list[Probe], float]]:
    """Name, bytes, probes that run at once, and their seconds according to the links."""
    worker, other = links.worker(0), links.worker(1)
    for nbytes in SIZES:
        for device, name in ((0, "local"), (1, "remote")):
            end = links.device(device)
            push = Probe(kind=ProbeKind.PUSH, device=device)
            pull = Probe(kind=ProbeKind.PULL, device=device)
            yield f"push {name}", nbytes, [push], _seconds(links, worker, end, nbytes)
            yield f"pull {name}", nbytes, [pull], _seconds(links, end, worker, nbytes)
            yield f"both {name}", nbytes, [push, pull], _duplex_seconds(links, worker, end, nbytes)
        devices = Probe(kind=ProbeKind.BETWEEN_DEVICES, device=0, target=1, slot_owner=1)
        workers = Probe(kind=ProbeKind.BETWEEN_WORKERS, device=0, target=1)
        yield "between devices", nbytes, [devices], _seconds(links, links.device(0), links.device(1), nbytes)
        yield "between workers", nbytes, [workers], _seconds(links, worker, other, nbytes)


def _reduction_seconds(links: LinkTable, algorithm: str, nbytes: int) -> float:
    """Seconds of the push to the local memory device, the reduction between both devices, and the pull."""
    worker, one, other = links.worker(0), links.device(0), links.device(1)
    between_s = {
        "exchange": 2 * _duplex_seconds(links, one, other, nbytes // 2),
        "ring": nbytes / RING_MESSAGE_BYTES * _duplex_seconds(links, one, other, RING_MESSAGE_BYTES),
        "direct": _seconds(links, other, one, nbytes) + _seconds(links, one, other, nbytes),
    }
    return _seconds(links, worker, one, nbytes) + between_s[algorithm] + _seconds(links, one, worker, nbytes)


def _seconds(links: LinkTable, source: int, target: int, nbytes: int) -> float:
    latency_s = links.path(source, target).latency_us * 1e-6
    return nbytes / (links.bandwidth_gbytes_per_s(source, target) * 1e9) + latency_s


def _duplex_seconds(links: LinkTable, one: int, other: int, nbytes: int) -> float:
    latency_s = max(links.path(one, other).latency_us, links.path(other, one).latency_us) * 1e-6
    return 2 * nbytes / (links.duplex_gbytes_per_s(one, other) * 1e9) + latency_s


if __name__ == "__main__":
    raise SystemExit(main())
