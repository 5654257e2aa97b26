"""`coarse simulate NAME`: studies of other documents' systems, with the figures of each document."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from coarse.cli.display.tables import print_table
from coarse.simulator.studies import catalogue

if TYPE_CHECKING:  # slow to import; `coarse --help` must not load these
    from coarse.simulator.studies.pages import Tally
    from coarse.simulator.studies.study import Progress, StateTable, Study, StudyResult

_EXIT_FAILED, _EXIT_USAGE = 1, 2


def list_studies(*, as_json: bool) -> int:
    """Prints the studies and their traces."""
    studies = [catalogue.load_study(name) for name in catalogue.NAMES]
    if as_json:
        print(json.dumps([_study_as_json(each) for each in studies], indent=1))
    else:
        rows = [(each.name, each.title, each.document, ", ".join(each.traces)) for each in studies]
        print_table("Studies of `coarse simulate NAME`", ("name", "title", "document", "traces"), rows)
    return 0


def show_study(name: str, trace: str | None, *, as_json: bool) -> int:
    """Runs a study, or one of its traces, and prints its results; returns the exit code."""
    try:
        study = catalogue.load_study(name)
        if trace is None:
            _show_result(study, as_json=as_json)
        else:
            _show_trace(study, trace, as_json=as_json)
    except ValueError as error:
        print(f"coarse simulate: {error}", file=sys.stderr)
        return _EXIT_USAGE
    return 0


def write_all(docs: Path, begin: str | None = None) -> int:
    """Sweeps workers and failure rates, runs all studies, and rewrites their pages in the folder `docs`.

    Args:
        docs: The folder.
        begin: Name of the part with which to begin, because the parts before it are written; None for the first.

    Returns:
        The exit code: 1 if one of them failed, which does not stop the others.
    """
    from coarse.simulator.studies.pages import INDEX, write_summary

    names = (*_SWEEPS, *catalogue.NAMES)
    if begin is not None and begin not in names:
        print(f"coarse simulate: --from {begin} is none of {', '.join(names)}", file=sys.stderr)
        return _EXIT_USAGE
    if not (docs / INDEX).is_file():
        print(
            f"coarse simulate: {docs} holds no {INDEX}; start in a clone of COARSE, or name its docs by --docs",
            file=sys.stderr,
        )
        return _EXIT_USAGE
    parts = _Parts(names, names.index(begin or names[0]))
    swept = [parts.attempt(name, partial(write, docs)) for name, write in _SWEEPS.items()]
    outcomes: dict[str, tuple[Study, Tally] | str] = {}
    for name in catalogue.NAMES:
        written = parts.attempt(name, partial(_write_study, docs, name))
        outcomes[name] = _written_study(docs, name) if written is None else written
    write_summary(docs, outcomes)
    return _EXIT_FAILED if any(isinstance(each, str) for each in (*swept, *outcomes.values())) else 0


def _write_scale(docs: Path, show: Progress) -> tuple[Path, str]:
    from coarse.simulator.scale import sweep
    from coarse.simulator.studies.pages import INDEX, write_scale

    write_scale(docs, sweep(show))
    return docs / INDEX, str(docs / INDEX)


def _write_failures(docs: Path, show: Progress) -> tuple[Path, str]:
    from coarse.simulator.faults.failure_sweep import sweep_failures
    from coarse.simulator.studies.pages import write_failures

    page = write_failures(docs, sweep_failures(show))
    return page, str(page)


_SWEEPS: Mapping[str, Callable[[Path, Progress], tuple[Path, str]]] = {
    "scale": _write_scale,
    "failures": _write_failures,
}


def _write_study(docs: Path, name: str, show: Progress) -> tuple[tuple[Study, Tally], str]:
    from coarse.simulator.studies.pages import tally_of, write_page

    study = catalogue.load_study(name)
    result = study.run(show)
    page = write_page(docs, study, result)
    return (study, tally_of(result)), f"{_in_words(result)}; {page}"


def _written_study(docs: Path, name: str) -> tuple[Study, Tally] | str:
    """A study and the tally of its page; the fault, if it has none."""
    from coarse.simulator.studies.pages import tally_of_page

    try:
        return catalogue.load_study(name), tally_of_page(docs, name)
    except OSError as error:
        return f"its page: {error.strerror}"


_T = TypeVar("_T")


class _Parts:
    """Runs parts one after the other, prints each result, and on an interrupt the progress.

    Args:
        names: Names of all parts, in order.
        begin: Number of the first part to run.
    """

    def __init__(self, names: Sequence[str], begin: int = 0) -> None:
        self._names, self._begin = names, begin

    def attempt(self, name: str, work: Callable[[Progress], tuple[_T, str]]) -> _T | str | None:
        """The value of `work`, whose words are printed; the error's text if it fails; None before the first part."""
        number = self._names.index(name)
        if number < self._begin:
            return None
        what, started_s = f"{name} ({number + 1} of {len(self._names)})", time.monotonic()
        try:
            value, words = _with_progress(work, what)
        except KeyboardInterrupt:
            print(
                f"coarse simulate: {number} of {len(self._names)} parts are done; to go on: coarse simulate --all "
                f"--from {name}",
                file=sys.stderr,
            )
            raise
        except Exception as error:
            traceback.print_exc()
            text = f"{type(error).__name__}: {error}"
            print(f"{what} failed: {text}", file=sys.stderr)
            return text
        print(f"{what}: {words}, {time.monotonic() - started_s:.1f} s", flush=True)
        return value


def _in_words(result: StudyResult) -> str:
    agreeing = sum(each.agrees for each in result.comparisons)
    holding = sum(each.holds for each in result.claims)
    return f"{agreeing} of {len(result.comparisons)} figures agree, {holding} of {len(result.claims)} claims hold"


def _with_progress(work: Callable[[Progress], _T], what: str) -> _T:
    """Works and shows how far it is; says on an interrupt in which part it was."""
    part = "its start"
    with _spinner(what) as show:

        def progress(words: str) -> None:
            nonlocal part
            part = words
            show(f"{what}: {words}")

        try:
            return work(progress)
        except KeyboardInterrupt:
            print(f"coarse simulate: interrupted in {what}: {part}", file=sys.stderr)
            raise


@contextmanager
def _spinner(what: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        line = bar.add_task(what, total=None)
        yield lambda words: bar.update(line, description=words)


# ---- output ----


def _show_result(study: Study, *, as_json: bool) -> None:
    result = _with_progress(study.run, study.name)
    if as_json:
        print(json.dumps(_result_as_json(study, result), indent=1))
    else:
        _print_result(study, result)


def _print_result(study: Study, result: StudyResult) -> None:
    from coarse.simulator.studies.pages import CLAIM_HEAD, COMPARISON_HEAD, claim_row, comparison_row

    print(f"{study.title}: {study.document}; {_in_words(result)}")
    if result.comparisons:
        _print_rows("Figures", COMPARISON_HEAD, [comparison_row(each) for each in result.comparisons])
    if result.claims:
        _print_rows("Claims", CLAIM_HEAD, [claim_row(each) for each in result.claims])
    for table in result.tables:
        print_table(f"{table.title}, simulated", table.columns, table.rows)


def _print_rows(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints the rows of a Markdown table, without a column that is empty everywhere."""
    kept = [place for place in range(len(head)) if any(row[place] for row in rows)]
    plain = [[row[place].replace("*", "") for place in kept] for row in (head, *rows)]
    print_table(title, plain[0], plain[1:])


def _show_trace(study: Study, name: str, *, as_json: bool) -> None:
    """Prints a trace.

    Raises:
        ValueError: If the study has no such trace.
    """
    if name not in study.traces:
        known = ", ".join(study.traces) or "none"
        raise ValueError(f"{study.name} has no trace {name!r}; its traces: {known}")
    table = study.traces[name]()
    if as_json:
        print(json.dumps({"kind": "simulated", "study": study.name, **_table_as_json(table)}, indent=1))
    else:
        print_table(f"{table.title}, simulated", table.columns, table.rows)


def _result_as_json(study: Study, result: StudyResult) -> dict[str, Any]:
    return {
        "kind": "simulated",
        **_study_as_json(study),
        "comparisons": [
            {
                "what": each.what,
                "source": each.source,
                "unit": each.unit,
                "document": each.document,
                "simulated": each.simulated,
                "residual": each.residual,
                "basis": each.basis.value,
                "agrees": each.agrees,
                "reason": each.reason,
            }
            for each in result.comparisons
        ],
        "claims": [
            {
                "what": each.what,
                "source": each.source,
                "found": each.found,
                "holds": each.holds,
                "reason": each.reason,
            }
            for each in result.claims
        ],
        "tables": [_table_as_json(each) for each in result.tables],
    }


def _study_as_json(study: Study) -> dict[str, Any]:
    return {
        "study": study.name,
        "title": study.title,
        "document": study.document,
        "traces": list(study.traces),
    }


def _table_as_json(table: StateTable) -> dict[str, Any]:
    return {
        "title": table.title,
        "columns": list(table.columns),
        "rows": [list(row) for row in table.rows],
    }
