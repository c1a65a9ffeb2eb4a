"""Plain text that fits 80 columns: sentences are wrapped, and tables have columns as wide as their cells."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

COLUMNS = 80
"""The width of a terminal that nobody has resized, and of most logs."""

HANGING = 4
"""Columns by which the second line of a sentence is indented further than the first."""


def fitted(lines: Iterable[str]) -> Iterator[str]:
    """Wrap lines that are too long between words. A word that is longer than a line stays whole, to be copied."""
    for line in (line for text in lines for line in text.split("\n")):  # a run's reason may end with lines of a log
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
    """Align the cells of `rows`, a heading first. The first `words` columns hold words, the others numbers."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if number < words else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
