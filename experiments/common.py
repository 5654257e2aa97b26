"""Shared by all experiments: arguments, results with their provenance, and the tables in the READMEs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from coarse.bench.provenance import Provenance
from coarse.cli.arguments import folder_to_write
from coarse.errors import CoarseError
from coarse.profiler.figures import save_figure
from coarse.profiler.profile import PROFILE_KINDS
from experiments.expectation import WITHIN, Check, check_as_json, check_from_json

FOLDER = Path(__file__).resolve().parent
PAPER_MACHINES = ("aws-g4dn", "aws-p3", "sdsc-p100")
"""In the order of the paper's Figure 15: T4, V100, P100."""

ALL_MACHINES = (*PAPER_MACHINES, "host")
"""Includes this machine, for which the paper has no figures."""

DIFFERS = "differs"
"""Verdict of a row with a check that is not WITHIN; the experiment's README gives the reason."""

TABLE_BEGIN, TABLE_END = "<!-- results -->", "<!-- end of results -->"
BASES_BEGIN, BASES_END = "<!-- bases -->", "<!-- end of bases -->"
_DIRTY = "-dirty"  # the end of a commit with uncommitted changes
_TABLE_HEAD = "| figure | what is run here | expected | what came out | verdict | kind |"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options from the command line.

    Args:
        machines: Names of machine profiles, for experiments that use them.
        is_quick: Fewer repeats, which takes seconds: a check that the experiment works. Do not keep these figures.
        results: Folder for the results; the experiment's own folder by default.
        progress: Called with a line of text from time to time.
    """

    machines: tuple[str, ...] = ALL_MACHINES
    is_quick: bool = False
    results: Path | None = None
    progress: Callable[[str], None] = lambda text: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A row of the results table.

    Args:
        ran: The run and its machine.
        checks: Measurements beside expectations; none if the paper gives nothing to compare with.
        note: Further figures, which are not compared.
        kind: Measured, emulated or simulated.

    Raises:
        ValueError: If the kind is unknown, a text would break the table, or there is neither check nor note.
    """

    ran: str
    checks: tuple[Check, ...] = ()
    note: str = ""
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in PROFILE_KINDS:
            raise ValueError(f"kind {self.kind!r} is none of {', '.join(PROFILE_KINDS)}")
        if not self.checks and not self.note:
            raise ValueError(f"{self.ran}: no measurement")
        for text in (self.ran, self.expected, self.found):
            if "|" in text or "\n" in text:
                raise ValueError(f"a cell of a table holds no | and no line break: {text!r}")

    @property
    def expected(self) -> str:
        """All expectations, in words."""
        return "; ".join(check.expected for check in self.checks) or "nothing"

    @property
    def found(self) -> str:
        """All measurements, in words."""
        return "; ".join(filter(None, (*(check.found for check in self.checks), self.note)))

    @property
    def deviations(self) -> list[str]:
        """The verdict of each check that differs, after the name of its quantity."""
        return [f"{check.what} {check.verdict}".strip() for check in self.checks if check.verdict != WITHIN]

    @property
    def verdict(self) -> str:
        """WITHIN, or DIFFERS if any check does; "" without an expectation."""
        return "" if not self.checks else DIFFERS if self.deviations else WITHIN

    def cells(self) -> list[str]:
        """The row without its first cell."""
        deviations = ", ".join(self.deviations)
        verdict = f"**{DIFFERS}**: {deviations}" if deviations else self.verdict
        return [self.ran, self.expected, self.found, verdict, self.kind]

    def as_json(self) -> dict[str, Any]:
        """The fields and the verdict."""
        return {
            "ran": self.ran,
            "checks": [check_as_json(check) for check in self.checks],
            "note": self.note,
            "verdict": self.verdict,
            "kind": self.kind,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Finding:
        """Reads as_json(); verdicts are computed anew."""
        checks = tuple(map(check_from_json, values["checks"]))
        return cls(ran=values["ran"], checks=checks, note=values["note"], kind=values["kind"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of one run of an experiment.

    Args:
        findings: Rows of the results table.
        data: The figures behind the rows: JSON values, each with its "kind".
        pictures: Plots by file name without suffix.
    """

    findings: Sequence[Finding]
    data: Sequence[Mapping[str, Any]]
    pictures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for values in self.data:
            if values.get("kind") not in PROFILE_KINDS:
                raise ValueError(f"figures without a kind: {values!r:.200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """An experiment: its folder, what it rests on, and how to run it.

    Args:
        name: Name of its folder.
        figure: The paper's figure, e.g. "Fig 8".
        machines: Names of the machine files, or "host" for this machine.
        assumption: What its values depend on most and the paper does not give.
        minutes: Duration on two cores.
        run: Runs the experiment.
    """

    name: str
    figure: str
    machines: tuple[str, ...]
    assumption: str
    minutes: float
    run: Callable[[Options], Outcome]

    @property
    def folder(self) -> Path:
        """Contains its README, script and results."""
        return FOLDER / self.name


@cache
def provenance() -> Provenance:
    """Commit and machine. Changes of results and READMEs, which experiments write, do not make the commit dirty."""
    here = Provenance.here()
    clean = here.commit.removesuffix(_DIRTY)
    return here if clean == here.commit or _has_changed_code() else replace(here, commit=clean)


def _has_changed_code() -> bool:
    written = (":!experiments/README.md", ":!experiments/*/README.md", ":!experiments/*/results/*")
    command = ["git", "diff", "--quiet", "HEAD", "--", ":/", *written]
    try:
        return subprocess.run(command, cwd=FOLDER.parent, check=False).returncode != 0
    except OSError:  # no git, as in containers
        return True


def run_experiment(experiment: Experiment, options: Options) -> Outcome:
    """Runs an experiment and writes results.json and the pictures; a run that fails leaves earlier ones."""
    provenance()
    results = options.results or experiment.folder / "results"
    results.mkdir(parents=True, exist_ok=True)  # first, because the run takes minutes
    outcome = experiment.run(options)
    for name, figure in outcome.pictures.items():
        save_figure(figure, results / name)
    document = {
        "experiment": experiment.name,
        "figure": experiment.figure,
        "is_quick": options.is_quick,
        **asdict(provenance()),
        "findings": [finding.as_json() for finding in outcome.findings],
        "data": list(outcome.data),
    }
    _results_file(experiment, options).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return outcome


def is_finished(experiment: Experiment, options: Options) -> bool:
    """Whether there are results of the same commit, machine and kind of run. Uncommitted code is never the same."""
    try:
        document = json.loads(_results_file(experiment, options).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):
        return False
    here = {"is_quick": options.is_quick, **asdict(provenance())}
    return not provenance().commit.endswith(_DIRTY) and here == {name: document.get(name) for name in here}


def _results_file(experiment: Experiment, options: Options) -> Path:
    return (options.results or experiment.folder / "results") / "results.json"


def main(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """The command line of one experiment. A result that differs from the paper is not a failure; no result is one."""
    options = parse_options(argv, prog=f"python -m experiments.{experiment.name}.run")
    try:
        outcome = run_experiment(experiment, options)
    except CoarseError as error:
        print(f"{experiment.name}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for finding in outcome.findings:
        print(" | ".join(finding.cells()))
    if options.results is None:
        write_tables([experiment])
    return 0


def parse_options(argv: Sequence[str] | None, *, prog: str) -> Options:
    """Parses the arguments that all experiments accept."""
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument(
        "--machine",
        action="append",
        metavar="NAME",
        help="machine profile, or host; may be given several times (default: the paper's three and host)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer repeats, to see that it works")
    parser.add_argument(
        "--results", type=folder_to_write, metavar="FOLDER", help="write results there instead"
    )
    arguments = parser.parse_args(argv)
    if (arguments.quick or arguments.machine) and arguments.results is None:
        parser.error("the results in the tables are of full runs; say with --results FOLDER where these go")
    return Options(
        machines=tuple(arguments.machine or ALL_MACHINES),
        is_quick=arguments.quick,
        results=arguments.results,
        progress=lambda text: print(f"  {text}", flush=True),
    )


# ---- tables ----


def write_tables(experiments: Sequence[Experiment]) -> None:
    """Rewrites the table in each experiment's README from its results, and the index in this folder's README."""
    for experiment in experiments:
        replace_table(experiment.folder / "README.md", table_lines([_results(experiment)]))
    everything = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*/results/results.json"))]
    replace_table(FOLDER / "README.md", table_lines(everything, is_index=True))


def table_lines(results: Sequence[Mapping[str, Any]], *, is_index: bool = False) -> list[str]:
    """A Markdown table of the given results.json contents; in the index, figures link to their experiments."""
    lines = [_TABLE_HEAD, "|---|---|---|---|---|---|"]
    for document in results:
        figure = document["figure"]
        if is_index:
            figure = f"[{figure}]({document['experiment']}/README.md)"
        for values in document["findings"]:
            lines.append(f"| {' | '.join([figure, *Finding.from_json(values).cells()])} |")
    commits = sorted({f"{document['commit']} on {_words(document['machine'])}" for document in results})
    return [*lines, "", f"Of commit {'; '.join(commits)}.{_pacing_words(results)}"]


def bases_lines(experiments: Sequence[Experiment]) -> list[str]:
    """A Markdown table of what each experiment rests on."""
    rows = []
    for each in experiments:
        figure = f"[{each.figure}]({each.name}/README.md)"
        rows.append(f"| {figure} | {', '.join(each.machines)} | {each.assumption} | {each.minutes:g} |")
    return ["| figure | machine files | depends most on | minutes |", "|---|---|---|---|", *rows]


def replace_table(
    readme: Path, lines: Sequence[str], marks: tuple[str, str] = (TABLE_BEGIN, TABLE_END)
) -> None:
    """Replaces the lines between two marks of a README.

    Raises:
        ValueError: If the marks are missing or out of order.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ValueError(f"{readme}: needs a line {marks[0]} and a later one {marks[1]}")
    readme.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def _pacing_words(results: Sequence[Mapping[str, Any]]) -> str:
    """The largest pacing error of runs on emulated links; "" if none reports one."""
    errors = [
        values["pacing_error"]
        for document in results
        for values in document["data"]
        if "pacing_error" in values
    ]
    return f" Largest pacing error: {max(errors):.1%}." if errors else ""


def _results(experiment: Experiment) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((experiment.folder / "results" / "results.json").read_text())
    return document


def _words(machine: Mapping[str, Any]) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_bytes'] / 2**30:.0f} GiB"
