"""The controller: one process per run that buys what is missing, writes down what happens, and stops in time.

a pass: observe the nodes -> write down what is new -> read the engine's progress -> decide -> act -> tell the engine

It keeps no state. Every pass starts from what exists (provisioner, ledger, progress files), and an intent is in the
ledger before the request is made; so `kill -9` between any two lines is repaired by the next pass, of this process
or of the next one. A lease makes sure that there is only one; every transaction of it checks the lease first.
"""

import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, assert_never

import httpx
from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock
from engine.config import ClockConfig, NodeSpec
from engine.events import Capacity, EngineFinished, IterationDone, Market, NodeCapacity, NodeState
from launcher.cluster import brakes
from launcher.cluster.lease import Lease, LeaseLost, give_up, renew, take_lease, this_process
from launcher.cluster.local import LocalProvisioner, node_folder
from launcher.cluster.progress import ProgressFiles
from launcher.cluster.provisioner import NodeFact, NodeStatus, Provisioner
from launcher.cluster.reclaims import reclaim_rule
from launcher.cluster.reconcile import (
    ENDS,
    OVER,
    Action,
    Ask,
    Buy,
    Enter,
    Facts,
    NodeRecord,
    Note,
    Release,
    Stage,
    TellStop,
    Wanted,
    decide,
    describe_brakes,
    news,
    planned_hourly,
)
from launcher.job import Job
from launcher.ledger.accounting import charges_of, interval_micro_usd
from launcher.ledger.models import BillingInterval, Node, NodeEvent, Preemption, ProgressRow, Run, RunStatus
from launcher.ledger.store import append_progress, append_status, current_status, find_run, nodes_of, writing
from launcher.placement.plan import Plan, Slot

log = logging.getLogger(__name__)

PASS_SECONDS = 0.25
"""Wall time between passes: a notice is seen well within the engine's lease."""

CAPACITY_SECONDS = 10.0
"""The engine is told what there is on every change, and this often in any case (wall time)."""

SETTLE_SECONDS = 4.0
"""How long an engine that was told to stop may finish what it does, and a finished trainer may exit (wall time)."""

STOP_SECONDS = 6.0
"""Settling, a pass that comes late and the kill itself (wall time): what the budget's reserve pays for."""

TROUBLE_PASSES = 40
"""Passes in a row that a locked ledger or a full disk may spoil before the controller gives up: about 10 s."""

LOG_TAIL_CHARACTERS = 1500

REARM_MS = 60_000
"""A node's money deadline is written anew when it may live at least this much longer (run's clock)."""


class Controller:
    """Looks after one run. `one_pass` is all it does; the rest is waiting."""

    def __init__(
        self,
        sessions: sessionmaker[Session],
        run: Run,
        provisioner: Provisioner,
        clock: Clock,
        holder: str | None = None,
        pid: int | None = None,
    ) -> None:
        self._sessions, self._run, self._provisioner, self._clock = sessions, run, provisioner, clock
        self._lease: Lease = take_lease(sessions, run, holder or this_process(), pid or os.getpid())
        self._job = Job.model_validate(run.job)
        self._slots = {slot.name: slot for slot in TypeAdapter(Plan).validate_python(run.plan).slots}
        self.wanted = Wanted(
            run=run.name,
            slots=tuple(self._slots.values()),
            limits=brakes.Limits(max_total=run.max_total_micro_usd, max_hourly=run.max_hourly_micro_usd),
            deadline_ms=run.deadline_ms,
            allowance_ms=_run_ms(clock, STOP_SECONDS),
            settle_ms=_run_ms(clock, SETTLE_SECONDS),
        )
        self._progress = ProgressFiles()
        self._told: tuple[NodeCapacity, ...] | None = None
        self._told_at = 0.0
        self._armed: dict[str, int] = {}
        self._trouble: str | None = None

    def one_pass(self) -> bool:
        """Observe, compare, act. True when the run is over and nothing of it is left."""
        cloud = {fact.name: fact for fact in self._provisioner.observe()}
        self._write_news(cloud)
        self._write_progress()
        facts = self._facts()
        actions = decide(facts, self.wanted)
        strangers = [name for name, fact in cloud.items() if _is_stranger(name, fact, facts)]
        if strangers:
            log.warning("nobody asked for %s: released", ", ".join(strangers))
            actions.append(Release(nodes=tuple(strangers)))
        self._rearm(facts)
        for action in actions:
            self._act(action)
        self._tell_capacity(facts, cloud)
        return facts.stage in OVER and not actions

    def close(self) -> None:
        give_up(self._sessions, self._lease)

    @contextmanager
    def _transaction(self) -> Iterator[Session]:
        """Write, as long as this controller is the one."""
        with writing(self._sessions) as session:
            renew(session, self._lease)
            yield session

    # --- facts ------------------------------------------------------------------------------------

    def _write_news(self, cloud: dict[str, NodeFact]) -> None:
        with self._transaction() as session:
            nodes = {node.name: node for node in nodes_of(session, self._run)}
            for note in news(node_records(session, self._run), cloud, self._clock.now_ms()):
                log.info("%s: %s %s", note.node, note.kind, note.evidence)
                _write_note(session, nodes[note.node], note, self._run.money_basis)

    def _write_progress(self) -> None:
        with self._sessions() as session:
            trainers = [node.name for node in nodes_of(session, self._run) if node.role == "trainer"]
        folders = [node_folder(Path(self._run.folder), name) for name in trainers]
        lines = [line for folder in folders for line in self._progress.read(folder) if line.run == self._run.name]
        if not lines:
            return
        try:
            with self._transaction() as session:
                append_progress(session, self._run, lines)
        except BaseException:
            self._progress.forget()
            raise

    def _facts(self) -> Facts:
        now_ms = self._clock.now_ms()
        with self._sessions() as session:
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
                metered=metered_micro_usd(session, self._run, now_ms),
                finished=EngineFinished(**finished.event) if finished is not None else None,
                finished_ms=finished.at_ms if finished is not None else 0,
                advanced_ms=_advanced_ms(session, self._run),
                trouble=self._trouble,
            )

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
            # A person may have asked for the end since we looked; that must not be written over.
            asked = now is not None and now.status == Stage.STOPPING and action.stage in (Stage.RUNNING, Stage.DRAINING)
            if not asked:
                append_status(session, self._run, action.stage, reason, self._clock.now_ms())

    def _buy(self, action: Buy) -> None:
        placement = action.slot.placement
        with self._transaction() as session:
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
                    on_demand_micro_usd_per_hour=action.slot.on_demand_micro_usd_per_hour,
                    price_source=placement.price_source,
                    price_observed_at=placement.price_observed_at,
                    requested_ms=self._clock.now_ms(),
                    reserved_micro_usd=action.reserved_micro_usd,
                )
            )
        # The intent is durable. A crash here leaves a node that is not `requested`: the next pass asks for it.
        self._ask(action.name)

    def _ask(self, name: str) -> None:
        with self._sessions() as session:
            node = session.scalars(select(Node).where(Node.name == name)).one()
            metered = metered_micro_usd(session, self._run, self._clock.now_ms())
        slot, asked_ms = self._slots[node.slot], self._clock.now_ms()
        self._provisioner.request(slot.placement, self._spec(node, slot, metered))
        with self._transaction() as session:
            self._event(session, node, "requested", asked_ms)

    def _release(self, names: Sequence[str]) -> None:
        with self._transaction() as session:
            records = {record.name: record for record in node_records(session, self._run)}
            for node in nodes_of(session, self._run):
                if node.name in names and "releasing" not in records[node.name].happened:
                    self._event(session, node, "releasing", self._clock.now_ms())
        self._provisioner.release(names)

    def _event(self, session: Session, node: Node, kind: str, at_ms: int) -> None:
        session.add(NodeEvent(node_id=node.id, at_ms=at_ms, kind=kind, evidence=""))

    def _spec(self, node: Node, slot: Slot, metered: int) -> NodeSpec:
        run, folder = self._run, Path(self._run.folder)
        plan_hourly = sum(slot.placement.micro_usd_per_hour for slot in self.wanted.slots)
        return NodeSpec(
            run=run.name,
            node=node.name,
            role="trainer" if node.role == "trainer" else "rollout",
            market=Market(node.market),
            workers=max(1, slot.placement.gpus),
            folder=str(node_folder(folder, node.name)),
            store=(folder / "store").as_uri(),
            coordinator_port=run.coordinator_port,
            token=run.token,
            clock=ClockConfig(origin_ms=run.clock_origin_ms, factor=run.clock_factor),
            engine=self._job.engine(),
            workdir=run.workdir,
            money_deadline_ms=brakes.money_deadline_ms(
                now_ms=self._clock.now_ms(),
                metered=metered,
                max_total=run.max_total_micro_usd,
                planned_hourly=plan_hourly,
            ),
        )

    def _rearm(self, facts: Facts) -> None:
        """Money that was not spent, because a node was missing for a while, lets the others live longer."""
        deadline_ms = brakes.money_deadline_ms(
            now_ms=facts.now_ms,
            metered=facts.metered,
            max_total=self.wanted.limits.max_total,
            planned_hourly=planned_hourly(facts, self.wanted),
        )
        if deadline_ms is None or facts.stage in OVER:
            return
        for node in facts.nodes:
            armed = self._armed.get(node.name)
            if node.is_live and (armed is None or deadline_ms < armed - 1000 or deadline_ms > armed + REARM_MS):
                self._provisioner.rearm(node.name, deadline_ms)
                self._armed[node.name] = deadline_ms

    # --- the engine -------------------------------------------------------------------------------

    def _tell_capacity(self, facts: Facts, cloud: dict[str, NodeFact]) -> None:
        """A snapshot on every change and every 10 s. The run's clock numbers it, so a restart goes on counting."""
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
            workers=max(1, self._slots[node.slot].placement.gpus),
            deadline_ms=fact.notice_deadline_ms if fact is not None and state is NodeState.DRAINING else None,
        )

    def _post(self, path: str, body: str | dict[str, str]) -> dict[str, Any] | None:
        """Tell the coordinator, and hear its answer. None: it is gone, or not there yet; facts do not wait for it."""
        try:
            answer = httpx.post(
                f"http://127.0.0.1:{self._run.coordinator_port}/{path}",
                headers={"Authorization": f"Bearer {self._run.token}", "Content-Type": "application/json"},
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
    """Look after a run until it is over and nothing of it is left. LeaseHeld when somebody else does."""
    with sessions() as session:
        run = find_run(session, run_name)
    clock = clock or ClockConfig(origin_ms=run.clock_origin_ms, factor=run.clock_factor).clock()
    if provisioner is None:
        provisioner = LocalProvisioner(Path(run.folder), clock, reclaim_rule(Job.model_validate(run.job).reclaims))
    controller = Controller(sessions, run, provisioner, clock)
    log.info("controller of %s, process %s: %s", run.name, os.getpid(), describe_brakes(controller.wanted))
    trouble = 0
    while True:
        started = time.monotonic()
        try:
            if controller.one_pass():
                break
            trouble = 0
        except (OperationalError, OSError) as error:
            trouble += 1
            log.exception("this pass failed (%s in a row)", trouble)
            if trouble >= TROUBLE_PASSES:
                raise error
        except LeaseLost as error:
            log.warning("%s", error)
            return
        sleep(max(0.0, PASS_SECONDS - (time.monotonic() - started)))
    controller.close()
    log.info("%s is over; nothing of it is left running", run.name)


# --- the ledger, as the controller reads it -------------------------------------------------------------


def metered_micro_usd(session: Session, run: Run, now_ms: int) -> int:
    """What the run's nodes have cost until now."""
    intervals: defaultdict[int, list[BillingInterval]] = defaultdict(list)
    of_run = select(Node.id).where(Node.run_id == run.id)
    for interval in session.scalars(select(BillingInterval).where(BillingInterval.node_id.in_(of_run))):
        intervals[interval.node_id].append(interval)
    events: defaultdict[int, list[NodeEvent]] = defaultdict(list)
    for event in session.scalars(select(NodeEvent).where(NodeEvent.node_id.in_(of_run))):
        events[event.node_id].append(event)
    return sum(
        charge.micro_usd
        for node in nodes_of(session, run)
        for charge in charges_of(node, intervals[node.id], events[node.id], now_ms)
    )


def node_records(session: Session, run: Run) -> list[NodeRecord]:
    happened: defaultdict[int, dict[str, int]] = defaultdict(dict)
    evidence: dict[int, str] = {}
    of_run = select(Node.id).where(Node.run_id == run.id)
    for event in session.scalars(select(NodeEvent).where(NodeEvent.node_id.in_(of_run)).order_by(NodeEvent.id)):
        happened[event.node_id].setdefault(event.kind, event.at_ms)
        if event.kind in ENDS:
            evidence[event.node_id] = event.evidence
    taken = set(session.scalars(select(Preemption.node_id).where(Preemption.node_id.in_(of_run))))
    return [
        NodeRecord(
            name=node.name,
            slot=node.slot,
            generation=node.generation,
            role=node.role,
            market=Market(node.market),
            micro_usd_per_hour=node.micro_usd_per_hour,
            requested_ms=node.requested_ms,
            reserved_micro_usd=node.reserved_micro_usd,
            happened=happened[node.id],
            evidence=evidence.get(node.id, ""),
            reclaimed=node.id in taken,
        )
        for node in nodes_of(session, run)
    ]


def _write_note(session: Session, node: Node, note: Note, basis: str) -> None:
    """An event; and when it is the node's end, the bill and the preemption, in the same transaction."""
    session.add(NodeEvent(node_id=node.id, at_ms=note.at_ms, kind=note.kind, evidence=note.evidence))
    if note.kind not in ENDS:
        return
    session.flush()
    seen = {
        event.kind: event.at_ms
        for event in session.scalars(
            select(NodeEvent).where(NodeEvent.node_id == node.id).order_by(NodeEvent.id.desc())
        )
    }
    if "up" in seen:
        end_ms = max(seen["up"], note.at_ms)
        session.add(
            BillingInterval(
                node_id=node.id,
                start_ms=seen["up"],
                end_ms=end_ms,
                micro_usd_per_hour=node.micro_usd_per_hour,
                micro_usd=interval_micro_usd(seen["up"], end_ms, node.micro_usd_per_hour),
                basis=basis,
            )
        )
    if note.fact is not None and note.fact.reclaimed:
        session.add(
            Preemption(
                node_id=node.id,
                at_ms=note.at_ms,
                noticed_ms=seen.get("notice"),
                signal=note.fact.signal,
                evidence=note.evidence,
            )
        )


def _advanced_ms(session: Session, run: Run) -> int:
    """When the run first reached the iteration that it has reached: redone ones do not count as progress."""
    best, at_ms = -1, 0
    rows = session.scalars(
        select(ProgressRow)
        .where(ProgressRow.run_id == run.id, ProgressRow.kind == IterationDone.KIND)
        .order_by(ProgressRow.id)
    )
    for row in rows:
        if row.event["iteration"] > best:
            best, at_ms = row.event["iteration"], row.at_ms
    return at_ms


def _is_stranger(name: str, fact: NodeFact, facts: Facts) -> bool:
    return fact.status is not NodeStatus.GONE and all(node.name != name for node in facts.nodes)


def _newest(nodes: Sequence[NodeRecord]) -> list[NodeRecord]:
    """Live nodes, and the last two generations of each slot: the engine need not hear of older losses for ever."""
    newest: defaultdict[str, int] = defaultdict(int)
    for node in nodes:
        newest[node.slot] = max(newest[node.slot], node.generation)
    return [node for node in nodes if node.is_live or node.generation >= newest[node.slot] - 1]


def _run_ms(clock: Clock, wall_seconds: float) -> int:
    """So much wall time, in milliseconds of the run's clock."""
    return round(wall_seconds / clock.wall_seconds(1_000_000) * 1_000_000)
