"""The schedule by which the local infra preempts its spot nodes: a printed rule, from a recorded trace or the job.

Nothing is random: the n-th spot node of a run has the same lifetime in every run. The trace counts the nodes of one
pool on AWS. The trace has no notices, so notices are scripted. Pure, except for reading the bundled trace.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from launcher.job.sections import PlannedPreemption, PreemptionConfig
from launcher.money import duration

APART_MS = 300_000
"""Lifetimes closer than 5 minutes count as alike: two nodes bought together should not end together."""

TRACES = {"bamboo-p3": "p3-trace.csv"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Manner:
    """The manner of a node's end.

    SIGKILL closes the sockets, like a crash; SIGSTOP leaves sockets open, like a lost VM.
    """

    with_notice: bool
    signal: str


MANNERS = (
    Manner(with_notice=True, signal="SIGKILL"),
    Manner(with_notice=False, signal="SIGSTOP"),
    Manner(with_notice=False, signal="SIGKILL"),
    Manner(with_notice=True, signal="SIGSTOP"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduledPreemption:
    """The scheduled preemption of one spot node.

    `lifetime_ms` counts from the moment the node is ready (run's clock).
    """

    lifetime_ms: int
    notice_ms: int
    manner: Manner


@dataclass(frozen=True, kw_only=True, slots=True)
class PreemptionSchedule:
    """The preemption schedule of a run's spot nodes.

    `lifetimes_ms`: by ordinal, 0 for the first purchase; empty without a trace. `planned`: at fixed iterations.
    """

    trace: str
    lifetimes_ms: tuple[int, ...]
    notice_ms: int
    planned: tuple[PlannedPreemption, ...] = ()

    def preemption(self, ordinal: int) -> ScheduledPreemption | None:
        """Return the preemption of a node by the trace; None without one. Past its end the lifetimes begin again."""
        if not self.lifetimes_ms:
            return None
        lifetime_ms = self.lifetimes_ms[ordinal % len(self.lifetimes_ms)]
        return ScheduledPreemption(
            lifetime_ms=lifetime_ms, notice_ms=self.notice_ms, manner=MANNERS[ordinal % len(MANNERS)]
        )

    def describe(self) -> str:
        """Return the rule as text for the user who starts the run."""
        planned = [
            f"after iteration {one.iteration} {', '.join(one.slots)}: "
            + (f"notice + {one.signal}" if one.notice else f"silent {one.signal}")
            for one in self.planned
        ]
        at_iterations = f"Spot nodes are preempted {'; '.join(planned)}." if planned else ""
        if not self.lifetimes_ms:
            return f"{at_iterations} A notice comes {duration(self.notice_ms)} ahead, on the run's clock."
        first = ", ".join(duration(ms) for ms in self.lifetimes_ms[:6])
        return (
            f"The n-th spot node is preempted as long after it was ready as the n-th node removed in the recorded "
            f"trace {self.trace} had lived; removals whose lifetime is within {duration(APART_MS)} of an earlier "
            f"one's are kept for later. First lifetimes: {first}. In turn: notice + SIGKILL, silent SIGSTOP, silent "
            f"SIGKILL, notice + SIGSTOP; a notice comes {duration(self.notice_ms)} ahead. All on the run's clock."
            + (f" {at_iterations}" if at_iterations else "")
        )


def preemption_schedule(config: PreemptionConfig) -> PreemptionSchedule | None:
    """Return the rule for a job. None: the job wants no preemptions."""
    if config.trace == "none" and not config.at:
        return None
    lifetimes_ms = () if config.trace == "none" else distinct_first(_recorded(TRACES[config.trace]))
    return PreemptionSchedule(trace=config.trace, lifetimes_ms=lifetimes_ms, notice_ms=config.notice, planned=config.at)


def lifetimes(lines: Iterable[str]) -> tuple[int, ...]:
    """Return the lifetime of each removed node of a trace, in order of removal.

    A line: `milliseconds,add|remove,node`.
    """
    added: dict[str, int] = {}
    lived: list[int] = []
    for line in filter(None, map(str.strip, lines)):
        at_ms, event, node = line.split(",")
        if event == "add":
            added[node] = int(at_ms)
        elif node in added:
            lived.append(int(at_ms) - added.pop(node))
    return tuple(lived)


def distinct_first(lifetimes_ms: Iterable[int]) -> tuple[int, ...]:
    """Return the lifetimes reordered: lifetimes within `APART_MS` of an earlier value go to the end, in order."""
    distinct: list[int] = []
    alike: list[int] = []
    for lived in lifetimes_ms:
        is_alike = any(abs(lived - earlier) < APART_MS for earlier in distinct)
        (alike if is_alike else distinct).append(lived)
    return (*distinct, *alike)


@cache
def _recorded(file_name: str) -> tuple[int, ...]:
    return lifetimes(files("catalogs").joinpath("traces", file_name).read_text().splitlines())
