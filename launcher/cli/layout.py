"""Format plain text: sentences and tables.

Sentences are wrapped at 80 characters, or at the terminal's width if they are in a table. Any other column of a table
is as wide as its longest cell. Cells are never cut, because the user cannot copy a cut name. A row that is wider than
the terminal continues in indented lines. Without a terminal, a row without sentences is one line. No line ends in
blanks.
"""

import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence

import click
from rich.console import Console

from launcher.harmless import harmless

COLUMNS = 80
"""Default width of a terminal, and the width of most logs, in characters."""

HANGING = 4
"""Extra indent, in characters, of the second and later lines of a sentence or of a row."""

GAP = "  "
"""Blanks between two columns."""

NARROWEST_SENTENCE = 24
"""Smallest width of a column of sentences, in characters. A narrower terminal breaks the lines itself."""


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """Wrap long lines between words. A word longer than a line stays whole, so the user can copy the word."""
    for line in (line for text in lines for line in text.split("\n")):  # a run's reason may contain log lines
        indent = line[: len(line) - len(line.lstrip())]
        yield from textwrap.wrap(
            line,
            COLUMNS,
            subsequent_indent=indent + " " * HANGING,
            drop_whitespace=True,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]


def columns(rows: Sequence[Sequence[str]], words: int) -> Iterator[str]:
    """Align the cells of `rows`, starting with the heading. The first `words` columns hold text, the rest numbers."""
    for cells in _aligned(rows, range(words, len(rows[0]))):
        yield f"  {GAP.join(cells)}".rstrip()


def table_rows(
    rows: Sequence[Sequence[str]], *, numbers: Container[str] = (), width: int | None = None
) -> Iterator[list[str]]:
    """Return the lines of each row, starting with the heading. `numbers`: headings of the columns of numbers.

    `width`: a row wider than this many characters continues in indented lines. None: each row is one line, so a
    program can read the table.
    """
    aligned = list(_aligned(rows, {place for place, name in enumerate(rows[0]) if name in numbers}))
    parts = _parts([len(cell) for cell in aligned[0]], width)
    for cells in aligned:
        first, *more = (GAP.join(cells[part]).rstrip() for part in parts)
        yield [first, *(" " * HANGING + line for line in more if line)]


def sentence_rows(rows: Sequence[Sequence[str]], width: int) -> Iterator[list[str]]:
    """Return the lines of each row, starting with the heading.

    The last column holds sentences. They are wrapped so that a line has at most `width` characters, but the
    column is never narrower than `NARROWEST_SENTENCE`.
    """
    names = [GAP.join([*cells, ""]) for cells in _aligned([row[:-1] for row in rows], ())]
    indent = len(names[0])
    for name, row in zip(names, rows, strict=True):
        room = max(NARROWEST_SENTENCE, width - indent)
        text = " ".join(row[-1].split())
        first, *more = textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""]
        yield [f"{name}{first}".rstrip(), *(" " * indent + line for line in more)]


def print_table(rows: Sequence[Sequence[str]], *, numbers: Container[str] = (), sentences: bool = False) -> None:
    """Print a table, starting with the heading, as wide as the terminal. `numbers`: headings of columns of numbers.

    `sentences`: the last column holds sentences. Without a terminal, sentences are wrapped at 80 characters, and each
    row of any other table is one line.
    """
    console = Console(markup=False, emoji=False, highlight=False)
    width = console.width if console.is_terminal else None
    rows = [[harmless(cell) for cell in row] for row in rows]  # names of workers come from nodes
    if sentences:
        heading, *body = sentence_rows(rows, width or COLUMNS)
    else:
        heading, *body = table_rows(rows, numbers=numbers, width=width)
    for line in heading:
        console.print(line, style="bold", soft_wrap=True)
    for line in (line for lines in body for line in lines):
        click.echo(line)


def print_text(lines: Iterable[str]) -> None:
    """Print sentences, wrapped at 80 characters."""
    for line in fitted(lines):
        click.echo(line)


def _aligned(rows: Sequence[Sequence[str]], numbers: Container[int]) -> Iterator[list[str]]:
    """Return the cells of each row, padded to the width of their column."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        yield [
            f"{cell:>{width}}" if number in numbers else f"{cell:<{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]


def _parts(widths: Sequence[int], width: int | None) -> list[slice]:
    """Divide the columns of a row into lines of at most `width` characters. None: all columns are in one line.

    A column wider than a line gets its own line.
    """
    starts, used = [0], widths[0]
    for number, more in enumerate(widths[1:], 1):
        used += len(GAP) + more
        if width is not None and used > width:
            starts.append(number)
            used = HANGING + more
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
