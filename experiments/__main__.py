"""`make experiments`: runs all or the named experiments and rewrites the tables of results.

python -m experiments                                        # all except ON_DEMAND
python -m experiments fig15_routing --quick --results /some/folder
python -m experiments --compare FOLDER FOLDER                # whether two runs have the same results

Experiments with results of this commit and machine are not run again, so that a second call goes on where the first
one ended.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from coarse.cli.arguments import folder_to_write
from coarse.errors import CoarseError
from experiments.common import (
    BASES_BEGIN,
    BASES_END,
    FOLDER,
    Experiment,
    Options,
    bases_lines,
    is_finished,
    replace_table,
    run_experiment,
    write_tables,
)
from experiments.elastic.run import EXPERIMENT as ELASTIC
from experiments.fig02_communication_share.run import EXPERIMENT as FIG02
from experiments.fig08_bandwidth_matrix.run import EXPERIMENT as FIG08
from experiments.fig09_timeline.run import EXPERIMENT as FIG09
from experiments.fig10_deadlock.run import EXPERIMENT as FIG10
from experiments.fig13_cci_bandwidth.run import EXPERIMENT as FIG13
from experiments.fig14_bandwidth_by_size.run import EXPERIMENT as FIG14
from experiments.fig15_routing.run import EXPERIMENT as FIG15
from experiments.fig16_largest_batch.run import EXPERIMENT as FIG16_BATCH
from experiments.fig16_training_time.run import EXPERIMENT as FIG16_TIME
from experiments.fig17_blocked_time.run import EXPERIMENT as FIG17
from experiments.recovery.run import EXPERIMENT as RECOVERY
from experiments.repeatability import compare_folders
from experiments.switch_over.run import EXPERIMENT as SWITCH_OVER

EXPERIMENTS = (FIG02, FIG08, FIG09, FIG10, FIG13, FIG14, FIG15, FIG16_TIME, FIG17, SWITCH_OVER)
"""Within a process, FIG16_TIME and FIG17 share their replays, and FIG08, FIG09, FIG14, FIG15 and SWITCH_OVER the
profiles of machines; the first of them takes the time."""

ON_DEMAND = (FIG16_BATCH, RECOVERY, ELASTIC)
"""Run only if named: FIG16_BATCH needs its own control group, and together they take longer than all others."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the experiments, each also if another one has failed, or compares the results of two runs.

    Returns:
        0, or 1 if an experiment failed or a value has moved. Results that differ from the paper are not failures.
    """
    every = (*EXPERIMENTS, *ON_DEMAND)
    arguments = _parse(argv)
    if arguments.compare:
        return compare_folders(*arguments.compare)
    names = arguments.names or [experiment.name for experiment in EXPERIMENTS]
    chosen = [each for each in every if each.name in names]
    failures = {}
    print(
        f"{len(chosen)} experiments, about {sum(each.minutes for each in chosen):.0f} minutes on two quiet cores"
    )
    for each in chosen:
        options = _options(each, arguments)
        if not arguments.again and is_finished(each, options):
            print(f"{each.figure}: {each.name} is finished at this commit; --again runs it once more")
            continue
        if error := _run(each, options):
            failures[each.name] = error
    if arguments.results is None:
        write_tables([each for each in chosen if each.name not in failures])
        replace_table(FOLDER / "README.md", bases_lines(every), (BASES_BEGIN, BASES_END))
    for name, error in failures.items():
        print(f"FAILED: {name}: {error}", file=sys.stderr)
    print(f"{len(chosen) - len(failures)} of {len(chosen)} experiments have results")
    return 1 if failures else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    by_default = [experiment.name for experiment in EXPERIMENTS]
    names = [*by_default, *(experiment.name for experiment in ON_DEMAND)]
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
        "--again", action="store_true", help="run also those that are finished at this commit"
    )
    parser.add_argument(
        "--results", type=folder_to_write, metavar="FOLDER", help="write results below it, no tables"
    )
    parser.add_argument(
        "--compare",
        type=Path,
        nargs=2,
        metavar="FOLDER",
        help="run nothing; compare the results below two folders, as --results writes them",
    )
    arguments = parser.parse_args(argv)
    unknown = sorted(set(arguments.names) - set(names))
    if unknown:
        parser.error(f"no experiment is named {', '.join(unknown)}; there are {', '.join(names)}")
    if arguments.quick and arguments.results is None:
        parser.error("the results in the tables are of full runs; say with --results FOLDER where these go")
    return arguments


def _options(experiment: Experiment, arguments: argparse.Namespace) -> Options:
    results = None if arguments.results is None else arguments.results / experiment.name
    return Options(is_quick=arguments.quick, progress=_say, results=results)


def _run(experiment: Experiment, options: Options) -> str:
    """Runs one experiment. Prints a line at its start, at its end, and for each deviation from the paper.

    Returns:
        The error if it failed; "" otherwise.
    """
    print(f"{experiment.figure}: {experiment.name}, about {experiment.minutes:g} min", flush=True)
    begin = time.monotonic()
    try:
        outcome = run_experiment(experiment, options)
    except Exception as error:
        if not isinstance(error, CoarseError):  # their messages say everything
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    compared = [finding for finding in outcome.findings if finding.checks]
    for finding in compared:
        if finding.deviations:
            _say(f"DIFFERS: {finding.ran}: expected {finding.expected}, got {finding.found}")
    num_within = sum(not finding.deviations for finding in compared)
    _say(f"{time.monotonic() - begin:.1f} s, {num_within} of {len(compared)} within what is expected")
    return ""


def _say(text: str) -> None:
    print(f"  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
