"""`make experiments`: runs all or the named experiments and rewrites the tables of results.

python -m experiments                                        # all except ON_DEMAND
python -m experiments fig15_routing --quick --results /some/folder
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coarse.cli.arguments import folder_to_write
from experiments.common import Experiment, Options, run_experiment, write_tables
from experiments.fig08_bandwidth_matrix.run import EXPERIMENT as FIG08
from experiments.fig09_timeline.run import EXPERIMENT as FIG09
from experiments.fig10_deadlock.run import EXPERIMENT as FIG10
from experiments.fig14_bandwidth_by_size.run import EXPERIMENT as FIG14
from experiments.fig15_routing.run import EXPERIMENT as FIG15
from experiments.fig16_largest_batch.run import EXPERIMENT as FIG16
from experiments.fig17_blocked_time.run import EXPERIMENT as FIG17
from experiments.recovery.run import EXPERIMENT as RECOVERY
from experiments.switch_over.run import EXPERIMENT as SWITCH_OVER

EXPERIMENTS = (FIG08, FIG09, FIG10, FIG14, FIG15, FIG17, SWITCH_OVER)
ON_DEMAND = (FIG16, RECOVERY)
"""Run only if named: FIG16 needs its own control group, and both take longer than all others together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiments. Prints results that differ from the paper; they are not failures."""
    by_default = [experiment.name for experiment in EXPERIMENTS]
    names = [experiment.name for experiment in (*EXPERIMENTS, *ON_DEMAND)]
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description="Runs the paper's experiments."
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="EXPERIMENT",
        help=f"of {', '.join(names)}; default: {', '.join(by_default)}",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, to see that they work")
    parser.add_argument(
        "--results", type=folder_to_write, metavar="FOLDER", help="write results below it, no tables"
    )
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no experiment is named {', '.join(unknown)}; there are {', '.join(names)}")
    if arguments.quick and arguments.results is None:
        parser.error("the results in the tables are of full runs; say with --results FOLDER where these go")
    chosen = [each for each in (*EXPERIMENTS, *ON_DEMAND) if each.name in (arguments.names or by_default)]
    for each in chosen:
        _run(each, arguments.quick, arguments.results)
    if arguments.results is None:
        write_tables(chosen)
    return 0


def _run(experiment: Experiment, is_quick: bool, results: Path | None) -> None:
    """Runs one experiment. Prints a line at its start, at its end, and for each deviation from the paper."""
    print(f"{experiment.figure}: {experiment.name}", flush=True)
    options = Options(is_quick=is_quick, progress=_say)
    if results is not None:
        options = replace(options, results=results / experiment.name)
    begin = time.monotonic()
    outcome = run_experiment(experiment, options)
    compared = [finding for finding in outcome.findings if finding.checks]
    for finding in compared:
        if finding.deviations:
            _say(f"DIFFERS: {finding.ran}: expected {finding.expected}, got {finding.found}")
    num_within = sum(not finding.deviations for finding in compared)
    _say(f"{time.monotonic() - begin:.1f} s, {num_within} of {len(compared)} within what is expected")


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
