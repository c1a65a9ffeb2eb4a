"""Read recorded traces. Each reader returns the one table of `trace.py`; bad input is refused with file and line.

    *.csv with t_s,cloud,region,zone,...      our own table
    *.csv with t_s,zone,requested,created     probes of a folder like `skynomad`: what a launch of many nodes gave
    *.json with metadata.gap_seconds, data    counts at equal steps, one zone a file: `us-west-2a_v100_1.json`
    *.csv with milliseconds,add|remove,node   the log of one pool (Bamboo)

A step more than `GAP` times the usual one is a gap. Probes are cut there into several traces, because their recording
is known to have pauses; any other file with a gap is refused.
"""

import csv
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launcher.replay.trace import PoolTrace, Trace, TraceRefused

GAP = 3
"""A step longer than this many usual steps is a gap. One missed probe is no gap: its neighbour still says much."""

REGULAR = 0.9
"""Share of equal steps from which on a table counts as sampled at equal steps; a log of changes has no gaps."""

UNIX_S = 10**9
"""A time above this is a Unix time (after 2001) and not seconds since the start of a recording."""

COLUMNS = ("t_s", "cloud", "region", "zone", "instance_type", "capacity", "usd_per_hour")
PROBES = ("t_s", "zone", "requested", "created")
_AWS_ZONE = re.compile(r"([a-z]{2}(?:-[a-z]+)+-\d)[a-z]")
_GCP_ZONE = re.compile(r"([a-z]+(?:-[a-z]+)+\d)-[a-z]")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a file, checked. `line` is the line in the file."""

    line: int
    t_ms: int
    pool: tuple[str, str, str, str]
    """Cloud, region, zone, instance type."""
    capacity: int
    micro_usd_per_hour: int | None


def read_folder(folder: Path, now_s: float) -> tuple[list[Trace], list[str]]:
    """Return every trace below a folder, and the names of files that hold no trace.

    JSON files of one folder are one recording: their zones belong together. Raises TraceRefused for a file that is a
    trace and has a bad row. `now_s`: the present, as a Unix time.
    """
    traces: list[Trace] = []
    skipped: list[str] = []
    counts: defaultdict[tuple[Path, str], list[Row]] = defaultdict(list)
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json" and zone_of(path.name) is not None:
            rows, kind = _counts(path)
            counts[path.parent, kind] += rows
        elif path.suffix == ".csv" and (found := read_file(path, now_s)):
            traces += found
        elif path.is_file():
            skipped.append(str(path.relative_to(folder)))
    for (parent, kind), rows in counts.items():
        traces.append(_trace(f"{parent.name} {kind}", rows))
    return traces, skipped


def read_file(path: Path, now_s: float) -> list[Trace]:
    """Return the traces of one file; none if the file is another kind of file. Raises TraceRefused."""
    if path.suffix == ".json":
        rows, kind = _counts(path)
        return [_trace(f"{path.parent.name} {kind}", rows)]
    with path.open(newline="", encoding="utf-8") as file:
        lines = list(csv.reader(file))
    head = tuple(lines[0]) if lines else ()
    if head == COLUMNS:
        rows = list(_table(path, lines[1:], now_s))
        _refuse_gaps(path, rows)
        return [_trace(path.stem, rows)]
    if head == PROBES:
        return _cut(path.stem, list(_probes(path, lines[1:])))
    if len(head) == 3 and head[1] in ("add", "remove"):
        return [_trace(path.stem, list(_log(path, lines)))]
    return []


def zone_of(name: str) -> tuple[str, str, str] | None:
    """Return cloud, region and zone of a name that begins with a zone (`us-west-2a`, `us-east4-b`), or None."""
    for cloud, pattern in (("gcp", _GCP_ZONE), ("aws", _AWS_ZONE)):
        found = pattern.match(name)
        if found is not None:
            return cloud, found[1], found[0]
    return None


def _refuse(path: Path, line: int, what: str) -> TraceRefused:
    return TraceRefused(f"{path.name}:{line}: {what}; the trace is not used")


def _whole(path: Path, line: int, name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise _refuse(path, line, f"{name} is {text!r}; a whole number is allowed") from None
    if number < 0:
        raise _refuse(path, line, f"{name} is {number}; 0 or more is allowed")
    return number


def _table(path: Path, lines: Sequence[Sequence[str]], now_s: float) -> Iterator[Row]:
    last: dict[tuple[str, str, str, str], int] = {}
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(COLUMNS):
            raise _refuse(path, number, f"{len(cells)} cells where {','.join(COLUMNS)} are due")
        cell = dict(zip(COLUMNS, cells, strict=True))
        t_s = _whole(path, number, "t_s", cell["t_s"])
        if t_s > UNIX_S and t_s > now_s:
            raise _refuse(path, number, f"t_s {t_s} is in the future")
        pool = (cell["cloud"], cell["region"], cell["zone"], cell["instance_type"])
        if zone_of(cell["zone"]) != pool[:3]:
            raise _refuse(path, number, f"zone {cell['zone']!r} is no zone of {cell['cloud']} {cell['region']}")
        if last.get(pool, -1) >= t_s:
            raise _refuse(path, number, f"t_s {t_s} is not after {last[pool]}, the row before of this pool")
        last[pool] = t_s
        price = None if not cell["usd_per_hour"] else _price(path, number, cell["usd_per_hour"])
        capacity = _whole(path, number, "capacity", cell["capacity"])
        yield Row(number, t_s * 1000, pool, capacity, price)


def _price(path: Path, line: int, text: str) -> int:
    try:
        micro_usd = round(float(text) * 1e6)
    except (ValueError, OverflowError):
        raise _refuse(path, line, f"usd_per_hour is {text!r}; a number is allowed") from None
    if micro_usd <= 0:
        raise _refuse(path, line, f"usd_per_hour is {text}; more than 0 is allowed")
    return micro_usd


def _probes(path: Path, lines: Sequence[Sequence[str]]) -> Iterator[Row]:
    """Yield probes. Prices of the regions are read from a file `*_spot_prices.csv` beside them, if there is one."""
    prices = _region_prices(path)
    last: dict[str, int] = {}
    for number, cells in enumerate(lines, start=2):
        if len(cells) != len(PROBES):
            raise _refuse(path, number, f"{len(cells)} cells where {','.join(PROBES)} are due")
        t_s, zone = _whole(path, number, "t_s", cells[0]), cells[1]
        place = zone_of(zone)
        if place is None or place[2] != zone:
            raise _refuse(path, number, f"zone {zone!r} is no zone of AWS or Google Cloud")
        if last.get(zone, -1) >= t_s:
            raise _refuse(path, number, f"t_s {t_s} is not after {last[zone]}, the row before of this zone")
        last[zone] = t_s
        requested, created = (_whole(path, number, name, cells[n]) for n, name in ((2, "requested"), (3, "created")))
        if created > requested:
            raise _refuse(path, number, f"{created} nodes were created where {requested} were requested")
        yield Row(number, t_s * 1000, (*place, "a3-highgpu-8g"), created, prices.get(place[1]))


def _region_prices(path: Path) -> Mapping[str, int]:
    for beside in sorted(path.parent.glob("*_spot_prices.csv")):
        with beside.open(newline="", encoding="utf-8") as file:
            head, *rows = list(csv.reader(file))
        return {row[0]: _price(beside, number, row[1]) for number, row in enumerate(rows, start=2) if head}
    return {}


def _counts(path: Path) -> tuple[list[Row], str]:
    """Return the rows of a JSON file of counts, and the kind of its nodes (`v100 1`)."""
    place = zone_of(path.name)
    if place is None:
        raise _refuse(path, 1, "the file's name does not begin with a zone, like us-west-2a_v100_1.json")
    try:
        raw = json.loads(path.read_text("utf-8"))
        gap_s, data, prices = int(raw["metadata"]["gap_seconds"]), list(raw["data"]), raw.get("prices")
    except (ValueError, KeyError, TypeError) as error:
        raise _refuse(path, 1, f"no metadata.gap_seconds or data: {error}") from None
    if gap_s <= 0:
        raise _refuse(path, 1, f"metadata.gap_seconds is {gap_s}; more than 0 is allowed")
    kind = path.stem[len(place[2]) :].strip("_").replace("_", " ") or "spot"
    rows = []
    for number, count in enumerate(data):
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise _refuse(path, 1, f"data[{number}] is {count!r}; a whole number of 0 or more is allowed")
        price = _price(path, 1, str(prices[number])) if prices is not None and number < len(prices) else None
        rows.append(Row(1, number * gap_s * 1000, (*place, kind), count, price))
    return rows, kind


def _log(path: Path, lines: Sequence[Sequence[str]]) -> Iterator[Row]:
    """Yield the count after each change of a log of one pool. The log names no zone: the pool is called `aws log`."""
    pool = ("aws", "us-east-1", "us-east-1a", "p3")
    live: set[str] = set()
    last_ms, rows = 0, {}
    for number, cells in enumerate(lines, start=1):
        if len(cells) != 3 or cells[1] not in ("add", "remove"):
            raise _refuse(path, number, f"{','.join(cells)!r}; milliseconds,add or remove,node is due")
        at_ms = _whole(path, number, "milliseconds", cells[0])
        if at_ms < last_ms:
            raise _refuse(path, number, f"{at_ms} ms is before {last_ms}, the row before")
        last_ms = at_ms
        (live.add if cells[1] == "add" else live.discard)(cells[2])
        rows[at_ms] = Row(number, at_ms, pool, len(live), None)
    yield from rows.values()


def _steps(rows: Sequence[Row]) -> tuple[int, list[tuple[int, Row]]]:
    """Return the usual step in ms (0: no equal steps), and each longer gap with the row after it."""
    by_pool: defaultdict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in rows:
        by_pool[row.pool].append(row)
    steps = [(later.t_ms - earlier.t_ms, later) for pool in by_pool.values() for earlier, later in pairwise(pool)]
    if not steps:
        return 0, []
    usual, times = Counter(step for step, _ in steps).most_common(1)[0]
    if times < REGULAR * len(steps):
        return 0, []
    return usual, [(step, row) for step, row in steps if step > GAP * usual]


def _refuse_gaps(path: Path, rows: Sequence[Row]) -> None:
    usual, gaps = _steps(rows)
    for step, row in gaps:
        text = f"a gap of {step // 1000} s before this row of {row.pool[2]}, where {usual // 1000} s are usual"
        raise _refuse(path, row.line, f"{text}; cut the table there into two")


def _cut(name: str, rows: Sequence[Row]) -> list[Trace]:
    """Return the unbroken parts of a recording of probes."""
    _, gaps = _steps(rows)
    starts_ms = [0, *sorted({row.t_ms for _, row in gaps})]
    parts = []
    for number, (start_ms, end_ms) in enumerate(zip(starts_ms, (*starts_ms[1:], None), strict=True)):
        part = [row for row in rows if row.t_ms >= start_ms and (end_ms is None or row.t_ms < end_ms)]
        parts.append(_trace(name if len(starts_ms) == 1 else f"{name} part {number + 1}", part))
    return parts


def _trace(name: str, rows: Sequence[Row]) -> Trace:
    begin_ms = min(row.t_ms for row in rows)
    by_pool: defaultdict[tuple[str, str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_pool[row.pool].append(row)
    usual, _ = _steps(rows)
    pools = tuple(
        PoolTrace(
            cloud=cloud,
            region=region,
            zone=zone,
            instance_type=instance_type,
            t_ms=tuple(row.t_ms - begin_ms for row in found),
            capacity=tuple(row.capacity for row in found),
            micro_usd_per_hour=tuple(row.micro_usd_per_hour for row in found),
        )
        for (cloud, region, zone, instance_type), found in sorted(by_pool.items())
    )
    return Trace(name=name, pools=pools, end_ms=min(pool.t_ms[-1] for pool in pools) + usual)
