"""Results of `spotrl simulate`, kept as one JSON file each, so that `spotrl ui` shows them.

The newest `KEPT` files are kept. A file that cannot be read is left out: the simulation can be repeated.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from launcher.money import HOUR_MS
from launcher.placement.front import ParetoFront
from launcher.replay.simulate import Simulated

KEPT = 20

WIDTH, LANE = 600, 8
"""Size of the drawing of a fleet in pixels: its width, and the height of a node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One simulation. `at_ms`: time of the command (UTC)."""

    job: str
    at_ms: int
    result: Simulated
    prices: str = ""
    """Dates of the prices, as text. Files of older versions have none."""
    fleets: ParetoFront | None = None
    """The fleets that the plan was chosen from. None: the job names its nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """Nodes of one market at work for a time, in pixels."""

    market: str
    x: float
    y: int
    width: float
    height: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The nodes of one start over time. `most`: the largest number at work at a time."""

    bars: tuple[Bar, ...]
    height: int
    most: int
    hours: str


_FORMAT = TypeAdapter(Kept)


def keep(folder: Path, kept: Kept) -> Path:
    """Write one result, and delete the oldest above `KEPT`."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", kept.job)[:60]
    path = folder / f"{kept.at_ms:013d}-{name}.json"
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(_FORMAT.dump_json(kept))
    os.replace(unfinished, path)
    for old in sorted(folder.glob("*.json"))[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def simulations(folder: Path) -> list[Kept]:
    """Return the kept results, newest first."""
    return list(_readable(sorted(folder.glob("*.json"), reverse=True)[:KEPT]))


def fleet_of(kept: Kept) -> Fleet:
    """Return the drawing of the first start of the first policy: on-demand nodes lie on the spot nodes."""
    steps, end_ms = kept.result.example, max(1, kept.result.example_ms)
    most = max((spot + steady for _, spot, steady in steps), default=0)
    bars = []
    for number, (at_ms, spot, steady) in enumerate(steps):
        until_ms = steps[number + 1][0] if number + 1 < len(steps) else end_ms
        x, width = round(at_ms / end_ms * WIDTH, 2), round(max(0, until_ms - at_ms) / end_ms * WIDTH, 2)
        for market, low, count in (("spot", 0, spot), ("on_demand", spot, steady)):
            if count:
                bars.append(Bar(market=market, x=x, y=(most - low - count) * LANE, width=width, height=count * LANE))
    return Fleet(bars=tuple(bars), height=max(1, most * LANE), most=most, hours=f"{end_ms / HOUR_MS:.1f}")


def _readable(paths: list[Path]) -> Iterator[Kept]:
    for path in paths:
        with suppress(OSError, ValidationError):
            yield _FORMAT.validate_json(path.read_bytes())
