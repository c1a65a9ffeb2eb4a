"""The events of a run as text: status changes, nodes and engine, for `spotrl events` and `spotrl status`."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.orm import Session

from engine.events import (
    EngineFinished,
    EngineStarted,
    Evaluated,
    ExplorationRests,
    IterationDone,
    NodeMissed,
    Regrouped,
    TargetReached,
    Warned,
)
from launcher.decide.facts import ENDS, FOUND, INCOMPLETE, INSTANCE_ENDED, PROMOTED, Stage
from launcher.harmless import harmless
from launcher.ledger.models import STAND_IN, Node, NodeEvent, ProgressRow, Run, RunStatus, TroubleRow
from launcher.report.sharing import groups_text


@dataclass(frozen=True, kw_only=True, slots=True)
class EventLine:
    """One event of a run, as text. `elapsed_ms` is on the run's clock."""

    at_ms: int
    elapsed_ms: int
    source: str
    kind: str
    text: str


class Seen(NamedTuple):
    """The newest event read so far: ids in the tables of statuses, node events, engine events and troubles."""

    status: int = 0
    node_event: int = 0
    progress: int = 0
    trouble: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """Choice of events. Empty: all but disconnections that cost no work.

    `nodes`: full names of nodes. `since_ms`: earliest time on the run's clock.
    """

    kinds: Collection[str] = ()
    nodes: Collection[str] = ()
    since_ms: int = 0

    def takes(self, line: EventLine, event: Mapping[str, Any] | None = None) -> bool:
        """Return whether the event is shown. `event`: the engine's event behind the line."""
        named = line.source if event is None else event.get("node", line.source)
        if line.at_ms < self.since_ms or (self.nodes and named not in self.nodes):
            return False
        if self.kinds:
            return line.kind in self.kinds
        # A lost node has its own event. The broken connection is a second one only if work has to be done again.
        return line.kind != NodeMissed.KIND or event is None or event["lost_steps"] > 0


ALL = Wanted()

_WORDS: Mapping[str, Callable[[ProgressRow, Mapping[str, Any]], str]] = {
    EngineStarted.KIND: lambda row, event: (
        f"from iteration {event['iteration']} (lineage {row.lineage}) on {event['devices']}"
    ),
    IterationDone.KIND: lambda row, event: (
        f"iteration {event['iteration']}: reward {event['reward_mean']:.3f}, {event['explored']} explored"
    ),
    Evaluated.KIND: lambda row, event: f"version {event['iteration']}: {_scores(event['metrics'])}",
    ExplorationRests.KIND: lambda row, event: f"for {event['batches']} batches; no action needed",
    NodeMissed.KIND: lambda row, event: f"{event['node']}: {event['reason']}, {event['lost_steps']} steps to do again",
    Regrouped.KIND: lambda row, event: f"{event['node']}: groups {groups_text(event['groups'])} ({event['reason']})",
    TargetReached.KIND: lambda row, event: f"{event['metric']} {event['value']:.3f} at iteration {event['iteration']}",
    Warned.KIND: lambda row, event: str(event["text"]),
    EngineFinished.KIND: lambda row, event: f"{event['reason']} at iteration {event['iteration']} {event['text']}",
}
"""Text of each kind of engine event that people read. Only the accounting reads the others."""

KINDS = (
    *(stage.value for stage in Stage),
    *(STAND_IN, FOUND, "requested", "up", PROMOTED, "ready", "notice", INCOMPLETE, "releasing", INSTANCE_ENDED),
    *sorted(ENDS),
    *_WORDS,
)
"""Every kind of event, for `--kind`."""


def event_lines(session: Session, run: Run, choice: Wanted = ALL) -> list[EventLine]:
    """Return the run's events, oldest first."""
    return new_events(session, run, Seen(), choice)[0]


def newest_events(session: Session, run: Run, count: int, after: Seen | None = None) -> tuple[list[EventLine], Seen]:
    """Return the newest `count` events after `after`, oldest first, and what to pass as `after` next time.

    Engine events before them are not read: a browser that comes back after an hour must not wait for a hundred
    thousand.
    """
    after = Seen() if after is None else after
    older = session.scalar(
        select(ProgressRow.id)
        .where(
            ProgressRow.run_id == run.id,
            ProgressRow.id > after.progress,
            or_(*(ProgressRow.kind == kind for kind in _WORDS)),
        )
        .order_by(ProgressRow.id.desc())
        .offset(count)
        .limit(1)
    )
    lines, until = new_events(session, run, after._replace(progress=older or after.progress))
    return lines[-count:], until


def newest_seen(session: Session, run: Run) -> Seen:
    """Return the ids of the newest events: from there on, `new_events` returns only what comes later."""
    return _newest(session, run, Seen())


def new_events(session: Session, run: Run, after: Seen, choice: Wanted = ALL) -> tuple[list[EventLine], Seen]:
    """Return the events after `after`, oldest first, and what to pass as `after` next time."""
    until = _newest(session, run, after)
    lines: list[EventLine] = []

    def add(at_ms: int, source: str, kind: str, text: str, event: Mapping[str, Any] | None = None) -> None:
        line = EventLine(
            at_ms=at_ms, elapsed_ms=at_ms - run.created_ms, source=source, kind=kind, text=harmless(text).strip()
        )
        if choice.takes(line, event):
            lines.append(line)

    for status in session.scalars(
        select(RunStatus).where(RunStatus.run_id == run.id, _between(RunStatus.id, after.status, until.status))
    ):
        add(status.at_ms, "run", status.status, status.reason.partition("\n")[0])
    for name, happened in session.execute(
        select(Node.name, NodeEvent)
        .join(NodeEvent, NodeEvent.node_id == Node.id)
        .where(Node.run_id == run.id, _between(NodeEvent.id, after.node_event, until.node_event))
        .order_by(NodeEvent.at_ms, NodeEvent.id)
    ):
        add(happened.at_ms, name, happened.kind, happened.evidence)
    for row in session.scalars(
        select(ProgressRow)
        .where(
            ProgressRow.run_id == run.id,
            _between(ProgressRow.id, after.progress, until.progress),
            or_(*(ProgressRow.kind == kind for kind in _WORDS)),
        )
        .order_by(ProgressRow.id)
    ):
        add(row.at_ms, row.source, row.kind, _WORDS[row.kind](row, row.event), row.event)
    return sorted(lines, key=lambda line: line.at_ms), until


def _newest(session: Session, run: Run, after: Seen) -> Seen:
    status = session.scalar(select(func.max(RunStatus.id)).where(RunStatus.run_id == run.id))
    node_event = session.scalar(select(func.max(NodeEvent.id)).join(Node).where(Node.run_id == run.id))
    progress = session.scalar(select(func.max(ProgressRow.id)).where(ProgressRow.run_id == run.id))
    trouble = session.scalar(select(func.max(TroubleRow.id)).where(TroubleRow.run_id == run.id))
    return Seen(
        status or after.status, node_event or after.node_event, progress or after.progress, trouble or after.trouble
    )


def _between(column: Any, after: int, until: int) -> ColumnElement[bool]:
    condition: ColumnElement[bool] = (column > after) & (column <= until)
    return condition


def _scores(metrics: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in metrics.items())
