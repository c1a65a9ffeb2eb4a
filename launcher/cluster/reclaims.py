"""When the local infra takes its spot nodes back, and how: a rule that is printed, from a trace that was recorded.

Nothing is drawn at random: the n-th spot node of a run lives as long as the rule says, in every run. The trace
counts the nodes of one pool on AWS; it has no notices in it, so those are scripted. Pure, but for reading the
bundled trace.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from launcher.job import ReclaimConfig
from launcher.money import duration

APART_MS = 300_000
"""Lifetimes closer than this (5 minutes) are called alike: two nodes bought together should not end together."""

TRACES = {"bamboo-p3": "p3-trace.csv"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """How a node ends. SIGKILL closes its sockets, as a crash does; SIGSTOP leaves them open, as a lost VM does."""

    with_notice: bool
    signal: str


MANNERS = (
    Manner(with_notice=True, signal="SIGKILL"),
    Manner(with_notice=False, signal="SIGSTOP"),
    Manner(with_notice=False, signal="SIGKILL"),
    Manner(with_notice=True, signal="SIGSTOP"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reclaim:
    """What is in store for one spot node. `lifetime_ms` counts from the moment it is ready (run's clock)."""

    lifetime_ms: int
    notice_ms: int
    manner: Manner


@dataclass(frozen=True, kw_only=True, slots=True)
class ReclaimRule:
    """The fate of every spot node of a run, by its ordinal: 0 for the first one bought."""

    trace: str
    lifetimes_ms: tuple[int, ...]
    notice_ms: int

    def reclaim(self, ordinal: int) -> Reclaim:
        """Past the end of the trace the lifetimes begin again."""
        lifetime_ms = self.lifetimes_ms[ordinal % len(self.lifetimes_ms)]
        return Reclaim(lifetime_ms=lifetime_ms, notice_ms=self.notice_ms, manner=MANNERS[ordinal % len(MANNERS)])

    def describe(self) -> str:
        """The rule, for the person who starts the run."""
        first = ", ".join(duration(ms) for ms in self.lifetimes_ms[:6])
        return (
            f"The n-th spot node is taken back as long after it was ready as the n-th node removed in the recorded "
            f"trace {self.trace} had lived; removals whose lifetime is within {duration(APART_MS)} of an earlier "
            f"one's are kept for later. First lifetimes: {first}. In turn: notice + SIGKILL, silent SIGSTOP, silent "
            f"SIGKILL, notice + SIGSTOP; a notice comes {duration(self.notice_ms)} ahead. All on the run's clock."
        )


def reclaim_rule(config: ReclaimConfig) -> ReclaimRule | None:
    """The rule that a job asks for; None when it wants no reclaims."""
    if config.trace == "none":
        return None
    lifetimes_ms = distinct_first(_recorded(TRACES[config.trace]))
    return ReclaimRule(trace=config.trace, lifetimes_ms=lifetimes_ms, notice_ms=config.notice)


def lifetimes(lines: Iterable[str]) -> tuple[int, ...]:
    """How long each removed node of a trace had lived, in order of removal. A line: `milliseconds,add|remove,node`."""
    added: dict[str, int] = {}
    lived: list[int] = []
    for line in filter(None, map(str.strip, lines)):
        at_ms, what, node = line.split(",")
        if what == "add":
            added[node] = int(at_ms)
        elif node in added:
            lived.append(int(at_ms) - added.pop(node))
    return tuple(lived)


def distinct_first(lifetimes_ms: Iterable[int]) -> tuple[int, ...]:
    """The same lifetimes; those that are within `APART_MS` of an earlier one go behind all the others, in order."""
    distinct: list[int] = []
    alike: list[int] = []
    for lived in lifetimes_ms:
        is_alike = any(abs(lived - earlier) < APART_MS for earlier in distinct)
        (alike if is_alike else distinct).append(lived)
    return (*distinct, *alike)


@cache
def _recorded(file_name: str) -> tuple[int, ...]:
    return lifetimes(files("catalogs").joinpath("traces", file_name).read_text().splitlines())
