"""The page of each study in a folder of documents: its tables and pictures between marks, its prose left alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coarse.profiler.figures import save_figure
from coarse.simulator.faults.failure_sweep import FailureSweep, draw_failures, failure_lines
from coarse.simulator.scale import Sweep, draw_sweep, sweep_lines
from coarse.simulator.studies.study import TOLERANCE, Basis, Claim, Comparison, Study, StudyResult

INDEX = "simulator.md"
"""The page with the summary; the others are in a folder next to it."""

_FOLDER, _PICTURES = "simulator", "pictures"
RESULTS, SUMMARY, SCALE, GOODPUT = "results", "studies", "scale", "goodput"
"""Names of the marks in a study's page, in INDEX (two), and in the page of failures."""

AGREES, DIFFERS = "agrees", "**differs**"
HOLDS, FAILS = "holds", "**does not hold**"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """How many figures and claims a study has, and how many of them agree or hold.

    Args:
        figures: Agreeing and all figures, by basis.
        claims: Claims that hold, and all.
    """

    figures: Mapping[Basis, tuple[int, int]]
    claims: tuple[int, int]

    @property
    def num_figures(self) -> int:
        """Of every basis."""
        return sum(every for _, every in self.figures.values())


def tally_of(result: StudyResult) -> Tally:
    """The results of a study, computed now."""
    return Tally(
        figures=_by_basis([(each.basis.value, each.agrees) for each in result.comparisons]),
        claims=(sum(claim.holds for claim in result.claims), len(result.claims)),
    )


def tally_of_page(docs: Path, name: str) -> Tally:
    """The results of a study, as its page has them.

    Raises:
        OSError: If there is no page.
    """
    rows = [_cells(line) for line in page_of(docs, name).read_text(encoding="utf-8").splitlines()]
    basis, verdict = COMPARISON_HEAD.index("basis"), COMPARISON_HEAD.index("verdict")
    figures = [row for row in rows if len(row) == len(COMPARISON_HEAD) and row[verdict] in (AGREES, DIFFERS)]
    place = CLAIM_HEAD.index("verdict")
    claims = [row for row in rows if len(row) == len(CLAIM_HEAD) and row[place] in (HOLDS, FAILS)]
    return Tally(
        figures=_by_basis([(row[basis], row[verdict] == AGREES) for row in figures]),
        claims=(sum(row[place] == HOLDS for row in claims), len(claims)),
    )


def _by_basis(figures: Sequence[tuple[str, bool]]) -> Mapping[Basis, tuple[int, int]]:
    agreeing = {basis: [agrees for name, agrees in figures if name == basis.value] for basis in Basis}
    return {basis: (sum(each), len(each)) for basis, each in agreeing.items()}


def _cells(line: str) -> list[str]:
    """The cells of a row of a Markdown table; none of other lines."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def page_of(docs: Path, name: str) -> Path:
    """The page of a study."""
    return docs / _FOLDER / f"{name}.md"


def write_page(docs: Path, study: Study, result: StudyResult) -> Path:
    """Writes pictures and tables of a study into its page, which is created if it is missing.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the page has one mark without the other.
    """
    page = page_of(docs, study.name)
    stems = {name: page.parent / _PICTURES / f"{study.name}-{name}" for name in result.pictures}
    for name, figure in result.pictures.items():
        save_figure(figure, stems[name])
    lines = [*result_lines(result), *_picture_lines(stems)]
    text = page.read_text(encoding="utf-8") if page.exists() else _new_page(study)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(between_marks(_with_place(text), RESULTS, lines), encoding="utf-8")
    return page


def write_summary(docs: Path, outcomes: Mapping[str, tuple[Study, Tally] | str]) -> None:
    """Writes a row for each study into INDEX.

    Args:
        docs: The folder of INDEX.
        outcomes: Study and tally by name; an error's text for a study that failed.

    Raises:
        OSError: If INDEX cannot be read or written.
        ValueError: If INDEX has no place for the summary.
    """
    rewrite(docs / INDEX, SUMMARY, summary_lines(outcomes))


def write_scale(docs: Path, found: Sweep) -> None:
    """Writes picture and table of a sweep into INDEX.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If INDEX has no place for them.
    """
    stem = docs / _FOLDER / _PICTURES / SCALE
    save_figure(draw_sweep(found), stem)
    picture = f"![a step over the number of workers]({_FOLDER}/{_PICTURES}/{stem.name}.png)"
    rewrite(docs / INDEX, SCALE, ["", *sweep_lines(found), "", picture, ""])


def write_failures(docs: Path, found: FailureSweep) -> Path:
    """Writes picture and table of a sweep into the page of failures, and returns it.

    Raises:
        OSError: If a file cannot be written.
        ValueError: If the page has no place for them.
    """
    page = page_of(docs, "failures")
    stem = page.parent / _PICTURES / GOODPUT
    save_figure(draw_failures(found), stem)
    picture = f"![goodput over failure rates]({_PICTURES}/{stem.name}.png)"
    rewrite(page, GOODPUT, ["", *failure_lines(found), "", picture, ""])
    return page


def rewrite(page: Path, name: str, lines: Iterable[str]) -> None:
    """Replaces the lines between two marks of a page.

    Raises:
        OSError: If the page cannot be read or written.
        ValueError: If it has no such marks.
    """
    try:
        text = between_marks(page.read_text(encoding="utf-8"), name, lines)
    except ValueError as error:
        raise ValueError(f"{page}: {error}") from None
    page.write_text(text, encoding="utf-8")


def between_marks(text: str, name: str, lines: Iterable[str]) -> str:
    """The text with other lines between two marks.

    Raises:
        ValueError: If a mark is missing.
    """
    begin, end = _marks(name)
    before, found, rest = text.partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise ValueError(f"needs a line {begin} and a later one {end}")
    return "\n".join([before + begin, *lines, end + after])


def summary_lines(outcomes: Mapping[str, tuple[Study, Tally] | str]) -> Iterator[str]:
    """The summary table: a row for each study, and one for all together."""
    yield from _head(
        (
            "study",
            "document",
            "figures",
            f"predicted, within {TOLERANCE:.0%}",
            "exact",
            "fitted",
            "claims hold",
        )
    )
    for name, outcome in outcomes.items():
        if isinstance(outcome, str):
            yield _row((name, f"**failed**: {outcome}", *[""] * 5))
        else:
            yield _row(
                (
                    f"[{name}]({_FOLDER}/{name}.md): {outcome[0].title}",
                    outcome[0].document,
                    *_counts(outcome[1:]),
                )
            )
    yield _row(("all", "", *_counts([each[1] for each in outcomes.values() if not isinstance(each, str)])))


def _counts(tallies: Sequence[Tally]) -> Sequence[str]:
    """Numbers of figures and claims of all studies together, and how many of them agree or hold."""
    figures = {basis: _sums([each.figures[basis] for each in tallies]) for basis in Basis}
    agreeing, predicted = figures[Basis.PREDICTED]
    share = f" ({agreeing / predicted:.0%})" if predicted else ""
    return (
        str(sum(each.num_figures for each in tallies)),
        f"{_of(figures[Basis.PREDICTED])}{share}",
        _of(figures[Basis.EXACT]),
        _of(figures[Basis.FITTED]),
        _of(_sums([each.claims for each in tallies])),
    )


def _sums(pairs: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(some for some, _ in pairs), sum(every for _, every in pairs)


def result_lines(result: StudyResult) -> Iterator[str]:
    """Markdown tables of everything that a study found, but for its pictures."""
    if result.comparisons:
        yield from ("", *_table(COMPARISON_HEAD, map(comparison_row, result.comparisons)))
    if result.claims:
        yield from ("", *_table(CLAIM_HEAD, map(claim_row, result.claims)))
    for table in result.tables:
        yield from ("", f"{table.title}, *simulated*:", "", *_table(table.columns, table.rows))
    yield ""


COMPARISON_HEAD = ("figure", "source", "document", "*simulated*", "residual", "basis", "verdict", "reason")
CLAIM_HEAD = ("claim", "source", "came out, *simulated*", "verdict", "reason")


def comparison_row(each: Comparison) -> Sequence[str]:
    """Cells of a comparison, for COMPARISON_HEAD."""
    return (
        each.what,
        each.source,
        format_figure(each.document, each.unit),
        format_figure(each.simulated, each.unit),
        f"{each.residual:+.1%}",
        each.basis.value,
        AGREES if each.agrees else DIFFERS,
        each.reason,
    )


def claim_row(each: Claim) -> Sequence[str]:
    """Cells of a claim, for CLAIM_HEAD."""
    return (each.what, each.source, each.found, HOLDS if each.holds else FAILS, each.reason)


def format_figure(value: float, unit: str) -> str:
    """A figure with four digits."""
    return f"{value:.4g} {unit}".rstrip()


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from _head(columns)
    yield from map(_row, rows)


def _head(columns: Sequence[str]) -> Iterator[str]:
    yield _row(columns)
    yield "|" + "---|" * len(columns)


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _of(pair: tuple[int, int]) -> str:
    return f"{pair[0]} of {pair[1]}"


def _picture_lines(stems: Mapping[str, Path]) -> Iterator[str]:
    for name, stem in stems.items():
        yield from (f"![{name}]({_PICTURES}/{stem.name}.png)", "")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name} -->", f"<!-- end of {name} -->"


def _new_page(study: Study) -> str:
    return f"# {study.title}\n\n{study.document}, simulated by `coarse simulate {study.name}`.\n"


def _with_place(text: str) -> str:
    """The page with a section of results, if it has no mark of one."""
    begin, end = _marks(RESULTS)
    if begin in text or end in text:
        return text
    return f"{text.rstrip()}\n\n## Results\n\n{begin}\n{end}\n"
