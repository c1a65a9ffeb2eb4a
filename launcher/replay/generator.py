"""Make a market by rule, where no recording of the plan's zones is at hand. Every figure from it is simulated.

The rule is that of the plan's closed form (market/spells.py): each zone is up for as long as the hazards of its pool
let a node live, then out for a log-normal time. Some zones of a region follow the region, and are up and out together.
An outage takes all nodes of its zone. A market begins at a time picked at random: in the middle of a spell.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from random import Random

from launcher.market.spells import TIE, Spells, ZoneSpells
from launcher.money import HOUR_MS
from launcher.replay.trace import PoolTrace, Trace

STEP_MS = 60_000
"""Times are rounded up to this step, in milliseconds."""

BEFORE_HOURS = 14 * 24
"""Hours that a market has run before a start, so that the start meets long spells as often as there are any."""


def describe(zones: Sequence[ZoneSpells]) -> str:
    """Return the rule of a market of these zones as text."""
    if not zones:
        return "no spot zones"
    spells = [zone.spells for zone in zones]
    uptimes = _between([100 * each.uptime for each in spells])
    ups, outs = _between([each.up_hours for each in spells]), _between([each.out_hours for each in spells])
    return (
        f"zones have capacity for {uptimes} % of the time, for {ups} h by their hazards, then none for {outs} h on "
        f"average (log-normal, sigma {spells[0].outage_sigma:g})"
    )


def _between(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def generate(zones: Sequence[ZoneSpells], hours: float, capacity: int, seed: int) -> Trace:
    """Return a market of these zones for so many hours. The same seed gives the same market."""
    follows = Random(seed)
    end_ms = round(hours * HOUR_MS)
    pools = []
    for zone in zones:
        own = zone.zone if follows.random() >= TIE else ""
        stream = f"{seed} {zone.cloud} {zone.region} {own}"
        changes = _changes(zone.spells, stream, _doubled(end_ms))
        pools.append(_pool(zone, [change for change in changes if change[0] < end_ms], capacity))
    return Trace(name=f"generated, seed {seed}", pools=tuple(pools), end_ms=end_ms)


def _doubled(ms: int) -> int:
    """Return the next power of two: markets of about the same length are made once."""
    return 1 << ms.bit_length()


@lru_cache(maxsize=8192)
def _changes(spells: Spells, stream: str, end_ms: int) -> Sequence[tuple[int, bool]]:
    """Return (time, whether there is capacity from then on) from 0 on. The same stream gives the same market."""
    random = Random(stream)
    is_up, at_ms = random.random() < spells.uptime, -BEFORE_HOURS * HOUR_MS  # an age at random comes by itself
    found = [(0, is_up)]
    while at_ms < end_ms:
        if at_ms <= found[-1][0]:
            found.pop()
        found.append((max(0, at_ms), is_up))
        if is_up:
            hours = spells.hazards.age_at(random.expovariate(1.0))
        else:
            hours = spells.out_median_hours * math.exp(random.gauss(0.0, spells.outage_sigma))
        at_ms = end_ms if hours == math.inf else at_ms + _up(hours * HOUR_MS)
        is_up = not is_up
    return found


def _pool(zone: ZoneSpells, changes: Sequence[tuple[int, bool]], capacity: int) -> PoolTrace:
    return PoolTrace(
        cloud=zone.cloud,
        region=zone.region,
        zone=zone.zone,
        instance_type=zone.instance_type,
        t_ms=tuple(at_ms for at_ms, _ in changes),
        capacity=tuple(capacity if is_up else 0 for _, is_up in changes),
        micro_usd_per_hour=(None,) * len(changes),
    )


def _up(ms: float) -> int:
    return math.ceil(ms / STEP_MS) * STEP_MS
