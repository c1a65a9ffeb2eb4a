"""What a selftest does to its run and its cloud: read, preempt, stop, resume, look for what is left."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sqlalchemy.orm import Session, sessionmaker

from launcher.clouds.base import CloudApi
from launcher.clouds.preempting import Order, OrderState, Preempter
from launcher.exit_codes import Failure
from launcher.ledger.store import find_run
from launcher.runs.run_buckets import buckets_of
from launcher.runs.runs import bring_down, request_stop, resume_run, start_controller
from launcher.runs.views import run_view
from launcher.selftest.facts import Facts
from launcher.selftest.reading import Seen, instance_of_node, left_in_cloud, read_facts, regions_of
from launcher.storage.stores import newest_checkpoint, open_store

ALONE_SECONDS = 10.0
"""Seconds without a controller until another is started: its lease has expired without a successor."""


class Acts(Protocol):
    """The run under test. Every call may raise Failure, CloudUnreachable among them."""

    @property
    def means(self) -> str:
        """Return the cloud's means to preempt."""

    @property
    def notice_ms(self) -> int | None:
        """Return the notice that the cloud promises; None: none."""

    def now_ms(self) -> int:
        """Return the time on the run's clock."""

    def facts(self, observed: Seen) -> Facts:
        """Return the facts of now."""

    def preempt(self, node: str) -> Order:
        """Order the cloud to preempt a node."""

    def order_state(self, order: Order) -> OrderState:
        """Return the state of that order."""

    def ask_to_stop(self) -> None:
        """Have the run's controller stop the run, and do not wait."""

    def stop(self, seconds: float) -> Sequence[str]:
        """Stop the run, and wait for its end, at most this long. Return what is left. May be called again."""

    def resume(self) -> None:
        """Start the controller of the stopped run again."""

    def newest_checkpoint(self) -> str | None:
        """Return the name of the newest whole checkpoint in the run's bucket."""

    def left_in_cloud(self) -> tuple[str, ...]:
        """Return what the cloud lists of the run."""

    def ensure_controller(self) -> bool:
        """Start a controller if the run lacks one. Return whether one was started."""


@dataclass(kw_only=True)
class LaunchedRun:
    """A run that `spotrl launch` has started."""

    name: str
    sessions: sessionmaker[Session]
    api: CloudApi
    preempter: Preempter
    alone_since: float | None = None
    """Monotonic seconds since which the run has no controller."""

    @property
    def means(self) -> str:
        return self.preempter.means

    @property
    def notice_ms(self) -> int | None:
        return self.preempter.notice_ms

    def now_ms(self) -> int:
        with self.sessions() as session:
            return find_run(session, self.name).clock.now_ms()

    def facts(self, observed: Seen) -> Facts:
        return read_facts(self.sessions, self.name, observed)

    def preempt(self, node: str) -> Order:
        instances = (instance_of_node(self.api, region, self.name, node) for region in self._regions())
        instance = next((instance for instance in instances if instance is not None), None)
        if instance is None:
            raise Failure(f"the cloud lists no running machine for {node}; the ledger says that it is ready")
        return self.preempter.preempt(instance)

    def order_state(self, order: Order) -> OrderState:
        return self.preempter.state(order)

    def ask_to_stop(self) -> None:
        request_stop(self.sessions, self.name)

    def stop(self, seconds: float) -> Sequence[str]:
        return bring_down(self.sessions, self.name, seconds)

    def resume(self) -> None:
        resume_run(self.sessions, self.name)

    def newest_checkpoint(self) -> str | None:
        with self.sessions() as session:
            (url,) = buckets_of(find_run(session, self.name))
        return newest_checkpoint(open_store(url))

    def left_in_cloud(self) -> tuple[str, ...]:
        return left_in_cloud(self.api, self.name, self._regions())

    def ensure_controller(self) -> bool:
        if not run_view(self.sessions, self.name).lacks_controller:
            self.alone_since = None
            return False
        self.alone_since = self.alone_since or time.monotonic()
        if time.monotonic() - self.alone_since < ALONE_SECONDS:
            return False
        self.alone_since = None
        start_controller(self.sessions, self.name)
        return True

    def _regions(self) -> list[str]:
        return regions_of(self.sessions, self.name)
