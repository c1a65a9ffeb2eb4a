"""Values that a notebook draws: a table of metrics, and images side by side. Both are lists for everything else."""

from base64 import b64encode
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

ROWS_SHOWN = 60
"""Most rows of a table in a notebook; the list has all of them."""


class Table(list[dict[str, Any]]):
    """Rows with named columns. `pandas.DataFrame(table)` makes a frame of it."""

    @property
    def columns(self) -> list[str]:
        """Return the names of all columns, in order of their first row."""
        return list(dict.fromkeys(name for row in self for name in row))

    def _repr_html_(self) -> str:
        """Return the newest rows as HTML."""

        def cell(value: Any) -> str:
            text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
            return f"<td>{escape(text)}</td>"

        columns = self.columns
        head = "".join(f"<th>{escape(name)}</th>" for name in columns)
        rows = ["".join(cell(row.get(name)) for name in columns) for row in self[-ROWS_SHOWN:]]
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        note = f"<p>the last {ROWS_SHOWN} of {len(self)} rows</p>" if len(self) > ROWS_SHOWN else ""
        return f'{note}<div style="overflow-x:auto"><table><tr>{head}</tr>{body}</table></div>'


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """A PNG image and its title. `path`: its file, if it has one on this machine."""

    title: str
    png: bytes
    path: Path | None = None

    def __repr__(self) -> str:
        return f"Image({self.title!r}, {len(self.png):,} bytes)"

    def _repr_png_(self) -> bytes:
        """Return the image for a notebook."""
        return self.png


class Images(list[Image]):
    """Images, side by side in a notebook."""

    def _repr_html_(self) -> str:
        """Return the images under their titles as HTML, with the images in it."""
        figures = [
            f'<figure style="margin:0"><figcaption>{escape(image.title)}</figcaption>'
            f'<img style="max-width:100%" alt="{escape(image.title)}" '
            f'src="data:image/png;base64,{b64encode(image.png).decode()}"></figure>'
            for image in self
        ]
        return f'<div style="display:flex;flex-wrap:wrap;gap:1em">{"".join(figures)}</div>'
