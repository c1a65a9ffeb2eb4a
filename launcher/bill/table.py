"""Read the rows of a bill's file, a few at a time: CSV, CSV in gzip, or parquet.

    file -> names of columns in snake case -> rows of the wanted columns, each value as text

A damaged file raises Failure, at the latest after its last row. So a caller must not keep rows before the end.
"""

import csv
import gzip
import io
import re
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import IO, Any, Protocol

from engine.installation import install_command
from launcher.exit_codes import Failure

AT_ONCE = 2048
"""Rows of a parquet file that are in memory as Python's values at a time."""

PARQUET, GZIP = b"PAR1", b"\x1f\x8b"

MEMORY = "256MB"
"""Most memory that the reader of parquet files takes."""

Row = Sequence[str | None]


class BillTable(Protocol):
    """An opened file. `columns`: the names of its columns as `plain_name` writes them, in the file's order."""

    path: Path
    columns: tuple[str, ...]

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        """Yield the values of the columns at these places, row by row. An empty value is None or an empty text.

        A nested value is JSON. Raises Failure for a damaged file, with the number of the row.
        """

    @property
    def share_read(self) -> float:
        """Return the part of the file that was read, 0 to 1."""


def open_table(path: Path) -> BillTable:
    """Open a file by its first bytes. Raises Failure if the file is empty or damaged."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise Failure(f"{path} cannot be read ({error.strerror}); name a file of a cloud's bill") from None
    if not start:
        raise Failure(f"{path} is empty: no bill has no header; fetch the file again")
    return ParquetTable(path) if start == PARQUET else CsvTable(path, is_gzip=start.startswith(GZIP))


def plain_name(column: str) -> str:
    """Return a column's name in snake case: `lineItem/UsageType` and `line_item.usage_type` become one name."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column.strip())
    return re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")


def _damaged(path: Path, row: int, what: str) -> Failure:
    return Failure(f"{path}, row {row}: {what}; fetch the file again (nothing was imported)")


class CsvTable:
    """A CSV file with a header, as it is or in gzip."""

    def __init__(self, path: Path, *, is_gzip: bool) -> None:
        self.path = path
        self._is_gzip = is_gzip
        self._bytes = path.stat().st_size
        self._position: Callable[[], int] = lambda: 0
        header = next(self._lines(), None)
        if header is None:
            raise Failure(f"{path} is empty: no bill has no header; fetch the file again")
        self.columns = tuple(map(plain_name, header))

    @property
    def share_read(self) -> float:
        return min(1.0, self._position() / self._bytes)

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        lines = self._lines()
        width = len(next(lines))
        pick: Callable[[list[str]], Any] = itemgetter(*places)
        for number, line in enumerate(lines, 2):
            if len(line) != width:
                if not line:
                    continue
                raise _damaged(self.path, number, f"it has {len(line)} columns of {width}")
            yield pick(line)

    def _lines(self) -> Iterator[list[str]]:
        number = 1
        with self.path.open("rb") as file:
            if not self._is_gzip:
                self._check_end(file)
            self._position = file.tell
            text = io.TextIOWrapper(
                gzip.GzipFile(fileobj=file) if self._is_gzip else io.BufferedReader(file),
                encoding="utf-8-sig",
                newline="",
            )
            try:
                for number, line in enumerate(csv.reader(text, strict=True), 1):  # noqa: B007
                    yield line
            except EOFError:
                raise _damaged(self.path, number, "the compressed file ends here, cut off") from None
            except (csv.Error, UnicodeDecodeError, gzip.BadGzipFile) as error:
                raise _damaged(self.path, number, f"not CSV in UTF-8 ({error})") from None
            finally:
                self._position = lambda: self._bytes

    def _check_end(self, file: IO[bytes]) -> None:
        """Raise Failure if the last line has no end: a copy that was cut off would give a wrong last amount."""
        file.seek(-1, io.SEEK_END)
        if file.read(1) not in (b"\n", b"\r"):
            raise Failure(
                f"{self.path} ends within a line, so a part of it may be missing; fetch the file again, or add a line "
                "break if it is whole (nothing was imported)"
            )
        file.seek(0)


class ParquetTable:
    """A parquet file, read by DuckDB (the extra `bill`)."""

    def __init__(self, path: Path) -> None:
        try:
            import duckdb
        except ImportError:
            raise Failure(
                f"{path} is a parquet file, and DuckDB, which reads it, is not installed; run "
                f"`{install_command('bill')}`, or export the bill as CSV"
            ) from None
        self.path = path
        self._error = duckdb.Error
        self._connection = duckdb.connect()
        self._connection.execute(f"SET memory_limit = '{MEMORY}'; SET threads = 1")
        self._count, self._read = 0, 0
        described = self._run("DESCRIBE SELECT * FROM read_parquet(?)").fetchall()
        (self._count,) = self._run("SELECT count(*) FROM read_parquet(?)").fetchone() or (0,)
        self._names = [(name, kind) for name, kind, *_ in described]
        self.columns = tuple(plain_name(name) for name, _ in self._names)

    @property
    def share_read(self) -> float:
        return self._read / self._count if self._count else 1.0

    def rows(self, places: Sequence[int]) -> Iterator[Row]:
        wanted = ", ".join(_as_text(*self._names[place]) for place in places)
        found = self._run(f"SELECT {wanted} FROM read_parquet(?)")
        self._read = 0
        while True:
            try:
                rows = found.fetchmany(AT_ONCE)
            except self._error as error:
                raise _damaged(self.path, self._read + 1, f"not parquet ({error})") from None
            if not rows:
                return
            self._read += len(rows)
            yield from rows

    def _run(self, query: str) -> Any:
        try:
            return self._connection.execute(query, [str(self.path)])
        except self._error as error:
            raise _damaged(self.path, 1, f"not parquet, or cut off ({str(error).splitlines()[0]})") from None


def _as_text(name: str, kind: str) -> str:
    """Return the SQL of a column as text: a time in milliseconds since 1970, a nested value as JSON."""
    column = '"' + name.replace('"', '""') + '"'
    if kind.startswith("TIMESTAMP"):
        return f"CAST(epoch_ms({column}) AS VARCHAR)"
    if kind.startswith(("MAP", "STRUCT")) or kind.endswith("[]"):
        return f"CAST(to_json({column}) AS VARCHAR)"
    return f"CAST({column} AS VARCHAR)"
