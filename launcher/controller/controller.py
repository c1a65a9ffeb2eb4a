"""The controller: one process per run that buys missing nodes, records events, and stops in time.

a pass: observe the nodes -> record events and prices -> read the engine's progress -> decide -> act
        -> send the capacity to the engine

The controller keeps no state. Every pass starts from facts (provisioner, ledger, progress files), and an intent is in
the ledger before the request is made. So `kill -9` between any two lines is repaired by the next pass, of this process
or of the next controller. A lease ensures that a run has only one controller, and every transaction checks the lease
first.
"""

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, assert_never

import httpx
from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock, ScaledClock, SteadyClock, boot_ms
from engine.config import ClockConfig, NodeSpec, role_token
from engine.events import Capacity, EngineFinished, IterationDone, Market, NodeCapacity, NodeState
from launcher.clouds.limits import build_limits
from launcher.controller.cloud_time import CloudTime
from launcher.controller.lease import Lease, give_up, renew, take_lease, this_process
from launcher.controller.progress import ProgressFiles
from launcher.decide import budget_guard
from launcher.decide.actions import Action, Ask, Buy, Enter, Release, TellStop
from launcher.decide.current_prices import Price, PriceNow, repriced
from launcher.decide.facts import ENDS, OVER, Facts, NodeRecord, Others, Stage, Wanted
from launcher.decide.failover import LaunchRate
from launcher.decide.launch_history import MoveRules
from launcher.decide.node_events import Note, news
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.decide.price_events import Paid, paid
from launcher.decide.reconcile import decide
from launcher.decide.run_budget import (
    describe_brakes,
    hourly_micro_usd,
    planned_hourly,
    refused_now,
    reserved_micro_usd,
)
from launcher.exit_codes import Failure
from launcher.job.checked import JobError
from launcher.job.load import all_runs_of
from launcher.job.schema import Job
from launcher.ledger.accounting import charges_of_run, prices_of_run, spent_micro_usd
from launcher.ledger.billing import LOCAL, NOT_PRICED, bill, minimum_billed_ms, side_costs
from launcher.ledger.models import Node, NodeEvent, NodePrice, Preemption, ProgressRow, Run, RunStatus, SideCost
from launcher.ledger.prices import latest_prices
from launcher.ledger.store import (
    append_progress,
    append_status,
    current_status,
    find_run,
    newest_ms,
    nodes_of,
    writing,
)
from launcher.market.prices import PriceSource
from launcher.market.quality import USABLE
from launcher.market.side_prices import side_micro_usd_per_hour
from launcher.money import HOUR_MS, duration
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan
from launcher.provision.local.provisioner import node_folder
from launcher.provision.provide import provisioner_of
from launcher.provision.provisioner import Provisioner
from launcher.services.on_offer import on_offer
from launcher.services.own_prices import as_you_pay
from launcher.settings import config_path
from launcher.storage.store_lease import LeaseLost, StoreLease
from launcher.storage.stores import carry_over, open_store, run_store

log = logging.getLogger(__name__)

PASS_SECONDS, CLOUD_PASS_SECONDS = 0.25, 0.5
"""Wall time between passes. A pass sees a notice well within the engine's lease."""

CAPACITY_SECONDS = 10.0
"""Longest time between two capacity snapshots for the engine (wall time). Every change is also sent at once."""

SETTLE_SECONDS = 4.0
"""Time for an engine to finish its work after a stop order, and for a finished trainer to exit (wall time)."""

STOP_SECONDS = 6.0
"""Settling, a late pass and the kill itself (wall time). The budget's reserve pays for this time."""

CLOUD_SETTLE_MS = 60_000
"""`SETTLE_SECONDS` for a real cloud, in ms: the trainer first writes its checkpoint to a bucket."""

TIDY_MS = 900_000
"""Time in ms for removing groups, keys and roles of a finished run, before the user is told."""

PRICE_SECONDS = 60.0
"""Time between two reads of the ledger's prices (wall time). Spot prices change by the minute at most."""

SPOT_PRICE_SECONDS = 60.0
"""Time between two queries to AWS for the price of the run's spot nodes (wall time). The queries run beside the
passes."""

GCP_PRICE_SECONDS = 6 * 3600.0
"""Time between two reads of Google's price list (wall time). The list changes once a day at most, spot prices once a
month."""

CARRY_SECONDS = 10.0
"""Time between two tries to copy a checkpoint to another cloud."""

LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause after a failed pass. A locked ledger or a full disk makes passes fail, and the pause doubles up to this
limit. The controller never gives up, because nodes are paid for. Spend deadlines finally end the nodes."""

LOG_TAIL_CHARACTERS = 1500

UNWATCHED_MS = 60_000
"""Gap between passes in ms after which engine news from the gap may not have arrived yet."""

REARM_MS = 60_000
"""Smallest gain in ms for which a node's spend deadline is extended (run's clock)."""


class Controller:
    """Manages one run. All work is in `one_pass`; the rest is waiting."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        run: Run,
        provisioner: Provisioner,
        clock: Clock,
        holder: str | None = None,
        pid: int | None = None,
        carry: Callable[[str, str], object] = lambda source, target: carry_over(open_store(source), open_store(target)),
        over_machines: StoreLease | None = None,
        cloud_time: CloudTime | None = None,
    ) -> None:
        self._sessions, self._run, self._provisioner, self._clock = sessions, run, provisioner, clock
        self._lease: Lease = take_lease(sessions, run, holder or this_process(), pid or os.getpid())
        self._over_machines, self._cloud_time = over_machines, cloud_time
        self._job = Job.model_validate(run.job)
        plan = TypeAdapter(Plan).validate_python(run.plan)
        self._slots = {slot.name: slot for slot in plan.slots}
        self._sites = plan.sites
        is_cloud, recovery = bool(plan.sites), self._job.recovery
        self.wanted = Wanted(
            run=run.name,
            slots=tuple(self._slots.values()),
            limits=budget_guard.Limits(max_total=run.max_total_micro_usd, max_hourly=run.max_hourly_micro_usd),
            deadline_ms=run.deadline_ms,
            allowance_ms=budget_guard.RELEASE_ALLOWANCE_MS if is_cloud else _run_ms(clock, STOP_SECONDS),
            settle_ms=CLOUD_SETTLE_MS if is_cloud else _run_ms(clock, SETTLE_SECONDS),
            rules=move_rules(self._job),
            launch_rate=LaunchRate(per_minute=recovery.launches_per_minute) if is_cloud else None,
            iteration_ms=plan.iteration_ms,
            all_runs=_limits_of_all(self._job) if is_cloud else budget_guard.NO_LIMITS,
        )
        self._progress = ProgressFiles()
        self._told: tuple[NodeCapacity, ...] | None = None
        self._told_at = 0.0
        self._armed: dict[str, int] = {}
        self._trouble: str | None = None
        self._trainer: str | None = None
        self._prices, self._prices_at = PriceNow(), -PRICE_SECONDS
        self._carry, self._carrier = carry, ThreadPoolExecutor(max_workers=1, thread_name_prefix="carry")
        self._carried: dict[str, tuple[float, Future[object]]] = {}
        self._not_carried: str | None = None
        self._ended_runs: dict[int, tuple[int, int]] = {}
        self._plans: dict[int, int] = {}
        """By run: the hourly cost of the run's plan, in micro-dollars."""
        self._limits_at = -PRICE_SECONDS
        self._still_since_ms = self._passed_ms = clock.now_ms()
        self._advance = (0, -1, 0)
        """The id of the last iteration row read, the furthest iteration, and the time of first reaching that
        iteration."""

    @property
    def sites(self) -> tuple[SiteOptions, ...]:
        """Return the candidate sites of the run; empty on the local infra."""
        return self._sites

    def one_pass(self) -> bool:
        """Observe, compare, act. Return True when the run is over and none of its nodes and resources is left.

        Raises LeaseLost when another controller has taken over.
        """
        self._check_lease()
        self._read_limits()
        cloud = {fact.name: fact for fact in self._provisioner.observe()}
        nodes = self._write_news(cloud)
        self._write_prices(cloud, nodes)
        self._write_progress()
        self._watch_standstill(cloud)
        facts = self._facts()
        self._trainer = _trainer_of(facts.nodes)
        actions = decide(facts, self.wanted)
        strangers = [name for name, fact in cloud.items() if _is_stranger(name, fact, facts)]
        if strangers:
            log.warning("nobody asked for %s: released", ", ".join(strangers))
            actions.append(Release(nodes=tuple(strangers)))
        self._rearm(facts)
        for action in actions:
            self._act(action)
        self._tell_capacity(facts, cloud)
        return facts.stage in OVER and not actions and self._is_tidy(facts)

    def _read_limits(self) -> None:
        """Read the limits across all runs from the current configuration, not from the time of the launch."""
        if not self._sites or time.monotonic() - self._limits_at < PRICE_SECONDS:
            return
        self._limits_at = time.monotonic()
        try:
            all_runs = all_runs_of(config_path(), self._job.all_runs)
        except JobError as error:
            log.warning("limits over all runs stay as they are: %s", error)
            return
        limits = budget_guard.Limits(max_total=all_runs.max_total, max_hourly=all_runs.max_hourly)
        if limits != self.wanted.all_runs:
            log.info("limits over all runs are now %s", all_runs)
            self.wanted = replace(self.wanted, all_runs=limits)

    def close(self) -> None:
        self._carrier.shutdown(wait=False, cancel_futures=True)
        give_up(self._sessions, self._lease)

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        """Open a write transaction, if this controller still holds the lease."""
        self._check_lease()
        with writing(self._sessions) as session:
            renew(session, self._lease)
            yield session

    def _check_lease(self) -> None:
        if self._over_machines is not None:
            self._over_machines.check()

    # --- facts ------------------------------------------------------------------------------------

    def _write_news(self, cloud: dict[str, NodeFact]) -> list[NodeRecord]:
        """Record the cloud's news of the run's nodes. Return the updated records."""
        with self._transaction() as session:
            records = node_records(session, self._run)
            notes = list(news(records, cloud, self._clock.now_ms()))
            if not notes:
                return records
            nodes = {node.name: node for node in nodes_of(session, self._run)}
            for note in notes:
                log.info("%s: %s %s", note.node, note.kind, note.evidence)
                _write_note(session, self._run, nodes[note.node], note)
            return node_records(session, self._run)

    def _write_prices(self, cloud: dict[str, NodeFact], nodes: Sequence[NodeRecord]) -> None:
        """Record the real purchases and their current prices."""
        if not self._sites:
            return
        if time.monotonic() - self._prices_at >= PRICE_SECONDS:
            with self._sessions() as session:
                self._prices, self._prices_at = prices_now(session, self._job, self._clock.now_ms()), time.monotonic()
        changed = paid(nodes, cloud, self._prices, self._clock.now_ms())
        if not changed:
            return
        with self._transaction() as session:
            rows = {node.name: node for node in nodes_of(session, self._run)}
            for change in changed:
                log.info("%s: %s", change.node, change)
                session.add(_node_price(rows[change.node], change))

    def _write_progress(self) -> None:
        with self._sessions() as session:
            trainers = [node.name for node in nodes_of(session, self._run) if node.role == "trainer"]
        folders = [node_folder(Path(self._run.folder), name) for name in trainers]
        lines = [line for folder in folders for line in self._progress.read(folder) if line.run == self._run.name]
        if not lines:
            return
        # A node with a fast clock must not make the run older than the controller's clock says.
        now_ms = self._clock.now_ms()
        lines = [replace(line, at_ms=min(line.at_ms, now_ms)) for line in lines]
        try:
            with self._transaction() as session:
                append_progress(session, self._run, lines)
        except BaseException:
            self._progress.forget()
            raise

    def _facts(self) -> Facts:
        with self._sessions() as session:
            return self._facts_in(session)

    def _facts_in(self, session: Session) -> Facts:
        now_ms = self._clock.now_ms()
        statuses = session.scalars(
            select(RunStatus).where(RunStatus.run_id == self._run.id).order_by(RunStatus.id.desc())
        ).all()
        stage, reason = Stage(statuses[0].status), statuses[0].reason
        stage_ms = statuses[0].at_ms
        for status in statuses:
            if status.status != statuses[0].status:
                break
            stage_ms = status.at_ms
        planned_ms = next((row.at_ms for row in statuses if row.status == Stage.PLANNED), self._run.created_ms)
        finished = session.scalar(
            select(ProgressRow)
            .where(
                ProgressRow.run_id == self._run.id,
                ProgressRow.kind == EngineFinished.KIND,
                ProgressRow.at_ms >= planned_ms,
            )
            .order_by(ProgressRow.id.desc())
            .limit(1)
        )
        return Facts(
            now_ms=now_ms,
            stage=stage,
            reason=reason,
            stage_ms=stage_ms,
            planned_ms=planned_ms,
            nodes=node_records(session, self._run),
            metered=spent_micro_usd(session, self._run, now_ms),
            finished=EngineFinished(**finished.event) if finished is not None else None,
            finished_ms=finished.at_ms if finished is not None else 0,
            advanced_ms=self._advanced_ms(session),
            still_since_ms=self._still_since_ms,
            trouble=self._trouble or self._not_carried,
            others=self._others(session, now_ms),
            doubt=self._cloud_time.doubt if self._cloud_time is not None else None,
            sites=tuple(repriced(site, self._prices) for site in self._sites),
        )

    def _advanced_ms(self, session: Session) -> int:
        """Return the time at which the run first reached its furthest iteration. Repeated iterations are no progress.

        Rows are only added, never changed, so each pass reads only the new rows: a run may have many thousands.
        """
        seen_id, best, at_ms = self._advance
        rows = session.scalars(
            select(ProgressRow)
            .where(ProgressRow.run_id == self._run.id, ProgressRow.kind == IterationDone.KIND, ProgressRow.id > seen_id)
            .order_by(ProgressRow.id)
        )
        for row in rows:
            seen_id = row.id
            if row.event["iteration"] > best:
                best, at_ms = row.event["iteration"], row.at_ms
                # by the controller's clock: the trainer's clock may be wrong
                self._still_since_ms = self._clock.now_ms()
        self._advance = (seen_id, best, at_ms)
        return at_ms

    def _watch_standstill(self, cloud: Mapping[str, NodeFact]) -> None:
        """Count a standstill only while the trainer answers, waits for no person, and passes are regular."""
        now_ms, fact = self._clock.now_ms(), cloud.get(self._trainer or "")
        answers = fact is not None and fact.status is NodeStatus.UP
        if not answers or self._trouble or self._not_carried or now_ms - self._passed_ms > UNWATCHED_MS:
            self._still_since_ms = now_ms
        self._passed_ms = now_ms

    def _others(self, session: Session, now_ms: int) -> Others:
        """Return the spending of all other runs on real clouds, if limits bind the sum."""
        if self.wanted.all_runs == budget_guard.NO_LIMITS:
            return Others()
        metered = reserved = per_hour = planned = 0
        for run in session.scalars(select(Run).where(Run.infra != LOCAL, Run.id != self._run.id)):
            status = current_status(session, run)
            known = self._ended_runs.get(run.id)
            if known is not None and status is not None and status.id == known[0]:
                metered += known[1]
                continue
            nodes = node_records(session, run)
            spent = spent_micro_usd(session, run, now_ms)
            if status is not None and status.status in OVER and not any(node.is_live for node in nodes):
                self._ended_runs[run.id] = (status.id, spent)  # an ended run costs no more
            else:
                planned += max(hourly_micro_usd(nodes), self._planned_hourly_of(run))
            metered += spent
            reserved += reserved_micro_usd(nodes, budget_guard.RELEASE_ALLOWANCE_MS, now_ms)
            per_hour += hourly_micro_usd(nodes)
        return Others(metered=metered, reserved=reserved, hourly=per_hour, planned_hourly=planned)

    def _planned_hourly_of(self, run: Run) -> int:
        """Return the hourly cost of another run's plan, with disks and addresses."""
        if run.id not in self._plans:
            slots = TypeAdapter(Plan).validate_python(run.plan).slots
            self._plans[run.id] = sum(
                slot.placement.micro_usd_per_hour + side_micro_usd_per_hour(slot.placement.cloud, slot.placement.market)
                for slot in slots
            )
        return self._plans[run.id]

    # --- actions ----------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        match action:
            case Enter():
                self._enter(action)
            case Buy():
                self._buy(action)
            case Ask():
                self._ask(action.node)
            case Release():
                self._release(action.nodes)
            case TellStop():
                self._post("stop", {"reason": action.reason})
            case _:
                assert_never(action)

    def _enter(self, action: Enter) -> None:
        reason = action.reason
        if action.log_of is not None:
            reason = f"{reason}\n{self._log_tail(action.log_of)}"
        log.info("the run is %s %s", action.stage, reason)
        with self._transaction() as session:
            now = current_status(session, self._run)
            # A user may have requested a stop since the facts were read. The request must not be overwritten.
            asked = now is not None and now.status == Stage.STOPPING and action.stage in (Stage.RUNNING, Stage.DRAINING)
            if not asked:
                append_status(session, self._run, action.stage, reason, self._clock.now_ms())
            if self._sites and action.stage in OVER:
                session.add_all(_not_priced(self._run, self._clock.now_ms()))

    def _buy(self, action: Buy) -> None:
        placement = action.option.placement
        with self._transaction() as session:
            if self._sites:
                # Only one transaction writes at a time, so the facts read here include purchases by other controllers.
                refusal = refused_now(self._facts_in(session), self.wanted, action)
                if refusal is not None:
                    log.info("%s is not bought: %s", action.name, refusal.text)
                    return
            session.add(
                Node(
                    run_id=self._run.id,
                    name=action.name,
                    slot=action.slot.name,
                    generation=action.generation,
                    role=action.slot.role,
                    market=placement.market,
                    cloud=placement.cloud,
                    region=placement.region,
                    zone=placement.zone,
                    instance_type=placement.instance_type,
                    accelerator=placement.accelerator,
                    gpus=placement.gpus,
                    micro_usd_per_hour=placement.micro_usd_per_hour,
                    on_demand_micro_usd_per_hour=action.option.on_demand_micro_usd_per_hour,
                    price_source=placement.price_source,
                    price_observed_at=placement.price_observed_at,
                    requested_ms=self._clock.now_ms(),
                    reserved_micro_usd=action.reserved_micro_usd,
                )
            )
        # The intent is durable. After a crash here the node is not `requested`, and the next pass requests the node.
        self._ask(action.name)

    def _ask(self, name: str) -> None:
        with self._sessions() as session:
            node = session.scalars(select(Node).where(Node.name == name)).one()
            facts = self._facts_in(session)
        if not self._checkpoint_is_there(node):
            return  # the next pass tries again
        asked_ms = self._clock.now_ms()
        self._check_lease()
        self._provisioner.request(option_of(node).placement, self._spec(node, facts))
        with self._transaction() as session:
            self._event(session, node, "requested", asked_ms)

    def _checkpoint_is_there(self, node: Node) -> bool:
        """Return whether the run's checkpoint is in the bucket of the trainer's cloud.

        Start a copy after a change of cloud.
        """
        if not self._sites or node.role != "trainer":
            return True
        with self._sessions() as session:
            before = _last_trainer_cloud(session, self._run, node)
        if before is None or before == node.cloud:
            return True
        tried = self._carried.get(node.name)
        if tried is not None and tried[1].done():
            error = tried[1].exception()
            if error is None:
                self._not_carried = None
                return True
            if time.monotonic() - tried[0] < CARRY_SECONDS:
                return False
            self._not_carried = f"the checkpoint cannot be carried from {before} to {node.cloud}: {error}"
            log.warning("%s", self._not_carried)
        if tried is None or tried[1].done():
            urls = [run_store(self._job.store, cloud, self._run.name) for cloud in (before, node.cloud)]
            self._carried[node.name] = (time.monotonic(), self._carrier.submit(self._carry, *urls))
        return False

    def _release(self, names: Sequence[str]) -> None:
        with self._transaction() as session:
            records = {record.name: record for record in node_records(session, self._run)}
            for node in nodes_of(session, self._run):
                if node.name in names and "releasing" not in records[node.name].happened:
                    self._event(session, node, "releasing", self._clock.now_ms())
        self._check_lease()
        self._provisioner.release(names)

    def _event(self, session: Session, node: Node, kind: str, at_ms: int) -> None:
        session.add(NodeEvent(node_id=node.id, at_ms=at_ms, kind=kind, evidence=""))

    def _spec(self, node: Node, facts: Facts) -> NodeSpec:
        """Return the NodeSpec of a node.

        On a real cloud the provisioner adds the folder, the addresses and the digest.
        """
        run, folder = self._run, Path(self._run.folder)
        store = run_store(self._job.store, node.cloud, run.name) if self._sites else (folder / "store").as_uri()
        return NodeSpec(
            run=run.name,
            node=node.name,
            role="trainer" if node.role == "trainer" else "rollout",
            market=Market(node.market),
            workers=max(1, node.gpus),
            folder=str(node_folder(folder, node.name)),
            store=store,
            coordinator_port=run.coordinator_port,
            token=run.token if node.role == "trainer" else role_token(run.token, "rollout"),
            clock=ClockConfig(origin_ms=run.clock_origin_ms, factor=1.0 if self._sites else run.clock_factor),
            engine=self._job.engine(),
            workdir=run.workdir,
            cloud=_cloud(node.cloud) if self._sites else "local",
            money_deadline_ms=self._ends_itself_ms(facts, self._clock.now_ms()),
            money_longest_ms=self._longest_ms(node, facts) if self._sites else None,
        )

    def _longest_ms(self, node: Node, facts: Facts) -> int | None:
        """Return the longest life of this node in ms: the time for which the money would pay for the node alone.

        None: no limit.
        """
        rate = node.micro_usd_per_hour + side_micro_usd_per_hour(node.cloud, Market(node.market))
        limits = (
            (facts.metered, self.wanted.limits.max_total),
            (facts.metered + facts.others.metered, self.wanted.all_runs.max_total),
        )
        lasts_ms = [
            budget_guard.money_deadline_ms(now_ms=0, metered=metered, max_total=max_total, planned_hourly=rate)
            for metered, max_total in limits
        ]
        return min((one + self.wanted.allowance_ms for one in lasts_ms if one is not None), default=None)

    def _rearm(self, facts: Facts) -> None:
        """Extend the nodes' spend deadlines by money left unspent while a node was missing.

        No deadline is extended while the clock is in doubt: spending may be missing from the metered sum.
        """
        if facts.doubt is not None:
            return
        deadline_ms = self._ends_itself_ms(facts, facts.now_ms)
        if deadline_ms is None or facts.stage in OVER:
            return
        for node in facts.nodes:
            armed = self._armed.get(node.name)
            if node.is_live and (armed is None or deadline_ms < armed - 1000 or deadline_ms > armed + REARM_MS):
                self._provisioner.rearm(node.name, deadline_ms)
                self._armed[node.name] = deadline_ms

    def _ends_itself_ms(self, facts: Facts, now_ms: int) -> int | None:
        """Return the time at which an unmanaged node terminates itself.

        The time is the earliest spend deadline, or on clouds the run's own deadline if earlier.
        """
        planned = planned_hourly(facts, self.wanted)
        deadlines = [
            budget_guard.money_deadline_ms(
                now_ms=now_ms,
                metered=facts.metered,
                max_total=self.wanted.limits.max_total,
                planned_hourly=planned,
            ),
            # The other runs may also be without a controller, and all runs share the remaining money.
            budget_guard.money_deadline_ms(
                now_ms=now_ms,
                metered=facts.metered + facts.others.metered,
                max_total=self.wanted.all_runs.max_total,
                planned_hourly=planned + facts.others.planned_hourly,
            ),
        ]
        if self._sites and self.wanted.deadline_ms is not None:
            # leave the controller time to stop first
            deadlines.append(self.wanted.deadline_ms + self.wanted.allowance_ms)
        return min((deadline_ms for deadline_ms in deadlines if deadline_ms is not None), default=None)

    def _is_tidy(self, facts: Facts) -> bool:
        """Return True once the resources made for the nodes are removed.

        After `TIDY_MS` the user is told about the leftovers, and the result is also True.
        """
        if self._provisioner.tidy():
            return True
        if facts.now_ms - facts.stage_ms < TIDY_MS:
            return False
        text = f"groups, keys or roles of it are still there after {duration(TIDY_MS)}; `spotrl reap` lists them"
        if text not in facts.reason:
            reason = "; ".join(filter(None, (facts.reason, text)))
            with self._transaction() as session:
                append_status(session, self._run, facts.stage, reason, facts.now_ms)
        return True

    # --- the engine -------------------------------------------------------------------------------

    def _tell_capacity(self, facts: Facts, cloud: dict[str, NodeFact]) -> None:
        """Send a capacity snapshot on every change and every 10 s.

        The run's clock numbers the snapshots, so numbers still grow after a restart.
        """
        if facts.stage in OVER:
            return
        known = (self._capacity_of(node, cloud.get(node.name)) for node in _newest(facts.nodes))
        nodes = tuple(node for node in known if node is not None)
        due = time.monotonic() - self._told_at >= CAPACITY_SECONDS
        if nodes and (due or nodes != self._told):
            capacity = Capacity(generation=self._clock.now_ms(), nodes=nodes)
            answer = self._post("capacity", capacity.to_json())
            if answer is not None:
                self._told, self._told_at = capacity.nodes, time.monotonic()
                self._trouble = answer.get("trouble")

    def _capacity_of(self, node: NodeRecord, fact: NodeFact | None) -> NodeCapacity | None:
        if not node.is_live:
            state = NodeState.LOST
        elif node.is_leaving:
            state = NodeState.DRAINING
        elif fact is not None and fact.status is NodeStatus.UP:
            state = NodeState.READY
        else:
            return None
        return NodeCapacity(
            node=node.name,
            market=node.market,
            state=state,
            workers=max(1, (node.wanted or self._slots[node.slot].option).placement.gpus),
            deadline_ms=fact.notice_deadline_ms if fact is not None and state is NodeState.DRAINING else None,
        )

    def _post(self, path: str, body: str | dict[str, str]) -> dict[str, Any] | None:
        """Post a message to the coordinator and return the reply.

        None: the coordinator is not reachable. Passes do not wait.
        """
        door = self._provisioner.door(self._trainer, self._run.coordinator_port) if self._trainer is not None else None
        if door is None:
            return None
        try:
            answer = httpx.post(
                f"http://{door[0]}:{door[1]}/{path}",
                headers={
                    "Authorization": f"Bearer {role_token(self._run.token, 'controller')}",
                    "Content-Type": "application/json",
                },
                content=body if isinstance(body, str) else None,
                json=body if not isinstance(body, str) else None,
                timeout=0.5,
                trust_env=False,
            )
            return dict(answer.json() if answer.content else {}) if answer.is_success else None
        except (httpx.HTTPError, ValueError):
            return None

    def _log_tail(self, name: str) -> str:
        logs = sorted((node_folder(Path(self._run.folder), name) / "logs").glob("*.log"))
        texts = [path.read_text(errors="replace").strip() for path in logs]
        return "\n".join(filter(None, texts))[-LOG_TAIL_CHARACTERS:]


def run_controller(
    sessions: sessionmaker[Session],
    run_name: str,
    *,
    provisioner: Provisioner | None = None,
    clock: Clock | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Manage a run until the run is over and nothing of the run is left.

    Raises LeaseHeld if another controller is active.
    """
    with sessions() as session:
        run = find_run(session, run_name)
    job = Job.model_validate(run.job)
    cloud_time = CloudTime({cloud: build_limits(cloud) for cloud in job.clouds}) if job.clouds else None
    clock = clock or _clock_of(sessions, run, cloud_time)
    over_machines = _store_lease(run, job)
    if over_machines is not None:
        over_machines.take()
    if provisioner is None:
        check_lease = over_machines.check if over_machines is not None else lambda: None
        provisioner = provisioner_of(run, job, clock, check_lease)
    controller = Controller(sessions, run, provisioner, clock, over_machines=over_machines, cloud_time=cloud_time)
    if over_machines is not None:
        over_machines.keep()
    log.info(
        "controller of %s, process %s: %s", run.name, os.getpid(), describe_brakes(controller.wanted, controller.sites)
    )
    ended = threading.Event()
    if cloud_time is not None:
        cloud_time.ask(clock)
        cloud_time.keep(clock, ended)
    if controller.sites:
        threading.Thread(target=_watch_prices, args=(sessions, run, job, ended), name="prices", daemon=True).start()
    trouble, pass_seconds = 0, CLOUD_PASS_SECONDS if controller.sites else PASS_SECONDS
    while True:
        started = time.monotonic()
        try:
            if controller.one_pass():
                break
            trouble = 0
        except LeaseLost as error:
            log.warning("%s", error)
            provisioner.close()
            ended.set()
            return
        except (SQLAlchemyError, OSError, Failure):
            trouble += 1
            log.exception("this pass failed (%s in a row); trying again", trouble)
        pause = min(LONGEST_PAUSE_SECONDS, pass_seconds * 2 ** min(trouble, 10))
        sleep(max(0.0, pause - (time.monotonic() - started)))
    ended.set()
    if over_machines is not None:
        over_machines.give_up()
    controller.close()  # last: from now on no other process waits for this controller
    log.info("%s is over; nothing of it is left running", run.name)


def _clock_of(sessions: sessionmaker[Session], run: Run, cloud_time: CloudTime | None) -> Clock:
    """Return the clock by which the controller meters.

    Nodes on the local infra share this machine's clock, including its jumps. On clouds the controller uses the clouds'
    time, and never a time before the newest time in the ledger: a slow clock would forget spending.
    """
    if cloud_time is None:
        return ScaledClock(origin_ms=run.clock_origin_ms, factor=run.clock_factor)
    cloud_time.ask()
    with sessions() as session:
        now_ms = max(cloud_time.now_ms(), newest_ms(session, run))
    return SteadyClock(origin_ms=run.clock_origin_ms, factor=run.clock_factor, began_ms=now_ms - boot_ms())


def _store_lease(run: Run, job: Job) -> StoreLease | None:
    """Return the lease visible to controllers on other machines, in the bucket of the first cloud in the job.

    None: no bucket.
    """
    if not job.clouds or job.clouds[0] not in job.store:
        return None
    url = run_store(job.store, job.clouds[0], run.name)
    return StoreLease(partial(open_store, url), run.name, run.token)


def _watch_prices(sessions: sessionmaker[Session], run: Run, job: Job, ended: threading.Event) -> None:
    """Refresh the ledger's prices of the run's nodes until the run ends.

    AWS changes a spot price while the node runs, and bills the new price. Google's prices hold for a day at least.
    After a failed refresh (the ledger is locked, a source does not answer) the next refresh follows as usual.
    """
    gcp_at = time.monotonic()
    while not ended.wait(SPOT_PRICE_SECONDS):
        is_due = time.monotonic() - gcp_at >= GCP_PRICE_SECONDS
        gcp_at = time.monotonic() if is_due else gcp_at
        try:
            _refresh_prices(sessions, run, job, with_gcp=is_due)
        except Exception as error:  # any error is survived, because old prices would meter the run wrongly from now on
            log.warning("prices could not be refreshed; tried again: %s", error)


def _refresh_prices(sessions: sessionmaker[Session], run: Run, job: Job, *, with_gcp: bool) -> None:
    """Fetch the AWS prices of the run's live spot nodes and, if `with_gcp`, Google's prices of the run's GPUs."""
    with sessions() as session:
        nodes = [node.wanted.placement for node in node_records(session, run) if node.is_live and node.wanted]
    spot = [node for node in nodes if node.cloud == "aws" and node.market is Market.SPOT]
    of_gcp = [node for node in nodes if node.cloud == "gcp"] if with_gcp else []
    if not spot and not of_gcp:
        return
    from launcher.market.machines import machines
    from launcher.market.sources.aws import AwsSpot
    from launcher.market.sources.gcp import GcpCatalog
    from launcher.services.refresh import refresh  # the import loads the clouds' own libraries

    now_ms = time.time_ns() // 1_000_000
    sources: list[PriceSource] = []
    if spot:
        types, regions = sorted({one.instance_type for one in spot}), sorted({one.region for one in spot})
        sources.append(AwsSpot(types, since_ms=now_ms - HOUR_MS, regions=regions))
    if of_gcp:
        wanted = machines(("gcp",), {one.accelerator for one in of_gcp if one.accelerator})
        sources.append(GcpCatalog(wanted, environ=os.environ, regions=sorted({one.region for one in of_gcp})))
    for answer in refresh(sources, sessions, now_ms).answers:
        for failure in answer.failures:
            log.info("no new prices from %s: %s", answer.source, failure)


# --- reading the ledger ----------------------------------------------------------------------------------


def metered_micro_usd(session: Session, run: Run, now_ms: int) -> int:
    """Return the cost of the run's nodes until now, in micro-dollars."""
    return sum(charge.micro_usd for charges in charges_of_run(session, run, now_ms).values() for charge in charges)


def node_records(session: Session, run: Run) -> list[NodeRecord]:
    happened: defaultdict[int, dict[str, int]] = defaultdict(dict)
    evidence: dict[int, str] = {}
    of_run = select(Node.id).where(Node.run_id == run.id)
    for event in session.scalars(select(NodeEvent).where(NodeEvent.node_id.in_(of_run)).order_by(NodeEvent.id)):
        happened[event.node_id].setdefault(event.kind, event.at_ms)
        if event.kind in ENDS:
            evidence[event.node_id] = event.evidence
    taken = set(session.scalars(select(Preemption.node_id).where(Preemption.node_id.in_(of_run))))
    prices, is_cloud = prices_of_run(session, run), run.infra != LOCAL
    now = {node_id: changes[-1] for node_id, changes in prices.items()}
    return [
        NodeRecord(
            name=node.name,
            slot=node.slot,
            generation=node.generation,
            role=node.role,
            market=Market(node.market),
            micro_usd_per_hour=now.get(node.id, node).micro_usd_per_hour,
            requested_ms=node.requested_ms,
            reserved_micro_usd=node.reserved_micro_usd,
            happened=happened[node.id],
            evidence=evidence.get(node.id, ""),
            reclaimed=node.id in taken,
            wanted=option_of(node) if is_cloud else None,
            zone=now.get(node.id, node).zone,
            instance_type=now.get(node.id, node).instance_type,
        )
        for node in nodes_of(session, run)
    ]


def option_of(node: Node) -> Option:
    """Return the requested offer of a node, from the ledger."""
    return Option(
        placement=Placement(
            cloud=node.cloud,
            region=node.region,
            zone=node.zone,
            instance_type=node.instance_type,
            gpus=node.gpus,
            accelerator=node.accelerator,
            market=Market(node.market),
            micro_usd_per_hour=node.micro_usd_per_hour,
            price_source=node.price_source,
            price_observed_at=node.price_observed_at,
        ),
        on_demand_micro_usd_per_hour=node.on_demand_micro_usd_per_hour,
    )


def prices_now(session: Session, job: Job, now_ms: int) -> PriceNow:
    """Return the clouds' latest prices, adjusted to the user's overrides and discounts."""
    said = on_offer((), latest_prices(session, clouds=job.clouds), now_ms)
    return PriceNow(
        {
            (
                offer.cloud,
                offer.region,
                "" if offer.zone == offer.region else offer.zone,
                offer.instance_type,
                offer.market,
            ): Price(micro_usd_per_hour=offer.micro_usd_per_hour, source=offer.source, observed_at=offer.observed_at)
            for offer in as_you_pay(said, job.price_overrides, job.discounts, now_ms)
            if offer.quality in USABLE
        }
    )


def move_rules(job: Job) -> MoveRules:
    """Return a job's failover rules: the wait for a trainer, and whether on-demand may replace missing spot."""
    return MoveRules(trainer_wait_ms=job.recovery.trainer_wait, on_demand=job.spot == "auto")


def _limits_of_all(job: Job) -> budget_guard.Limits:
    return budget_guard.Limits(max_total=job.all_runs.max_total, max_hourly=job.all_runs.max_hourly)


def _cloud(name: str) -> Literal["aws", "gcp"]:
    return "aws" if name == "aws" else "gcp"


def _trainer_of(nodes: Sequence[NodeRecord]) -> str | None:
    """Return the newest live trainer, whose coordinator receives the messages. None: no trainer lives."""
    live = [node for node in nodes if node.role == "trainer" and node.is_live]
    return max(live, key=lambda node: node.generation).name if live else None


def _last_trainer_cloud(session: Session, run: Run, node: Node) -> str | None:
    """Return the cloud of the last trainer that came up before this node. None: no earlier trainer came up."""
    earlier = [other for other in nodes_of(session, run) if other.role == "trainer" and other.id < node.id]
    came = set(session.scalars(select(NodeEvent.node_id).where(NodeEvent.kind == "up")))
    return next((other.cloud for other in reversed(earlier) if other.id in came), None)


def _write_note(session: Session, run: Run, node: Node, note: Note) -> None:
    """Record an event. If the event is the node's end, add the bill and the preemption in the same transaction."""
    session.add(NodeEvent(node_id=node.id, at_ms=note.at_ms, kind=note.kind, evidence=_evidence(note)))
    if note.kind not in ENDS:
        return
    session.flush()
    seen = {
        event.kind: event.at_ms
        for event in session.scalars(
            select(NodeEvent).where(NodeEvent.node_id == node.id).order_by(NodeEvent.id.desc())
        )
    }
    reclaimed = note.fact is not None and note.fact.reclaimed
    if "up" in seen:
        start_ms, end_ms = seen["up"], max(seen["up"], note.at_ms)
        prices = session.scalars(select(NodePrice).where(NodePrice.node_id == node.id))
        taken = note.evidence if reclaimed and "releasing" not in seen else None
        session.add_all(bill(node, start_ms, end_ms, prices, minimum_billed_ms(run), run.money_basis, taken))
        session.add_all(side_costs(run, node, start_ms, end_ms))
    if note.fact is not None and reclaimed:
        session.add(
            Preemption(
                node_id=node.id,
                at_ms=note.at_ms,
                noticed_ms=seen.get("notice"),
                signal=note.fact.signal,
                evidence=note.evidence,
            )
        )


def _evidence(note: Note) -> str:
    """Return the cloud's text, with the zones that refused."""
    tried = note.fact.tried if note.fact is not None else ()
    return "; ".join(filter(None, (note.evidence, f"tried {', '.join(tried)}" if tried else "")))


def _node_price(node: Node, change: Paid) -> NodePrice:
    return NodePrice(
        node_id=node.id,
        at_ms=change.at_ms,
        zone=change.zone,
        instance_type=change.instance_type,
        micro_usd_per_hour=change.price.micro_usd_per_hour,
        price_source=change.price.source,
        price_observed_at=change.price.observed_at,
    )


def _not_priced(run: Run, now_ms: int) -> list[SideCost]:
    """Return the costs that are billed but have no price in the ledger."""
    return [
        SideCost(
            run_id=run.id,
            kind=kind,
            amount=what,
            start_ms=run.created_ms,
            end_ms=now_ms,
            micro_usd=None,
            source="not priced: no cloud says the amount before its bill",
        )
        for kind, what in NOT_PRICED
    ]


def _is_stranger(name: str, fact: NodeFact, facts: Facts) -> bool:
    return fact.status is not NodeStatus.GONE and all(node.name != name for node in facts.nodes)


def _newest(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Return live nodes and the last two generations of each slot. The engine does not need older losses."""
    newest: defaultdict[str, int] = defaultdict(int)
    for node in nodes:
        newest[node.slot] = max(newest[node.slot], node.generation)
    return [node for node in nodes if node.is_live or node.generation >= newest[node.slot] - 1]


def _run_ms(clock: Clock, wall_seconds: float) -> int:
    """Convert wall time to milliseconds of the run's clock."""
    return round(wall_seconds / clock.wall_seconds(1_000_000) * 1_000_000)
