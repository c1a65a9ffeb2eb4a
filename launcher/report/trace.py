"""Timeline of a run's workers and nodes as a Chrome trace, for Perfetto (ui.perfetto.dev) and chrome://tracing.

The trace has one process per node, in the order of the requests. A node's process has one thread per worker with the
worker's phases, and one thread for the node's lifecycle. The trainer's process also has a thread for the iterations.
Instant marks on a node show cloud events (notice, gone) and regroups of its SP groups. Times are wall time:
microseconds since the run was created, independent of the clock's factor.

The format: Trace Event Format, complete (X), instant (i) and metadata (M) events.
"""

from collections.abc import Iterator
from typing import Any

from sqlalchemy.orm import Session

from engine.events import Evaluated, IterationDone, NodeUsage, Regrouped
from launcher.decide.facts import PROMOTED
from launcher.ledger.models import Run
from launcher.ledger.store import node_events, nodes_of, progress_of
from launcher.report.sharing import groups_text

LIFE, ITERATIONS, FIRST_WORKER = 0, 1, 2
"""Thread numbers in a node's process."""

ENDS = ("gone", "released", "denied", "no_capacity")


def chrome_trace(session: Session, run: Run) -> dict[str, Any]:
    """Return the trace of the whole run from the ledger. A span without an end lasts until the newest event."""
    return _Trace(session, run).whole()


class _Trace:
    def __init__(self, session: Session, run: Run) -> None:
        self._session, self._run = session, run
        self._nodes = {node.name: node for node in nodes_of(session, run)}
        self._pids = {name: pid for pid, name in enumerate(self._nodes, start=1)}
        bought = [(node.requested_ms, name) for name, node in self._nodes.items() if node.role == "trainer"]
        promoted = [(event.at_ms, node.name) for node, event in node_events(session, run) if event.kind == PROMOTED]
        self._trainers = sorted(bought + promoted)
        """When each node got the role of the trainer, oldest first."""
        self._threads: dict[tuple[int, str], int] = {}
        self._newest_ms = run.created_ms

    def whole(self) -> dict[str, Any]:
        events = [*self._phases(), *self._iterations(), *self._evaluations(), *self._regroups()]
        events += self._lives()  # last: the spans of live nodes end at the newest time of all events
        return {
            "traceEvents": [*self._names(), *events],
            "displayTimeUnit": "ms",
            "otherData": {
                "run": self._run.name,
                "clock_factor": self._run.clock_factor,
                "times": "real microseconds since the run was created",
            },
        }

    def _phases(self) -> Iterator[dict[str, Any]]:
        for row in progress_of(self._session, self._run, NodeUsage.KIND):
            for worker, phase, begun, ended in row.event.get("spans", ()):
                pid = self._pids.get(row.event["node"])
                if pid is not None:
                    thread = self._threads.setdefault((pid, worker), FIRST_WORKER + len(self._threads))
                    yield self._span(pid, thread, phase, begun, ended)

    def _iterations(self) -> Iterator[dict[str, Any]]:
        for row in progress_of(self._session, self._run, IterationDone.KIND):
            # The event belongs to the newest node that had the role of the trainer before the event.
            earlier = [name for since_ms, name in self._trainers if since_ms <= row.at_ms]
            if earlier:
                begun = row.at_ms - row.event["wall_seconds"] * 1000 * self._run.clock_factor
                numbers = {"reward": row.event["reward_mean"], "explored": row.event["explored"]}
                name = f"iteration {row.event['iteration']}"
                yield self._span(self._pids[earlier[-1]], ITERATIONS, name, begun, row.at_ms) | {"args": numbers}

    def _evaluations(self) -> Iterator[dict[str, Any]]:
        for row in progress_of(self._session, self._run, Evaluated.KIND):
            yield self._instant(0, LIFE, "evaluated", row.at_ms, scope="g") | {"args": row.event["metrics"]}

    def _regroups(self) -> Iterator[dict[str, Any]]:
        for row in progress_of(self._session, self._run, Regrouped.KIND):
            pid = self._pids.get(row.event["node"])
            if pid is not None:
                groups, why = row.event["groups"], row.event["reason"]
                name = f"groups {groups_text(groups)}"
                yield self._instant(pid, LIFE, name, row.at_ms, scope="p") | {"args": {"groups": groups, "reason": why}}

    def _lives(self) -> Iterator[dict[str, Any]]:
        stages: dict[str, list[tuple[int, str]]] = {
            n.name: [(n.requested_ms, "requested")] for n in self._nodes.values()
        }
        for node, event in node_events(self._session, self._run):
            self._newest_ms = max(self._newest_ms, event.at_ms)
            if event.kind == "notice" or event.kind == "gone":
                text = f"{event.kind}: {event.evidence}" if event.evidence else event.kind
                yield self._instant(self._pids[node.name], LIFE, text, event.at_ms, scope="p")
            if event.kind not in ("notice", "requested"):
                stages[node.name].append((event.at_ms, event.kind))
        for name, steps in stages.items():
            ends = [at_ms for at_ms, _ in steps[1:]] + [self._newest_ms]
            for (begun, kind), ended in zip(steps, ends, strict=True):
                if kind not in ENDS:
                    yield self._span(self._pids[name], LIFE, kind, begun, ended)

    def _names(self) -> Iterator[dict[str, Any]]:
        for name, pid in self._pids.items():
            node = self._nodes[name]
            yield _name("process_name", pid, 0, {"name": f"{name} ({node.market}, {node.cloud} {node.zone})"})
            yield _name("process_sort_index", pid, 0, {"sort_index": pid})
            yield _name("thread_name", pid, LIFE, {"name": "node"})
            if name in (trainer for _, trainer in self._trainers):
                yield _name("thread_name", pid, ITERATIONS, {"name": "iterations"})
        for (pid, worker), thread in self._threads.items():
            yield _name("thread_name", pid, thread, {"name": worker})

    def _span(self, pid: int, thread: int, name: str, begun_ms: float, ended_ms: float) -> dict[str, Any]:
        self._newest_ms = max(self._newest_ms, round(ended_ms))
        length = max(0.0, ended_ms - begun_ms) * 1000 / self._run.clock_factor
        return {
            "ph": "X", "pid": pid, "tid": thread, "name": name, "cat": "spotrl", "ts": self._us(begun_ms), "dur": length
        }  # fmt: skip

    def _instant(self, pid: int, thread: int, name: str, at_ms: int, *, scope: str) -> dict[str, Any]:
        """Return an instant event. `scope`: g draws the mark over the whole trace, p over the process."""
        self._newest_ms = max(self._newest_ms, at_ms)
        return {"ph": "i", "pid": pid, "tid": thread, "name": name, "cat": "spotrl", "ts": self._us(at_ms), "s": scope}

    def _us(self, at_ms: float) -> float:
        return (at_ms - self._run.clock_origin_ms) * 1000 / self._run.clock_factor


def _name(kind: str, pid: int, thread: int, content: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": thread, "name": kind, "args": content}
