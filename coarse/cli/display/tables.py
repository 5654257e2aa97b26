"""Tables and sizes for the terminal, of several commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

TABLE_WIDTH = 150


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a table, folded at TABLE_WIDTH columns whatever the terminal's width."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console(width=TABLE_WIDTH, highlight=False).print(table)


def format_size(nbytes: int) -> str:
    """A size in a binary unit, in four digits."""
    for unit, bits in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << bits:
            return f"{nbytes / (1 << bits):.4g} {unit}"
    return f"{nbytes} B"
