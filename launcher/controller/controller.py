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
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import assert_never

from pydantic import TypeAdapter
from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.clock import Clock
from engine.node_spec import NodeSpec
from engine.trainer_ranks import may_lack_ranks
from launcher.controller.checkpoint_transfer import CheckpointTransfer, copy_checkpoint
from launcher.controller.cloud_time import CloudTime
from launcher.controller.engine_client import EngineClient
from launcher.controller.facts_reader import PRICE_SECONDS, FactsReader
from launcher.controller.lease import give_up, take_lease, this_process
from launcher.controller.node_specs import node_spec
from launcher.controller.recorder import Recorder
from launcher.controller.spend_deadlines import SpendDeadlines
from launcher.decide import budget_guard
from launcher.decide.actions import (
    Action,
    Buy,
    Enter,
    Promote,
    Release,
    RepeatPromotion,
    RepeatRequest,
    StopEngine,
)
from launcher.decide.clock_doubt import Doubt
from launcher.decide.facts import (
    FOUND,
    INCOMPLETE,
    OVER,
    PROMOTED,
    Facts,
    NodeRecord,
    Stage,
    Wanted,
    promotion_text,
)
from launcher.decide.failover import LaunchRate
from launcher.decide.known_nodes import KnownNodes
from launcher.decide.launch_history import MoveRules
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.decide.promotion import can_take_over
from launcher.decide.reconcile import decide
from launcher.decide.run_budget import judges_refusal, refused_now
from launcher.decide.steps import Steps
from launcher.decide.stopping import without_numbers
from launcher.exit_codes import words_of
from launcher.job.checked import JobError
from launcher.job.load import all_runs_of
from launcher.job.schema import Job
from launcher.job.sections import AllRuns
from launcher.ledger.accounting import judge_budget
from launcher.ledger.models import MOVE, STAND_IN, Node, NodeEvent, Run, TroubleRow
from launcher.ledger.node_history import last_trainer_cloud, node_of, node_records, option_of, unpriced_costs
from launcher.ledger.store import append_status, current_status, nodes_of, trouble_of
from launcher.money import duration
from launcher.placement.plan import Plan
from launcher.provision.local.provisioner import node_folder
from launcher.provision.provisioner import Provisioner
from launcher.settings import config_path
from launcher.storage.store_lease import LeaseLost, StoreLease

log = logging.getLogger(__name__)

SETTLE_SECONDS = 4.0
"""Time for an engine to finish its work after a stop order, and for a finished trainer to exit (wall time)."""

STOP_SECONDS = 6.0
"""Longest time of a stop on the local infra: settling, a late pass and the kill (wall time). The budget guard reserves
the money for this time."""

CLOUD_SETTLE_MS = 60_000
"""`SETTLE_SECONDS` for a real cloud, in ms: the trainer first writes its checkpoint to a bucket."""

TIDY_MS = 900_000
"""Time in ms for removing groups, keys and roles of a finished run. After that, the run's status names them as left."""

LOG_TAIL_CHARACTERS = 1500


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
        carry: Callable[[str, str], object] = copy_checkpoint,
        bucket_lease: StoreLease | None = None,
        cloud_time: CloudTime | None = None,
    ) -> None:
        """`carry`: copies a checkpoint between two stores. `bucket_lease`: the lease in the bucket, if any."""
        self._sessions, self._run, self._provisioner, self._clock = sessions, run, provisioner, clock
        self._lease = take_lease(sessions, run, holder or this_process(), pid or os.getpid())
        self._cloud_time = cloud_time
        self._job = Job.model_validate(run.job)
        plan = TypeAdapter(Plan).validate_python(run.plan)
        self.sites = plan.sites
        """Candidate sites of the run; empty on the local infra."""
        self.wanted = wanted_of(run, self._job, plan, clock)
        self.recorder = Recorder(sessions, run, self._lease, bucket_lease, clock, plan)
        self.facts_reader = FactsReader(run, self._job, plan, clock)
        self.engine = EngineClient(run, {slot.name: slot for slot in plan.slots}, provisioner, clock)
        self.deadlines = SpendDeadlines(provisioner, is_cloud=bool(plan.sites))
        self._transfer = CheckpointTransfer(run, self._job, carry)
        self._limits_at = -PRICE_SECONDS
        self._released: set[str] = set()
        """Nodes whose release this controller has ordered."""
        self._known = KnownNodes()
        """The nodes of the ledger again, indexed: a pass indexes only nodes that ended since the last pass."""
        self.recorder.write_forgotten()
        with sessions() as session:
            self._trouble = trouble_of(session, run)
        """The errors of the last pass, as the ledger has them. Empty: the last pass succeeded."""
        self.has_released = False
        """True once the run is over and only the resources made for its nodes are left."""

    def one_pass(self) -> bool:
        """Observe, compare, act. Return True when the run is over and none of its nodes and resources is left.

        An error in one step does not stop the steps after it: limits, releases and spend deadlines are guards, and
        still work. Nothing is bought in such a pass. At its end, the trouble is written down for `spotrl status` and
        the first error is raised.

        Raises LeaseLost at once when another controller has taken over.
        """
        self.recorder.check_lease()
        steps = Steps(lets_through=LeaseLost)
        is_over = self._pass(steps)
        self._record_trouble(steps.errors)
        for error in steps.errors[1:]:
            log.error("another error of the same pass", exc_info=error)
        if steps.errors:
            raise steps.errors[0]
        return is_over

    def _pass(self, steps: Steps) -> bool:
        take = steps.take
        take(self._read_limits, None)
        cloud = take(self._observe, None)
        if cloud is not None:
            steps.errors += [RuntimeError(f"{fact.name}: {fact.fault}") for fact in cloud.values() if fact.fault]
            take(partial(self._record, cloud), None)
        take(self.recorder.write_progress, None)
        if cloud is not None:
            take(partial(self._watch_standstill, cloud), None)
        facts = take(self.facts, None) or take(self._plain_facts, None)
        if facts is None:
            return False
        facts = replace(facts, login=next((fact.login for fact in (cloud or {}).values() if fact.login), ""))
        is_whole = not steps.errors
        if is_whole:
            take(partial(self.recorder.tell_spent, facts.metered, facts.now_ms), None)
        take(partial(self.engine.find_trainer, facts.nodes), None)
        indexed: Sequence[NodeRecord] = take(lambda: self._index(facts), facts.nodes)
        actions: list[Action] = take(lambda: decide(replace(facts, nodes=indexed), self.wanted, steps), [])
        # A controller may have been killed or frozen after it recorded a release, and before it ordered the release.
        recorded = [
            node.name
            for node in (*facts.nodes, *facts.kept)
            if node.is_live and "releasing" in node.happened and node.name not in self._released
        ]
        if recorded:
            actions.append(Release(nodes=tuple(recorded)))
        live = {node.name: node for node in (*facts.nodes, *facts.kept) if node.is_live}
        unknown = [name for name, fact in (cloud or {}).items() if _is_unknown(name, fact, live)]
        if unknown:
            log.warning("nobody asked for %s: released", ", ".join(unknown))
            actions.append(Release(nodes=tuple(unknown), why="its order is lost, so it cannot be looked after"))
        take(partial(self.deadlines.send, facts, self.wanted, steps, may_extend=is_whole), None)
        if facts.stage not in OVER and cloud is not None:
            take(partial(self.engine.send_capacity, facts.nodes, cloud), None)
        for action in actions:
            if not (steps.errors and isinstance(action, Buy | RepeatRequest | Promote)):
                take(partial(self._act, action), None)
        if facts.stage not in OVER or actions or steps.errors:
            return False
        return take(partial(self._is_tidy, facts), False)

    def _observe(self) -> dict[str, NodeFact]:
        return {fact.name: fact for fact in self._provisioner.observe()}

    def _record(self, cloud: Mapping[str, NodeFact]) -> None:
        nodes = self.recorder.write_news(cloud)
        if self.sites:
            self.facts_reader.refresh_prices(self._sessions)
            self.recorder.write_prices(cloud, nodes, self.facts_reader.prices)

    def _watch_standstill(self, cloud: Mapping[str, NodeFact]) -> None:
        is_excused = bool(self.engine.trouble or self._transfer.failure)
        self.facts_reader.standstill.watch(self._clock.now_ms(), cloud.get(self.engine.trainer or ""), is_excused)

    def _index(self, facts: Facts) -> KnownNodes:
        """Return the nodes with their indexes. After an error the index is built anew in the next pass."""
        index, self._known = self._known, KnownNodes()
        self._known = index.update(facts.nodes)
        return self._known

    def _record_trouble(self, errors: Sequence[Exception]) -> None:
        """Write the errors of a pass for `spotrl status`; an empty text once a pass succeeds again.

        A text that differs in numbers alone is not written again. A ledger that cannot be written keeps the old text,
        and the log has the errors.
        """
        trouble = "; ".join(dict.fromkeys(map(words_of, errors)))
        if without_numbers(trouble) == without_numbers(self._trouble):
            return
        try:
            with self.recorder.transaction() as session:
                session.add(TroubleRow(run_id=self._run.id, at_ms=self._clock.now_ms(), text=trouble))
            self._trouble = trouble
        except LeaseLost:
            raise
        except Exception:
            log.exception("the trouble of this pass could not be written down")

    def facts(self) -> Facts:
        """Read the facts of the run in a separate transaction."""
        with self._sessions() as session:
            return self._facts_in(session)

    def _plain_facts(self) -> Facts:
        """Read only the facts that the run's own limits and its end need."""
        with self._sessions() as session:
            return self.facts_reader.facts(
                session, is_limited_by_all=False, trouble=None, doubt=self._doubt(), is_plain=True
            )

    def close(self) -> None:
        self._transfer.close()
        give_up(self._sessions, self._lease)

    def _doubt(self) -> Doubt | None:
        return self._cloud_time.doubt if self._cloud_time is not None else None

    def _facts_in(self, session: Session) -> Facts:
        return self.facts_reader.facts(
            session,
            is_limited_by_all=self.wanted.all_runs != budget_guard.NO_LIMITS or self.wanted.others_at_most is not None,
            trouble=self.engine.trouble or self._transfer.failure,
            doubt=self._doubt(),
            store_answers=self.recorder.bucket_lease is not None and self.recorder.bucket_lease.answers,
        )

    def _read_limits(self) -> None:
        """Read the limits across all runs from the current configuration, not from the time of the launch."""
        if time.monotonic() - self._limits_at < PRICE_SECONDS:
            return
        self._limits_at = time.monotonic()
        try:
            all_runs = all_runs_of(config_path(), self._job.all_runs)
        except JobError as error:
            log.warning("limits over all runs stay as they are: %s", error)
            return
        limited = _limited_by_all(self.wanted, all_runs, self._run, is_cloud=bool(self.sites))
        if limited != self.wanted:
            log.info("limits over all runs are now %s", all_runs)
            self.wanted = limited

    def _act(self, action: Action) -> None:
        match action:
            case Enter():
                self._enter(action)
            case Buy():
                self._buy(action)
            case RepeatRequest():
                self._request(action.node)
            case Promote():
                self._promote(action)
            case RepeatPromotion():
                self._assign(action.node)
            case Release():
                self._release(action)
            case StopEngine():
                self.engine.stop(action.reason)
            case _:
                assert_never(action)

    def _enter(self, action: Enter) -> None:
        reason = action.reason
        if action.log_of is not None:
            try:
                reason = f"{reason}\n{log_tail(node_folder(Path(self._run.folder), action.log_of))}"
            except OSError as error:  # the run ends without the log's last lines
                log.warning("the log of %s cannot be read: %s", action.log_of, error)
        with self.recorder.transaction() as session:
            now = current_status(session, self._run)
            # A user may have requested a stop since the facts were read. The request must not be overwritten.
            is_stop_requested = (
                now is not None and now.status == Stage.STOPPING and action.stage in (Stage.RUNNING, Stage.DRAINING)
            )
            stage = action.stage
            if stage is Stage.RUNNING and (refusal := self._judges_refusal(session)) is not None:
                stage, reason = Stage.DRAINING, refusal
            log.info("the run is %s %s", stage, reason)
            if not is_stop_requested:
                append_status(session, self._run, stage, reason, self._clock.now_ms())
            if self.sites and action.stage in OVER:
                session.add_all(unpriced_costs(self._run, self._clock.now_ms()))

    def _judges_refusal(self, session: Session) -> str | None:
        """Check the judges' budget again inside a write transaction: two runs may start at the same moment."""
        if self.wanted.others_at_most is None:
            return None
        return judges_refusal(self._facts_in(session), self.wanted)

    def _buy(self, action: Buy) -> None:
        with self.recorder.transaction() as session:
            if self.sites:
                # Only one transaction writes at a time, so the facts read here include purchases by other controllers.
                refusal = refused_now(self._facts_in(session), self.wanted, action)
                if refusal is not None:
                    log.info("%s is not bought: %s", action.name, refusal.text)
                    return
            elif self._judges_refusal(session) is not None:
                return
            node = node_of(
                self._run,
                action.option,
                name=action.name,
                slot=action.slot.name,
                generation=action.generation,
                role=action.slot.role,
                requested_ms=self._clock.now_ms(),
                reserved_micro_usd=action.reserved_micro_usd,
            )
            session.add(node)
            if action.stand_in:
                session.flush()
                self._event(session, node, STAND_IN, node.requested_ms, action.stand_in)
            if action.move:
                session.flush()
                self._event(session, node, MOVE, node.requested_ms, action.move)
        # The intent is durable. After a crash here the node is not `requested`, and the next pass requests the node.
        self._request(action.name)

    def _request(self, name: str) -> None:
        with self._sessions() as session:
            node = session.scalars(select(Node).where(Node.name == name)).one()
            facts = self._facts_in(session)
        if not self._has_checkpoint(node, facts):
            return  # the next pass tries again
        requested_ms = self._clock.now_ms()
        self.recorder.check_lease()
        self._provisioner.request(option_of(node).placement, self._spec_of(node, facts))
        with self.recorder.transaction() as session:
            self._event(session, node, "requested", requested_ms)

    def _has_checkpoint(self, node: Node, facts: Facts) -> bool:
        """Return whether the node's bucket has the newest checkpoint, if the node is to train. Starts a copy if not."""
        now = next(record for record in facts.nodes if record.name == node.name)
        before = last_trainer_cloud(facts.nodes, now) if self.sites and now.role == "trainer" else None
        return self._transfer.is_complete(node, before)

    def _spec_of(self, node: Node, facts: Facts) -> NodeSpec:
        return node_spec(
            self._run,
            self._job,
            node,
            now=next(record for record in facts.nodes if record.name == node.name),
            is_cloud=bool(self.sites),
            money_deadline_ms=self.deadlines.deadline_ms(facts, self.wanted, self._clock.now_ms()),
            money_longest_ms=self.deadlines.longest_ms(node, facts, self.wanted) if self.sites else None,
        )

    def _promote(self, action: Promote) -> None:
        with self.recorder.transaction() as session:
            records = node_records(session, self._run)
            node = next(record for record in records if record.name == action.node)
            if not can_take_over(node) or any(record.slot == action.slot and record.is_live for record in records):
                return  # the next pass decides again
            row = session.scalars(select(Node).where(Node.name == action.node)).one()
            log.info("%s takes the role of %s: %s", action.node, action.slot, action.why)
            text = promotion_text(action.slot, action.generation, action.why)
            self._event(session, row, PROMOTED, self._clock.now_ms(), text)
        # The promotion is durable. After a crash here the next pass orders it again.
        self._assign(action.node)

    def _assign(self, name: str) -> None:
        with self._sessions() as session:
            node = session.scalars(select(Node).where(Node.name == name)).one()
            facts = self._facts_in(session)
        if not self._has_checkpoint(node, facts):
            return  # the next pass tries again
        self.recorder.check_lease()
        self._provisioner.assign(self._spec_of(node, facts))

    def _release(self, action: Release) -> None:
        with self.recorder.transaction() as session:
            records = {record.name: record for record in node_records(session, self._run)}
            for node in nodes_of(session, self._run):
                if node.name in action.nodes and "releasing" not in records[node.name].happened:
                    if action.never_whole:
                        self._event(session, node, INCOMPLETE, self._clock.now_ms(), action.why)
                    why = "" if action.never_whole else action.why
                    self._event(session, node, "releasing", self._clock.now_ms(), why)
        self.recorder.check_lease()
        steps = Steps(lets_through=LeaseLost)
        for name in action.nodes:  # one by one: an error at one node must not keep the others running
            if steps.take(partial(self._order_release, name), False):
                self._released.add(name)
        if steps.errors:
            raise steps.errors[0]

    def _order_release(self, name: str) -> bool:
        self._provisioner.release([name])
        return True

    def _event(self, session: Session, node: Node, kind: str, at_ms: int, evidence: str = "") -> None:
        session.add(NodeEvent(node_id=node.id, at_ms=at_ms, kind=kind, evidence=evidence))

    def _is_tidy(self, facts: Facts) -> bool:
        """Return True once the resources made for the nodes are removed.

        After `TIDY_MS` the result is True in any case, and the run's status tells the user that resources are left.
        """
        self.has_released = not any(node.is_live for node in (*facts.nodes, *facts.kept))
        if self._provisioner.tidy():
            return True
        if facts.now_ms - facts.stage_ms < TIDY_MS:
            return False
        text = f"groups, keys or roles of it are still there after {duration(TIDY_MS)}; `spotrl reap` lists them"
        if text not in facts.reason:
            reason = "; ".join(filter(None, (facts.reason, text)))
            with self.recorder.transaction() as session:
                append_status(session, self._run, facts.stage, reason, facts.now_ms)
        return True


def wanted_of(run: Run, job: Job, plan: Plan, clock: Clock) -> Wanted:
    """Return the plan, the limits and the waiting times that decisions are made with."""
    is_cloud = bool(plan.sites)
    own = Wanted(
        run=run.name,
        slots=tuple({slot.name: slot for slot in plan.slots}.values()),
        limits=_set_aside(run.max_total_micro_usd, run.max_hourly_micro_usd, run),
        deadline_ms=run.deadline_ms,
        ends_ms=run.ends_ms,
        allowance_ms=budget_guard.RELEASE_ALLOWANCE_MS if is_cloud else _run_ms(clock, STOP_SECONDS),
        settle_ms=CLOUD_SETTLE_MS if is_cloud else _run_ms(clock, SETTLE_SECONDS),
        rules=MoveRules.of(job),
        launch_rate=LaunchRate(per_minute=job.recovery.launches_per_minute) if is_cloud else None,
        iteration_ms=plan.iteration_ms,
        moved_bytes=plan.moved_bytes,
        trainer_may_lack=may_lack_ranks(job.engine()),
        micro_usd_per_point=job.stop.usd_per_point,
        metric=run.target_metric or "",
    )
    return _limited_by_all(own, job.all_runs, run, is_cloud)


def _limited_by_all(wanted: Wanted, all_runs: AllRuns, run: Run, is_cloud: bool) -> Wanted:
    """Return the same with the limits across all runs. On the local infra only the judges' money is spent."""
    if is_cloud:
        return replace(wanted, all_runs=_set_aside(all_runs.max_total, all_runs.max_hourly, run))
    judges = judge_budget(run)
    if not judges or all_runs.max_total is None:
        return replace(wanted, others_at_most=None)
    return replace(wanted, others_at_most=all_runs.max_total - judges)


def _set_aside(max_total: int | None, max_hourly: int | None, run: Run) -> budget_guard.Limits:
    """Return limits for nodes: the judges' budget is set aside, whether spent or not. Workers spend it by themselves,
    and the ledger learns of a call only later."""
    judges = judge_budget(run)
    return budget_guard.Limits(max_total=None if max_total is None else max_total - judges, max_hourly=max_hourly)


def log_tail(folder: Path) -> str:
    """Return the end of the logs of a node."""
    logs = sorted((folder / "logs").glob("*.log"))
    texts = [path.read_text(errors="replace").strip() for path in logs]
    return "\n".join(filter(None, texts))[-LOG_TAIL_CHARACTERS:]


def _is_unknown(name: str, fact: NodeFact, live: Mapping[str, NodeRecord]) -> bool:
    """Return whether a node runs that the ledger has no order for, or whose end the ledger has recorded."""
    if fact.status not in (NodeStatus.PENDING, NodeStatus.UP):
        return False
    happened = live[name].happened if name in live else {}
    return not {"requested", "releasing"} & happened.keys() if FOUND in happened else name not in live


def _run_ms(clock: Clock, wall_seconds: float) -> int:
    """Convert wall time to milliseconds of the run's clock."""
    return round(wall_seconds / clock.wall_seconds(1_000_000) * 1_000_000)
