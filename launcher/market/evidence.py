"""Lives of spot nodes as evidence: by age, weighed by how much each life really says. Pure.

lives of a pool -> node-hours and preemptions by age; raw (`Exposure`) and weighed (`Evidence`)

Three things make a life count for less than 1:

- Nodes of one pool share a fate. Of n nodes that are up together, each counts 1/n: a burst that takes all of them is
  one event, and their quiet hours are the hours of one node. The ratio of events to hours stays the same.
- A pool has good and bad weeks, so lives one after another are alike too (`DISPERSION`).
- Old evidence fades: it counts half after `HALF_LIFE_MS`.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Self

from launcher.money import HOUR_MS

BUCKET_STARTS_MS = tuple(minutes * 60_000 for minutes in (0, 15, 30, 60, 120, 240, 480, 960))
"""Start of each age bucket in milliseconds. The last bucket has no end; recorded nodes were watched for 48 h."""

BUCKET_HOURS = (*((end - start) / HOUR_MS for start, end in pairwise(BUCKET_STARTS_MS)), inf)

HALF_LIFE_MS = 7 * 24 * HOUR_MS
"""Time after which evidence counts half, in milliseconds. A week: assumed, because lives of one zone come in bursts."""

DISPERSION = 3.0
"""Lives that say as much as one life that is independent of the others. Intervals of priors that learnt from 30 lives
as if independent held 57 to 67 % of the later lives, at 90 % nominal (25 recorded zones outside of the fit)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """Watched time of a node, from `up` on.

    `reclaimed` is False if the node still runs or the launcher ended the node. `ended_ms`: time at which the watch
    ended, in milliseconds UTC.
    """

    ms: int
    reclaimed: bool
    ended_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exposure:
    """Node-milliseconds watched and preemptions seen, by age bucket."""

    ms: tuple[int, ...] = (0,) * len(BUCKET_STARTS_MS)
    reclaims: tuple[int, ...] = (0,) * len(BUCKET_STARTS_MS)

    @classmethod
    def of(cls, lives: Iterable[Life]) -> Self:
        watched, reclaims = [0] * len(BUCKET_STARTS_MS), [0] * len(BUCKET_STARTS_MS)
        for life in lives:
            ends = (*BUCKET_STARTS_MS[1:], max(life.ms, BUCKET_STARTS_MS[-1]))
            for bucket, (start, end) in enumerate(zip(BUCKET_STARTS_MS, ends, strict=True)):
                watched[bucket] += max(0, min(life.ms, end) - start)
            if life.reclaimed:
                reclaims[max(bucket for bucket, start in enumerate(BUCKET_STARTS_MS) if start <= life.ms)] += 1
        return cls(ms=tuple(watched), reclaims=tuple(reclaims))

    def __add__(self, other: "Exposure") -> "Exposure":
        return Exposure(
            ms=tuple(map(sum, zip(self.ms, other.ms, strict=True))),
            reclaims=tuple(map(sum, zip(self.reclaims, other.reclaims, strict=True))),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """Preemptions and node-hours by age bucket, weighed; both are fractions."""

    preemptions: tuple[float, ...] = (0.0,) * len(BUCKET_STARTS_MS)
    hours: tuple[float, ...] = (0.0,) * len(BUCKET_STARTS_MS)

    @classmethod
    def of(cls, exposure: Exposure) -> Self:
        """Return an exposure in which every life counts fully."""
        return cls(preemptions=tuple(map(float, exposure.reclaims)), hours=tuple(ms / HOUR_MS for ms in exposure.ms))

    def __add__(self, other: "Evidence") -> "Evidence":
        return Evidence(
            preemptions=tuple(map(sum, zip(self.preemptions, other.preemptions, strict=True))),
            hours=tuple(map(sum, zip(self.hours, other.hours, strict=True))),
        )

    def times(self, weight: float) -> "Evidence":
        return Evidence(
            preemptions=tuple(weight * count for count in self.preemptions),
            hours=tuple(weight * hours for hours in self.hours),
        )


def weighed(
    lives: Sequence[Life], now_ms: int, half_life_ms: float = HALF_LIFE_MS, dispersion: float = DISPERSION
) -> Evidence:
    """Return the evidence of one pool's lives at `now_ms` (UTC).

    Six nodes that are up together for an hour and are taken together: 1 event in 1 h, over the dispersion. The same
    six a week ago: half of that.
    """
    total = Evidence()
    for life, together in zip(lives, _together(lives), strict=True):
        fades = 0.5 ** (max(0, now_ms - life.ended_ms) / half_life_ms)
        total += Evidence.of(Exposure.of([life])).times(fades / together / dispersion)
    return total


def _together(lives: Sequence[Life]) -> list[float]:
    """Return for each life the average number of nodes that were up during it, with itself."""
    changes = sorted(change for life in lives for change in ((life.ended_ms - life.ms, 1), (life.ended_ms, -1)))
    times_ms, node_ms, up = [0], [0], 0
    for at_ms, change in changes:
        node_ms.append(node_ms[-1] + up * (at_ms - times_ms[-1]) if up else node_ms[-1])
        times_ms.append(at_ms)
        up += change

    def until(at_ms: int) -> int:
        return node_ms[bisect_right(times_ms, at_ms) - 1]

    return [
        max(1.0, (until(life.ended_ms) - until(life.ended_ms - life.ms)) / life.ms) if life.ms > 0 else 1.0
        for life in lives
    ]


def lives_of_trace(lines: Iterable[str]) -> tuple[Life, ...]:
    """Return the lives in a recorded trace of `milliseconds,add|remove,node`.

    Nodes alive at the end of the trace were not preempted. Times of ends count from the start of the trace.
    """
    added: dict[str, int] = {}
    lives, last = [], 0
    for line in filter(None, map(str.strip, lines)):
        at, event, node = line.split(",")
        last = max(last, int(at))
        if event == "add":
            added[node] = int(at)
        elif node in added:
            lives.append(Life(ms=int(at) - added.pop(node), reclaimed=True, ended_ms=int(at)))
    return (*lives, *(Life(ms=last - since, reclaimed=False, ended_ms=last) for since in added.values()))
