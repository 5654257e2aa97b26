"""Figure 14: the smallest transfer that fills its link."""

from __future__ import annotations

from coarse.profiler.figures import draw_by_size, format_size
from coarse.profiler.profile import Profile
from coarse.profiler.shard_size import plan_shard_size
from experiments.common import Experiment, Finding, Options, Outcome, main
from experiments.expectation import Expectation, judge_number
from experiments.profiles import curves_as_json, get_profile, pacing_as_json, plan_tables

FULL_FROM_MIB = Expectation(what="full from", low=2, high=2, unit=" MiB on", source="III-E, Fig 14")
"""Section III-E: below 2 MB the bus is not saturated; Figure 14: at 2 MB or higher it is. Exact: of the tested sizes,
which are powers of two, it is this one."""

OBSERVED_ON = ("aws-p3", "sdsc-p100")
"""The machines for which section III-E states it. Figure 14 itself shows the paper's FPGA board."""


def compare(profile: Profile) -> Finding:
    """The smallest size that reaches full bandwidth. It is also the size of shards."""
    shard = plan_shard_size(profile, plan_tables(profile))
    is_observed = profile.key.machine in OBSERVED_ON
    return Finding(
        ran=f"pushes and pulls by size, {profile.key.machine}",
        checks=(judge_number(FULL_FROM_MIB, shard.nbytes / 2**20),) if is_observed else (),
        note=f"{shard.full_fraction:.0%} of {shard.peak_gbytes_per_s:.3g} GB/s each way "
        f"at {format_size(shard.nbytes)}",
        kind=profile.kind,
    )


def run(options: Options) -> Outcome:
    """Profiles each machine; the picture shows its worker 0."""
    profiles = [get_profile(machine, is_quick=options.is_quick) for machine in options.machines]
    pictures = {}
    for profile in profiles:
        tables = plan_tables(profile)
        pictures[f"by-size-{profile.key.machine}"] = draw_by_size(
            profile, table=tables[0], shard_bytes=plan_shard_size(profile, tables).nbytes
        )
    return Outcome(
        findings=[compare(profile) for profile in profiles],
        data=[
            curves_as_json(profile) | pacing_as_json(machine, is_quick=options.is_quick)
            for machine, profile in zip(options.machines, profiles, strict=True)
        ],
        pictures=pictures,
    )


EXPERIMENT = Experiment(
    name="fig14_bandwidth_by_size",
    figure="Fig 14",
    machines=("aws-g4dn", "aws-p3", "sdsc-p100", "host"),
    assumption="latencies of the machine files",
    minutes=0.1,
    run=run,
)

if __name__ == "__main__":
    raise SystemExit(main(EXPERIMENT))
