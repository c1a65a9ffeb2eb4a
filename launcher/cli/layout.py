"""Plain text for 80 columns: sentences are wrapped, and the columns of tables are as wide as their cells."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

COLUMNS = 80
"""Default width of a terminal, and the width of most logs."""

HANGING = 4
"""Extra indent, in columns, of a sentence's second and later lines."""


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
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            f"{cell:<{width}}" if number < words else f"{cell:>{width}}"
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield f"  {'  '.join(cells)}".rstrip()
