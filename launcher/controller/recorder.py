"""Record in the ledger: news of nodes, prices, and the engine's progress. Every write checks the leases first."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock
from launcher.controller.lease import Lease, renew
from launcher.decide.budget_guard import worst_case
from launcher.decide.current_prices import PriceNow
from launcher.decide.facts import FOUND, NodeRecord
from launcher.decide.found_nodes import found_nodes
from launcher.decide.node_events import news
from launcher.decide.node_facts import NodeFact
from launcher.decide.price_events import paid
from launcher.ledger.models import NodeEvent, Run, SpentMark
from launcher.ledger.node_history import node_of, node_price, node_records, write_note
from launcher.ledger.store import append_progress, newest_event, nodes_of, writing
from launcher.market.side_prices import MINIMUM_BILLED_MS
from launcher.money import dollars
from launcher.placement.plan import Plan
from launcher.provision.local.provisioner import node_folder
from launcher.provision.progress import ProgressFiles
from launcher.storage.store_lease import Spent, StoreLease

log = logging.getLogger(__name__)


class Recorder:
    """Writes of a controller that still holds its leases. Raises LeaseLost after a takeover."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        run: Run,
        lease: Lease,
        bucket_lease: StoreLease | None,
        clock: Clock,
        plan: Plan,
    ) -> None:
        """`bucket_lease`: the lease in the bucket, which counts across machines. None: no bucket."""
        self._sessions, self._run, self._lease, self._clock, self._plan = sessions, run, lease, clock, plan
        self._began_ms = clock.now_ms()
        self.bucket_lease = bucket_lease
        self.progress_files = ProgressFiles()

    @contextmanager
    def transaction(self) -> Iterator[Session]:
        """Open a write transaction, if this controller still holds the lease."""
        self.check_lease()
        with writing(self._sessions) as session:
            renew(session, self._lease)
            yield session

    def check_lease(self) -> None:
        if self.bucket_lease is not None:
            self.bucket_lease.check()

    def write_news(self, cloud: Mapping[str, NodeFact]) -> list[NodeRecord]:
        """Record the cloud's news of the run's nodes. Return the updated records."""
        with self.transaction() as session:
            records = node_records(session, self._run)
            if self._add_found(session, records, cloud):
                records = node_records(session, self._run)
            now_ms = self._clock.now_ms()
            notes = news(records, cloud, now_ms, self._run.created_ms, self._began_ms)
            if not notes:
                return records
            nodes = {node.name: node for node in nodes_of(session, self._run)}
            for note in notes:
                log.info("%s: %s %s", note.node, note.kind, note.evidence)
                write_note(session, self._run, nodes[note.node], note)
            return node_records(session, self._run)

    def _add_found(self, session: Session, records: Sequence[NodeRecord], cloud: Mapping[str, NodeFact]) -> bool:
        """Write nodes into the ledger that were bought after the ledger was copied. Return whether there were any."""
        bought = found_nodes(
            {record.name for record in records},
            cloud,
            self._run.name,
            self._plan.slots,
            self._plan.sites,
            self._run.created_ms,
            self._clock.now_ms(),
        )
        for purchase in bought:
            log.warning("%s: %s", purchase.name, purchase.evidence)
            rate = purchase.option.placement.micro_usd_per_hour
            node = node_of(
                self._run,
                purchase.option,
                name=purchase.name,
                slot=purchase.slot.name,
                generation=purchase.generation,
                role=purchase.slot.role,
                requested_ms=purchase.requested_ms,
                reserved_micro_usd=worst_case(rate, MINIMUM_BILLED_MS),
            )
            session.add(node)
            session.flush()
            for kind in (FOUND, *(["requested"] if purchase.is_ordered else [])):
                evidence = purchase.evidence if kind == FOUND else ""
                session.add(NodeEvent(node_id=node.id, at_ms=purchase.requested_ms, kind=kind, evidence=evidence))
        session.flush()
        return bool(bought)

    def write_forgotten(self) -> None:
        """Record the money that the bucket knows, if this ledger is older than what the bucket says."""
        spent = None if self.bucket_lease is None else self.bucket_lease.spent
        if spent is None:
            return
        with self.transaction() as session:
            if newest_event(session, self._run) >= spent.event:
                return
            log.warning("this ledger is older than its run: %s was spent by then", dollars(spent.micro_usd))
            session.add(SpentMark(run_id=self._run.id, at_ms=spent.at_ms, micro_usd=spent.micro_usd))

    def tell_spent(self, metered: int, at_ms: int) -> None:
        """Have the bucket's lease say what was spent, for a ledger that is restored from a backup later."""
        if self.bucket_lease is not None:
            with self._sessions() as session:
                event = newest_event(session, self._run)
            self.bucket_lease.spent = Spent(event=event, at_ms=at_ms, micro_usd=metered)

    def write_prices(self, cloud: Mapping[str, NodeFact], nodes: Sequence[NodeRecord], prices: PriceNow) -> None:
        """Record the real purchases and their current prices."""
        changed = paid(nodes, cloud, prices, self._clock.now_ms())
        if not changed:
            return
        with self.transaction() as session:
            rows = {node.name: node for node in nodes_of(session, self._run)}
            for change in changed:
                log.info("%s: %s", change.node, change)
                session.add(node_price(rows[change.node], change))

    def write_progress(self) -> None:
        with self._sessions() as session:
            trainers = [node.name for node in node_records(session, self._run) if node.role == "trainer"]
        folders = [node_folder(Path(self._run.folder), name) for name in trainers]
        lines = [line for folder in folders for line in self.progress_files.read(folder) if line.run == self._run.name]
        if not lines:
            return
        # A node with a fast clock must not make the run older than the controller's clock says.
        now_ms = self._clock.now_ms()
        lines = [replace(line, at_ms=min(line.at_ms, now_ms)) for line in lines]
        try:
            with self.transaction() as session:
                append_progress(session, self._run, lines)
        except BaseException:
            self.progress_files.forget()
            raise
