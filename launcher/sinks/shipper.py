"""Send a run's records to one sink from the controller, beside its passes.

    closed -> open -> caught up -> closed
       ^        |  refused, silent or dead
       +--------+  after a pause that doubles

The ledger is the queue: a thread reads at most `MOST_RECORDS` records, asks the sink's own process to take them, and
goes on after its answer. The thread holds no transaction while it waits, so a sink that is down, slow or frozen delays
nothing else.

Each sender holds a kernel lock on a file of the sink. A controller sends without it if a frozen controller holds it;
`spotrl sync` does not, so two processes never send the same records.
"""

import fcntl
import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock
from engine.durable import write_durably
from launcher.decide.facts import Stage
from launcher.job.sections import Logging
from launcher.ledger.models import Run
from launcher.ledger.store import current_status, find_run
from launcher.sinks.connection import Connection, command_of
from launcher.sinks.messages import ENDS, Accepted, Close, Open, Opened, Question, Records, Refused
from launcher.sinks.records import count_records, read_records
from launcher.without_secrets import job_without_secrets

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Wall time between two looks at the ledger."""

LONGEST_PAUSE_SECONDS = 300.0
"""Longest pause between two attempts. The pause doubles from `LOOK_SECONDS` up to this limit."""

ANSWER_SECONDS = 120.0
"""Longest time for one answer. Then the sink's process counts as frozen, and is ended."""

END_SECONDS = 60.0
"""Longest time at the end of a run, when nothing of the run is left running, for what a sink still lacks."""

MOST_RECORDS = 20
"""Records of one question."""

_STATES: Mapping[str, ENDS] = {Stage.FINISHED: "finished", Stage.FAILED: "failed"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Shipped:
    """What a sink has of a run. `sent`, `known`: records. `where`: place in the sink. `problem`: why it lacks some.

    `is_offline`: the sink was not asked, and `sent` records are in files of this machine, at `where`.
    """

    sink: str
    sent: int
    known: int
    is_whole: bool
    where: str
    problem: str
    is_offline: bool


class Shipper:
    """Sends the records of one run to one sink, in a thread."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        run_name: str,
        clock: Clock,
        sink: str,
        settings: dict[str, Any],
        command: Sequence[str] = (),
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """`sink`: wandb or mlflow. `command`: of the sink's process; empty: the process of that sink."""
        self._sessions, self._run_name, self._clock, self._sink = sessions, run_name, clock, sink
        self._settings, self._command = settings, tuple(command) or tuple(command_of(sink))
        self._answer_seconds = answer_seconds
        self._connection: Connection | None = None
        self._sent = 0
        self._is_refused = False
        self._pause_s, self._next_at = LOOK_SECONDS, 0.0
        self._ended, self._until = threading.Event(), math.inf
        self._thread = threading.Thread(target=self._watch, name=f"sink-{sink}", daemon=True)
        with sessions() as session:
            self._run = find_run(session, run_name)
        self._folder = Path(self._run.folder) / "logging" / sink
        self._facts: dict[str, Any] = {}
        self._lock: int | None = None

    def start(self) -> None:
        self._thread.start()

    def end(self, timeout_s: float) -> None:
        """Ask the thread to send what is due in one last attempt, and to finish the run in the sink."""
        self._until = time.monotonic() + timeout_s
        self._ended.set()

    def wait(self) -> None:
        """Wait for the thread until the time limit of `end`."""
        self._thread.join(max(0.0, self._until - time.monotonic()) + 2.0)
        if self._thread.is_alive():
            log.warning("%s has %s records of %s, and may lack later ones", self._sink, self._sent, self._run.name)

    def becomes_only_sender(self) -> bool:
        """Take the lock of the sink. False: another process sends to it, or is frozen while it does. Raises OSError."""
        self._lock = _locked(self._folder.with_suffix(".lock"))
        return self._lock is not None

    def send_all(self) -> Shipped:
        """Send all records in the calling thread, and finish the run in the sink."""
        self.look()
        self._close()
        self._leave()
        is_written, offline = self._facts["is_whole"], self._facts.get("offline", "")
        return Shipped(
            sink=self._sink,
            sent=self._sent,
            known=self._facts["known"],
            is_whole=is_written and not offline,
            where=self._facts.get("where", ""),
            problem=offline if is_written else self._facts.get("problem", ""),
            is_offline=bool(offline),
        )

    def _watch(self) -> None:
        with suppress(OSError):  # a full disk: the run goes on, and so do its numbers
            self.becomes_only_sender()
        while not self._ended.wait(LOOK_SECONDS):
            if not self._is_refused and time.monotonic() >= self._next_at:
                self._survive(self.look)
        if not self._is_refused:
            self._survive(self.look)
        self._survive(self._close)
        self._leave()

    def _survive(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:  # a fault here must not end the numbers of a run that goes on
            log.exception("records could not be read or sent to %s", self._sink)
            self._leave()
            self._wait_longer()

    def look(self) -> None:
        """Send the records that the sink lacks."""
        if self._connection is None and not self._open():
            return
        while True:
            with self._sessions() as session:
                total = count_records(session, self._run)
                now_ms = self._clock.now_ms()
                records = read_records(session, self._run, self._sent, MOST_RECORDS, now_ms)
            if not records:
                return
            if not self._ask(Records(records=tuple(records), known=total)):
                return
            self._sent += len(records)
            self._note()

    def _open(self) -> bool:
        of_job = None if self._run.workdir is None else Path(self._run.workdir)
        self._connection = Connection(self._command, self._folder.with_suffix(".log"), of_job)
        answer = self._ask(
            Open(
                run_id=run_id(self._run),
                name=self._run.name,
                folder=str(self._folder),
                settings=self._settings,
                job=job_without_secrets(self._run.job),
                facts={
                    "infra": self._run.infra,
                    "money_basis": self._run.money_basis,
                    "code_version": self._run.code_version,
                    "job_digest": self._run.job_digest,
                    "seed": str(self._run.seed),
                },
            )
        )
        if not isinstance(answer, Opened):
            return False
        self._sent = answer.held
        log.info(
            "%s takes the numbers of %s from record %s on: %s", self._sink, self._run.name, answer.held, answer.where
        )
        self._note(where=answer.where, offline=answer.offline)
        return True

    def _ask(self, question: Question) -> Opened | Accepted | None:
        """Return the answer. None: the sink did not take the question, and is tried again after a pause."""
        assert self._connection is not None
        latest = time.monotonic() + self._answer_seconds
        answer = self._connection.ask(question, lambda: min(latest, self._until))
        if not isinstance(answer, Refused):
            self._pause_s = LOOK_SECONDS
            return answer
        log.warning("%s did not take the numbers of %s: %s", self._sink, self._run.name, answer.text)
        self._note(problem=answer.text)
        self._leave()
        self._is_refused = answer.is_final
        self._wait_longer()
        return None

    def _wait_longer(self) -> None:
        self._next_at = time.monotonic() + self._pause_s
        self._pause_s = min(LONGEST_PAUSE_SECONDS, self._pause_s * 2)

    def _close(self) -> None:
        """Finish the run in the sink, and say what the sink lacks."""
        with self._sessions() as session:
            total, status = count_records(session, self._run), current_status(session, self._run)
        state: ENDS = _STATES.get(status.status if status is not None else "", "stopped")
        is_whole = self._connection is not None and self._sent >= total
        if is_whole:
            is_whole = self._ask(Close(state=state)) is not None
        if not is_whole:
            log.warning(
                "%s has %s of the %s records of %s; `spotrl sync %s` sends the rest",
                self._sink,
                self._sent,
                total,
                self._run.name,
                self._run.name,
            )
        self._note(known=total, is_whole=is_whole)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _leave(self) -> None:
        if self._connection is not None:
            self._connection.kill()
            self._connection = None

    def _note(self, **changes: Any) -> None:
        """Write what the sink has to a file, for people."""
        self._facts |= {"sink": self._sink, "sent": self._sent, **changes}
        write_durably(self._folder.with_suffix(".json"), json.dumps(self._facts, indent=1).encode())


def run_id(run: Run) -> str:
    """Return the run's id in every sink: the same after a restart, and another for every run of the same name."""
    return f"{run.name}-{blake2b(f'{run.name} {run.created_ms}'.encode(), digest_size=4).hexdigest()}"


def shippers_of(sessions: sessionmaker[Session], run: Run, section: Logging, clock: Clock) -> list[Shipper]:
    """Return a shipper for each sink that the job names. None has started."""
    settings = section.model_dump(mode="json", exclude_none=True)
    return [Shipper(sessions, run.name, clock, sink, of_sink) for sink, of_sink in settings.items()]


def start_shippers(sessions: sessionmaker[Session], run: Run, section: Logging, clock: Clock) -> list[Shipper]:
    """Start a thread for each sink that the job names."""
    shippers = shippers_of(sessions, run, section, clock)
    for shipper in shippers:
        shipper.start()
    return shippers


def end_shippers(shippers: Sequence[Shipper], timeout_s: float | None = None) -> None:
    """End all at once. `timeout_s`: for all together; None: END_SECONDS."""
    for shipper in shippers:
        shipper.end(END_SECONDS if timeout_s is None else timeout_s)
    for shipper in shippers:
        shipper.wait()


def _locked(path: Path) -> int | None:
    """Return a handle that holds the lock on this file until it is closed. None: another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
