"""Import the clouds' own bills: keep the rows about our nodes in the ledger, each once.

    files -> rows -> rows about us -> a table on the side -> one transaction -> bill_line

Nothing is in the ledger before every file was read to its end, so an import that was killed, or met a damaged file,
left nothing. Memory does not grow with the rows: rows about us wait in a temporary database.

What is counted once:

- Rows with the same identity are the same row. Twice in one file, they count twice; in two files or imports, once.
- AWS writes a whole month again with new ids. If the files have other ids for what the ledger has of a month, and have
  all that the ledger has of it, they replace it. If they lack a part, they may be a new bill or a further part of the
  old one, and the import is refused.
"""

import itertools
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, select, text
from sqlalchemy.orm import Session, sessionmaker

from launcher.bill import aws, gcp
from launcher.bill.aws import AwsBill
from launcher.bill.gcp import GcpBill
from launcher.bill.ours import Ours, ours_of
from launcher.bill.rows import BadValue, BillFormat, BillRow, time_ms_of
from launcher.bill.table import BillTable, open_table
from launcher.clouds.base import NODE_LABEL, RUN_LABEL
from launcher.exit_codes import Failure
from launcher.ledger.accounting import charges_of_run
from launcher.ledger.bills import billed_micro_usd, rounded_parts
from launcher.ledger.models import LOCAL, BillLine, Node, Run
from launcher.ledger.store import writing

SHOWN_EVERY = 50_000
"""Rows between two reports of progress."""

AT_ONCE = 2_000
"""Rows that go into the ledger in one statement."""

Progress = Callable[[Path, float], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownResource:
    """A resource with our label that no node of this ledger is. `run`, `node`: its labels. `why`: in words."""

    cloud: str
    account: str
    resource: str
    run: str
    node: str
    micro_usd: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BillImport:
    """The result of one import.

    `rows`: all rows of the files; `our_rows`: those about our runs. Lines: amounts of these rows, as the ledger keeps
    them: `added`, `known` before, and `replaced`: lines of a month that the cloud has written again.
    """

    files: tuple[str, ...]
    rows: int
    our_rows: int
    added: int
    known: int
    replaced: int
    months: tuple[str, ...]
    """Months of the lines about us, with cloud and payer: `aws 123456789012 2026-11`."""
    billed_micro_usd: Mapping[str, int]
    """By run of the files: all that the ledger now has of its bill."""
    nodes: tuple[str, ...]
    """Nodes that the files have rows of."""
    unknown: tuple[UnknownResource, ...]
    nodes_without_rows: tuple[str, ...]
    """Nodes that cost money in the time and the accounts of the files, and that no bill has named yet."""
    other_accounts: Mapping[str, int]
    """Rows by account or project in which no run of ours was."""
    other_currencies: Mapping[str, int]
    """Rows by currency other than dollars."""


@dataclass
class _Tally:
    """Counts of all rows of one import.

    `seen`: rows by cloud, account and currency. `accounts`: those of our rows. `spans`: time of the usage, by cloud.
    `unknown`: pico-dollars by cloud, account, resource, labels and reason.
    """

    rows: int = 0
    our_rows: int = 0
    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    accounts: set[tuple[str, str]] = field(default_factory=set)
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    unknown: dict[tuple[str, ...], int] = field(default_factory=dict)
    nodes: dict[str, None] = field(default_factory=dict)
    runs: dict[int, str] = field(default_factory=dict)


def import_bills(
    sessions: sessionmaker[Session], files: Sequence[Path], *, replace: bool = False, progress: Progress | None = None
) -> BillImport:
    """Import the files, all or none. Raises Failure.

    `replace`: forget first what the ledger has of the months in the files.
    """
    with sessions() as session:
        ours = ours_of(session)
    tally = _Tally()
    with closing(sqlite3.connect("")) as staged:  # a temporary file that SQLite removes
        staged.execute(STAGED)
        for number, path in enumerate(files):
            _read_file(path, number, ours, tally, staged, progress)
            staged.commit()
        with writing(sessions) as session:
            added, known, replaced, months = _keep(session.connection(), staged, replace)
    with sessions() as session:
        return _result(session, ours, tally, files, added, known, replaced, months)


# --- reading ------------------------------------------------------------------------------------------


def format_of(table: BillTable) -> BillFormat:
    """Return the format of a file by its columns. Raises Failure."""
    if aws.MARK in table.columns:
        return AwsBill(table)
    if gcp.MARK in table.columns:
        return GcpBill(table)
    raise Failure(
        f"{table.path} is no bill that spotrl reads: it has no column {aws.MARK} (Cost and Usage Report 2.0 of AWS) "
        f"and no column {gcp.MARK} (detailed usage cost of Google Cloud); its columns are "
        f"{', '.join(table.columns[:6])}; docs/bill.md says which export to make"
    )


def _read_file(
    path: Path, number: int, ours: Ours, tally: _Tally, staged: sqlite3.Connection, progress: Progress | None
) -> None:
    table = open_table(path)
    bill = format_of(table)
    rows_before, first, last = tally.rows, "", ""
    seen: Counter[tuple[str, str]] = Counter()
    known = {name for name, node in ours.by_resource.items() if node.cloud == bill.cloud}
    for row in table.rows(bill.places):
        tally.rows += 1
        seen[bill.account(row), bill.currency(row)] += 1
        start, end = bill.span(row)
        if start < first or not first:
            first = start
        if end > last:
            last = end
        if progress is not None and tally.rows % SHOWN_EVERY == 0:
            progress(path, table.share_read)
        if not bill.may_have_labels(row) and (not known or known.isdisjoint(bill.resources(row))):
            continue
        try:
            _take(bill.read(row), number, ours, tally, staged)
        except BadValue as error:
            row_number = tally.rows - rows_before + 1
            raise Failure(f"{path}, row {row_number}: {error} (nothing was imported)") from None
        except Failure as error:
            raise Failure(f"{path}, row {tally.rows - rows_before + 1}: {error}") from None
    if tally.rows == rows_before:
        raise Failure(f"{path} has a header and no row; fetch the file again (nothing was imported)")
    tally.seen.update({(bill.cloud, *key): count for key, count in seen.items()})
    try:
        span = time_ms_of(first, "usage start"), time_ms_of(last, "usage end")
    except BadValue as error:
        raise Failure(f"{path}: {error} (nothing was imported)") from None
    before = tally.spans.get(bill.cloud, span)
    tally.spans[bill.cloud] = min(before[0], span[0]), max(before[1], span[1])


STAGED = """
CREATE TABLE staged (
    identity TEXT, file INTEGER, cell TEXT, cloud TEXT, payer TEXT, month TEXT, run_id INTEGER, node_id INTEGER,
    resource TEXT, kind TEXT, start_ms INTEGER, end_ms INTEGER, pico_usd INTEGER, hours REAL, copies INTEGER,
    PRIMARY KEY (identity, file)
) WITHOUT ROWID
"""
COLUMNS = (
    *("identity", "cell", "cloud", "payer", "month", "run_id", "node_id", "resource", "kind", "start_ms", "end_ms"),
    *("pico_usd", "hours", "copies"),
)
STAGE = (
    f"INSERT INTO staged (file, {', '.join(COLUMNS)}) VALUES (?, {', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (identity, file) DO UPDATE SET copies = copies + 1"
)


def _take(row: BillRow, file: int, ours: Ours, tally: _Tally, staged: sqlite3.Connection) -> None:
    """Stage the amounts of a row of ours, or note a row with our label that is not."""
    match = ours.match(row)
    resource = next(iter(row.resources), "")
    if match.run is None:
        if match.why:
            run, node = row.labels.get(RUN_LABEL, ""), row.labels.get(NODE_LABEL, "")
            key = (row.cloud, row.account, resource, run, node, match.why)
            tally.unknown[key] = tally.unknown.get(key, 0) + sum(charge.pico_usd for charge in row.charges)
        return
    tally.our_rows += 1
    tally.accounts.add((row.cloud, row.account))
    tally.runs[match.run.id] = match.run.name
    if match.node is not None:
        tally.nodes[match.node.name] = None
    for part, charge in enumerate(row.charges):
        hours = charge.hours
        if charge.gpu_hours is not None and match.node is not None and match.node.gpus:
            hours = charge.gpu_hours / match.node.gpus
        staged.execute(
            STAGE,
            (
                *(file, f"{row.identity}/{part}", row.cell, row.cloud, row.payer, row.month, match.run.id),
                *(None if match.node is None else match.node.id, resource, charge.kind.value),
                *(row.start_ms, row.end_ms, charge.pico_usd, hours, 1),
            ),
        )


# --- keeping ------------------------------------------------------------------------------------------

LINES = """
CREATE TEMP TABLE new_line AS SELECT {columns} FROM bill_line WHERE 0
"""
MONTHS = "SELECT DISTINCT cloud, payer, month FROM new_line ORDER BY cloud, payer, month"
OF_MONTH = "bill_line.cloud = :cloud AND bill_line.payer = :payer AND bill_line.month = :month"
REWRITTEN = f"""
SELECT 1 FROM bill_line JOIN new_line USING (cell)
WHERE {OF_MONTH} AND bill_line.cell <> ''
AND NOT EXISTS (SELECT 1 FROM bill_line b WHERE b.identity = new_line.identity)
LIMIT 1
"""
MISSING = f"""
SELECT count(*) FROM bill_line
WHERE {OF_MONTH} AND NOT EXISTS (SELECT 1 FROM new_line n WHERE n.cell = bill_line.cell)
"""
FORGET = f"DELETE FROM bill_line WHERE {OF_MONTH}"
KNOWN = "SELECT count(*) FROM new_line JOIN bill_line USING (identity)"
ADD = """
INSERT INTO bill_line ({columns}) SELECT {columns} FROM new_line WHERE true
ON CONFLICT (identity) DO UPDATE SET copies = max(bill_line.copies, excluded.copies)
"""


def _keep(
    connection: Connection, staged: sqlite3.Connection, replace: bool
) -> tuple[int, int, int, tuple[tuple[str, str, str], ...]]:
    """Move the staged lines into the ledger. Return the numbers of added, known and replaced lines, and the months."""
    columns = ", ".join(COLUMNS)

    def one(query: str, values: Mapping[str, Any] | None = None) -> int:
        return int(connection.execute(text(query), values or {}).scalar() or 0)

    connection.execute(text(LINES.format(columns=columns)))
    try:
        _copy(connection, staged)
        connection.execute(text("CREATE INDEX temp.new_line_cell ON new_line (cell)"))
        connection.execute(text("CREATE INDEX temp.new_line_identity ON new_line (identity)"))
        months = tuple((row.cloud, row.payer, row.month) for row in connection.execute(text(MONTHS)))
        replaced = 0
        for cloud, payer, month in months:
            of_month = {"cloud": cloud, "payer": payer, "month": month}
            is_rewritten = bool(one(REWRITTEN, of_month))
            if is_rewritten and not replace and (missing := one(MISSING, of_month)):
                raise Failure(
                    f"the files have other line ids than an earlier import for rows of {month} of payer {payer}, and "
                    f"lack {missing} lines that it had, so they may be a part of a new bill, or a further part of the "
                    "old one; name all files of the month in one command, and add --replace if AWS has withdrawn "
                    "rows (nothing was imported)"
                )
            if is_rewritten or replace:
                replaced += connection.execute(text(FORGET), of_month).rowcount
        known = one(KNOWN)
        total = one("SELECT count(*) FROM new_line")
        connection.execute(text(ADD.format(columns=columns)))
    finally:
        connection.execute(text("DROP TABLE temp.new_line"))
    return total - known, known, replaced, months


def _copy(connection: Connection, staged: sqlite3.Connection) -> None:
    """Copy the staged lines into the temporary table. A row of several files counts as often as in one of them."""
    chosen = ", ".join("max(copies)" if name == "copies" else name for name in COLUMNS)
    insert = text(f"INSERT INTO new_line VALUES ({', '.join(f':{name}' for name in COLUMNS)})")
    lines = staged.execute(f"SELECT {chosen} FROM staged GROUP BY identity")
    for part in _batches(lines):
        connection.execute(insert, [dict(zip(COLUMNS, line, strict=True)) for line in part])


def _batches(lines: Iterable[Sequence[Any]]) -> Iterator[list[Sequence[Any]]]:
    rest = iter(lines)
    while part := list(itertools.islice(rest, AT_ONCE)):
        yield part


# --- the result ---------------------------------------------------------------------------------------


def _result(
    session: Session,
    ours: Ours,
    tally: _Tally,
    files: Sequence[Path],
    added: int,
    known: int,
    replaced: int,
    months: tuple[tuple[str, str, str], ...],
) -> BillImport:
    accounts = tally.accounts | {pair for run in ours.runs.values() for pair in run.accounts.items()}
    billed = billed_micro_usd(session, tally.runs)
    other_accounts: Counter[str] = Counter()
    other_currencies: Counter[str] = Counter()
    for (cloud, account, currency), count in tally.seen.items():
        if (cloud, account) not in accounts:
            other_accounts[account or "none"] += count
        if currency != "USD":
            other_currencies[currency or "none"] += count
    sums = rounded_parts(tally.unknown)
    return BillImport(
        files=tuple(map(str, files)),
        rows=tally.rows,
        our_rows=tally.our_rows,
        added=added,
        known=known,
        replaced=replaced,
        months=tuple(" ".join(month) for month in months),
        billed_micro_usd={name: billed[run_id] for run_id, name in tally.runs.items()},
        nodes=tuple(tally.nodes),
        unknown=tuple(
            UnknownResource(
                cloud=key[0],
                account=key[1],
                resource=key[2],
                run=key[3],
                node=key[4],
                why=key[5],
                micro_usd=micro_usd,
            )
            for key, micro_usd in sums.items()
        ),
        nodes_without_rows=tuple(_without_rows(session, ours, tally)),
        other_accounts=dict(other_accounts),
        other_currencies=dict(other_currencies),
    )


def _without_rows(session: Session, ours: Ours, tally: _Tally) -> Iterator[str]:
    """Yield the nodes that cost money in the time and the accounts of the files, and that no bill has named."""
    in_files = {(cloud, account) for cloud, account, _ in tally.seen}
    latest_ms = max(end_ms for _, end_ms in tally.spans.values())
    named = select(BillLine.node_id).where(BillLine.node_id.is_not(None))
    unnamed: dict[int, list[Node]] = {}
    for node in session.scalars(
        select(Node).where(Node.id.not_in(named), Node.requested_ms < latest_ms).order_by(Node.run_id, Node.id)
    ):
        unnamed.setdefault(node.run_id, []).append(node)
    for run in session.scalars(select(Run).where(Run.infra != LOCAL, Run.id.in_(unnamed)).order_by(Run.id)):
        accounts = ours.runs[run.name].accounts
        clouds = {cloud for cloud in tally.spans if cloud not in accounts or (cloud, accounts[cloud]) in in_files}
        nodes = [node for node in unnamed[run.id] if node.cloud in clouds]
        charges = charges_of_run(session, run, run.clock.now_ms()) if nodes else {}
        for node in nodes:
            start_ms, end_ms = tally.spans[node.cloud]
            paid = [charge for charge in charges[node.id] if charge.micro_usd]
            if paid and paid[0].start_ms < end_ms and paid[-1].end_ms > start_ms:
                yield node.name
