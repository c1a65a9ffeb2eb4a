"""Send a run's notices from the controller, beside its passes.

Each notice is a ledger row before it is sent, so a restarted controller sends what is missing. A controller that is
killed between sending and recording sends a notice a second time. A webhook that is down or slow delays nothing else.
"""

import logging
import threading
import time
from collections.abc import Callable

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock
from engine.events import IterationDone, TargetReached
from launcher.decide.facts import PROMOTED, Stage
from launcher.harmless import harmless
from launcher.learning import learns_nothing
from launcher.ledger.accounting import judge_micro_usd
from launcher.ledger.models import Node, NodeEvent, NoticeRow, Preemption, ProgressRow, Run, RunStatus
from launcher.ledger.node_history import metered_micro_usd
from launcher.ledger.store import find_run, writing
from launcher.notifications.notices import RunFacts, due_notices
from launcher.notifications.webhook import NotDelivered, send

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Wall time between two looks at the ledger."""

LONGEST_PAUSE_SECONDS = 300.0
"""Longest pause between two attempts. The pause doubles from `LOOK_SECONDS` up to this limit."""

END_SECONDS = 15.0
"""Longest time that the controller waits at the end of a run for its last notice."""


class Notifier:
    """Watches the ledger of one run in a thread, and posts its notices to a webhook."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        run_name: str,
        clock: Clock,
        url: str,
        no_progress_ms: int,
        post: Callable[[str, str], None] = send,
    ) -> None:
        """`url`: of the webhook, a secret. `post`: sends a text to a URL, or raises NotDelivered."""
        self._sessions, self._run_name, self._clock, self._url = sessions, run_name, clock, url
        self._no_progress_ms, self._post = no_progress_ms, post
        self._ended = threading.Event()
        self._pause_s, self._next_at = LOOK_SECONDS, 0.0
        self._thread = threading.Thread(target=self._watch, name="notifications", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout_s: float = END_SECONDS) -> None:
        """Send what is due now, in one last attempt, and stop."""
        self._ended.set()
        self._thread.join(timeout_s)

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._look_and_survive()
        self._next_at = 0.0
        self._look_and_survive()

    def _look_and_survive(self) -> None:
        try:
            self.look()
        except Exception:  # a fault here must not end the notices of a run that goes on and costs money
            log.exception("notices could not be read or sent; tried again")

    def look(self) -> None:
        """Record the notices that are due, and send those that are not sent."""
        with self._sessions() as session:
            run = find_run(session, self._run_name)
            facts = facts_of(session, run, self._clock.now_ms())
            keys = set(session.scalars(select(NoticeRow.key).where(NoticeRow.run_id == run.id)))
        fresh = [notice for notice in due_notices(facts, self._no_progress_ms) if notice.key not in keys]
        if fresh:
            with writing(self._sessions) as session:
                keys = set(session.scalars(select(NoticeRow.key).where(NoticeRow.run_id == run.id)))
                session.add_all(
                    NoticeRow(run_id=run.id, key=notice.key, at_ms=facts.now_ms, text=harmless(notice.text))
                    for notice in fresh
                    if notice.key not in keys
                )
        if time.monotonic() >= self._next_at:
            self._send_open(run.id)

    def _send_open(self, run_id: int) -> None:
        with self._sessions() as session:
            rows = session.scalars(
                select(NoticeRow)
                .where(NoticeRow.run_id == run_id, NoticeRow.sent_wall_ms.is_(None), NoticeRow.failure == "")
                .order_by(NoticeRow.id)
            ).all()
        for row in rows:
            try:
                self._post(self._url, row.text)
            except NotDelivered as error:
                log.warning("the webhook did not take a notice (%s): %s", row.key, error)
                if not error.is_final:
                    self._next_at = time.monotonic() + self._pause_s
                    self._pause_s = min(LONGEST_PAUSE_SECONDS, self._pause_s * 2)
                    return
                self._record(row.id, str(error))
            else:
                self._pause_s = LOOK_SECONDS
                self._record(row.id, "")

    def _record(self, notice_id: int, failure: str) -> None:
        with writing(self._sessions) as session:
            row = session.get_one(NoticeRow, notice_id)
            row.failure = failure
            row.sent_wall_ms = None if failure else time.time_ns() // 1_000_000


def facts_of(session: Session, run: Run, now_ms: int) -> RunFacts:
    """Read the facts behind a run's notices."""
    statuses = session.scalars(select(RunStatus).where(RunStatus.run_id == run.id).order_by(RunStatus.id)).all()
    rows = select(ProgressRow).where(ProgressRow.run_id == run.id)
    done = session.scalars(
        select(ProgressRow.at_ms).where(ProgressRow.run_id == run.id, ProgressRow.kind == IterationDone.KIND)
    )
    newest = session.scalar(rows.where(ProgressRow.kind == IterationDone.KIND).order_by(ProgressRow.id.desc()))
    reached = session.scalar(rows.where(ProgressRow.kind == TargetReached.KIND).order_by(ProgressRow.id.desc()))
    preempted = session.scalars(
        select(Preemption.at_ms).join(Node, Node.id == Preemption.node_id).where(Node.run_id == run.id)
    )
    promoted = session.execute(
        select(NodeEvent.id, Node.name, NodeEvent.evidence)
        .join(Node)
        .where(Node.run_id == run.id, NodeEvent.kind == PROMOTED)
        .order_by(NodeEvent.id)
    )
    return RunFacts(
        name=run.name,
        now_ms=now_ms,
        began_ms=max((row.at_ms for row in statuses if row.status == Stage.PLANNED), default=run.created_ms),
        stage=Stage(statuses[-1].status),
        status_id=statuses[-1].id,
        reason=statuses[-1].reason.partition("\n")[0],
        done_ms=sorted(done),
        preempted_ms=sorted(preempted),
        reached="{metric} {value:.3f} at iteration {iteration}".format(**reached.event) if reached is not None else "",
        spent_micro_usd=metered_micro_usd(session, run, now_ms) + judge_micro_usd(session, run),
        max_total_micro_usd=run.max_total_micro_usd,
        learning=learns_nothing(newest.event.get("health", {})) if newest is not None else "",
        promoted=[(number, node, evidence) for number, node, evidence in promoted],
    )
