"""The state of runs, as commands show it: views and logs."""

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sqlalchemy import func, select
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session, sessionmaker

from engine.events import EngineFinished, Evaluated, IterationDone, Regrouped
from launcher.controller.lease import is_held
from launcher.decide.facts import INSTANCE_ENDED, KEPT, OVER, PROMOTED, NodeRecord, Stage
from launcher.decide.point_cost import NOT_EVALUATED, PointCost, point_cost
from launcher.harmless import harmless
from launcher.job.sections import Recovery
from launcher.learning import learns_nothing
from launcher.ledger.accounting import charges_of_run, judge_micro_usd, on_demand_micro_usd
from launcher.ledger.bills import billed_micro_usd
from launcher.ledger.left_in_buckets import LeftInBucket, left_in_buckets
from launcher.ledger.models import (
    BillLine,
    ControllerLease,
    KeptView,
    Node,
    NodeEvent,
    ProgressRow,
    Removal,
    Run,
    RunStatus,
    TroubleRow,
)
from launcher.ledger.node_history import node_records
from launcher.ledger.store import (
    check_kept,
    current_status,
    find_run,
    nodes_of,
    progress_of,
    trouble_of,
    writing,
)
from launcher.provision.local.provisioner import node_folder
from launcher.report.costs import price_dates
from launcher.report.reached import evaluations_of
from launcher.report.resume_command import resume_with_more
from launcher.report.target import best, shown_metric, smoothed
from launcher.runs.event_lines import newest_events

LOOKED_BACK = 200
"""Events read to find the last one that is not a change of groups."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeView:
    name: str
    slot: str
    role: str
    market: str
    zone: str
    status: str
    """State: asked, starting, ready, draining, stopping; or end: lost (reclaimed), gone, released, denied,
    no_capacity. `kept`: failed, and kept for a look."""
    age_ms: int
    micro_usd_per_hour: int
    groups: tuple[tuple[str, ...], ...] = ()
    """Workers that share images now, each group in rank order; empty when the node ended or never had groups."""
    goes_in_ms: int | None = None
    """Time until a kept node ends, on the run's clock. None: the node is not kept."""

    @property
    def is_live(self) -> bool:
        """Return True if the node has no recorded end. Such a node is billed."""
        return self.status in ("asked", "starting", "ready", "draining", "stopping", KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """The state of a run. `iteration`: batches trained. `score`: the mean of the last three evaluations."""

    name: str
    status: str
    reason: str
    iteration: int
    iterations: int
    reward: float | None
    score: float | None
    best_score: float | None
    metric: str
    target: float | None
    spent_micro_usd: int
    max_total_micro_usd: int | None
    micro_usd_per_hour: int
    nodes: tuple[NodeView, ...]
    """The newest node of each slot, and every live node."""
    last_event: str
    eta_seconds: float | None
    """Wall time until the last iteration, at the speed of the last five; None before enough iterations are done."""
    elapsed_ms: int
    wall_seconds: float
    clock_factor: float
    controlled: bool
    """True if a controller manages the run now."""
    is_removed: bool = False
    """True if `spotrl rm` deleted the run's files."""
    on_demand_micro_usd: int = 0
    """Money spent, had the same node-time been paid at the on-demand price of the same offers."""
    preemptions: int = 0
    """Nodes preempted so far."""
    iteration_ms: int = 0
    """Age of the present iteration, on the run's clock."""
    usual_iteration_ms: int | None = None
    """Mean time of the last five iterations, on the run's clock. None before two iterations are done."""
    deadline_ms: int | None = None
    """The deadline, in milliseconds after the launch. None: the run has none."""
    missed_deadline: bool = False
    """True if the deadline has passed and the work was not done by then."""
    resume_with: str = ""
    """Command that continues a run which a budget of its own stopped, with more money. Empty for any other run."""
    trouble: str = ""
    """Errors of the controller's last pass, in words. While there are any, nothing is bought; limits and stops still
    work. Empty: the last pass succeeded."""

    learning: str = ""
    """Why the run learns nothing now, in words. Empty: it learns, or is over."""
    trainer: str = ""
    """Name of the node that took the role of a lost trainer and has it now. Empty: the trainer was bought as one, or
    there is none."""
    trainer_ms: int = 0
    """Time since `trainer` took the role, on the run's clock."""
    billed_micro_usd: int | None = None
    """What the clouds billed, as far as bills were imported; None without one. Limits rest on `spent_micro_usd`."""
    point: PointCost = NOT_EVALUATED
    """Dollars of the last +.01 of `score`, and a forecast for the next."""
    left_in_buckets: tuple[LeftInBucket, ...] = ()
    """Folders that the run left in buckets, which cost money. Empty for a run that goes on, and without buckets."""
    prices: str = ""
    """Dates of the prices of its nodes, in words. Empty: the run has had no node."""

    @property
    def lacks_controller(self) -> bool:
        """Return whether a run that is not over, or may still have nodes, has no controller."""
        return not self.controlled and (self.status not in OVER or any(node.is_live for node in self.nodes))


def is_controlled(sessions: sessionmaker[Session], run_name: str) -> bool:
    """Return whether a live controller holds the run's lease."""
    with sessions() as session:
        return is_held(session.get(ControllerLease, find_run(session, run_name).id))


def last_moment_ms(session: Session, run: Run) -> int:
    """Return the present time on the run's clock, or the time of its last status if the run is over."""
    status = status_of(session, run)
    return status.at_ms if Stage(status.status) in OVER else run.clock.now_ms()


def run_view(sessions: sessionmaker[Session], run_name: str) -> RunView:
    """Return the run's state from the ledger alone."""
    with sessions() as session:
        return view_of(session, find_run(session, run_name))


def run_documents(sessions: sessionmaker[Session]) -> list[dict[str, Any]]:
    """Return every run's state as `asdict` of its `RunView`, newest first.

    The views of settled runs are kept in the ledger, because each takes hundredths of a second.
    """
    views: dict[int, dict[str, Any]] = {}
    settled: list[KeptView] = []
    with sessions() as session:
        marks = _marks(session)
        removed = set(session.scalars(select(Removal.run_id)))
        left = left_in_buckets(session)
        for kept in session.execute(select(KeptView.run_id, KeptView.mark, KeptView.view)):
            if marks.get(kept.run_id) == kept.mark:
                folders = [asdict(folder) for folder in left.get(kept.run_id, ())]
                views[kept.run_id] = {**kept.view, "is_removed": kept.run_id in removed, "left_in_buckets": folders}
        for run in session.scalars(select(Run).where(Run.id.in_(marks.keys() - views.keys()))):
            view = view_of(session, run)
            views[run.id] = asdict(view)
            if view.status in OVER and not view.controlled and not any(node.is_live for node in view.nodes):
                settled.append(KeptView(run_id=run.id, mark=marks[run.id], view=views[run.id]))
    if settled:
        with suppress(OperationalError), writing(sessions) as session:  # a ledger that cannot be written can be read
            for row in settled:
                session.merge(row)
    return [views[run_id] for run_id in sorted(views, reverse=True)]


def _marks(session: Session) -> dict[int, str]:
    """Return what the view of each run is made from: this code, the run's limits, its newest rows, and its bill."""

    def newest(table: type[RunStatus | TroubleRow | ProgressRow]) -> Any:
        return select(func.max(table.id)).where(table.run_id == Run.id).correlate(Run).scalar_subquery()

    of_nodes = select(func.max(NodeEvent.id)).join(Node).where(Node.run_id == Run.id).correlate(Run).scalar_subquery()
    billed = select(func.sum(BillLine.pico_usd * BillLine.copies)).where(BillLine.run_id == Run.id).correlate(Run)
    limits = (Run.max_total_micro_usd, Run.max_hourly_micro_usd, Run.max_judges_micro_usd, Run.deadline_ms)
    rows = session.execute(
        select(
            *(Run.id, *limits, newest(RunStatus), newest(TroubleRow), newest(ProgressRow), of_nodes),
            billed.scalar_subquery(),
        )
    )
    shape = ",".join(field.name for field in (*fields(RunView), *fields(NodeView), *fields(PointCost)))
    code = hashlib.sha256(f"{version('spotrl')} {shape}".encode()).hexdigest()[:16]
    return {run_id: f"{code} {' '.join(map(str, facts))}" for run_id, *facts in rows}


def short_name(run_name: str, node_name: str) -> str:
    """Return a node's name without the run's name: `spot-0-g2` has slot and generation, and fits in 80 columns."""
    return node_name.removeprefix(f"{run_name}-")


def nodes_called(session: Session, run: Run, node: str) -> list[Node]:
    """Return the run's node of this full or short name, or all nodes of this slot. Raises LookupError for none."""
    nodes = nodes_of(session, run)
    matching = [row for row in nodes if node in (row.name, row.slot, short_name(run.name, row.name))]
    if not matching:
        names = ", ".join(row.name for row in nodes) or "none yet"
        raise LookupError(f"{run.name} has no node called {node}; it has had: {names}")
    return matching


def node_logs(sessions: sessionmaker[Session], run_name: str, node: str | None = None) -> list[Path]:
    """Return the log files of a run: the controller's and every node's, also of lost nodes; or of one node or slot."""
    with sessions() as session:
        run = find_run(session, run_name)
        check_kept(session, run)
        rows = nodes_called(session, run, node) if node is not None else nodes_of(session, run)
    folder = Path(run.folder)
    own = [folder / "controller.log"] if node is None else []
    logs = [path for row in rows for path in sorted((node_folder(folder, row.name) / "logs").glob("*.log"))]
    return [path for path in [*own, *logs] if path.exists()]


def log_title(path: Path) -> str:
    """Return a log's name for people: `controller.log`, or node and file."""
    return path.name if path.name == "controller.log" else f"{path.parent.parent.name}/{path.name}"


def newest_log(paths: Sequence[Path], lines: int) -> tuple[str, ...]:
    """Return the name and the last lines of the log that changed last; a note without any log."""
    if not paths:
        return ("no log yet",)
    path = max(paths, key=lambda log: log.stat().st_mtime_ns)
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - lines * 200))
        text = file.read().decode(errors="replace")
    return (f"==> {log_title(path)} <==", *(harmless(line) for line in text.splitlines()[-lines:]))


def view_of(session: Session, run: Run) -> RunView:
    """Return the run's state from the ledger alone."""
    status = status_of(session, run)
    over = Stage(status.status) in OVER
    records = node_records(session, run)
    now_ms = run.clock.now_ms()
    until_ms = status.at_ms if over and not any(record.is_live for record in records) else now_ms
    done = progress_of(session, run, IterationDone.KIND)
    evaluated = progress_of(session, run, Evaluated.KIND)
    metric = shown_metric(run.target_metric, (name for row in evaluated for name in row.event["metrics"]))
    charges, judges = charges_of_run(session, run, now_ms), judge_micro_usd(session, run)
    curve = evaluations_of(session, run, metric, (charge for of_node in charges.values() for charge in of_node))
    points, peak = smoothed(curve), best(curve)
    iterations = int(run.job["iterations"])
    iteration = done[-1].event["iteration"] + 1 if done else 0
    zones = {node.name: node.zone for node in nodes_of(session, run)}
    groups = {row.event["node"]: row.event["groups"] for row in progress_of(session, run, Regrouped.KIND)}
    # Groups may change many times a minute, and each node shows its own groups.
    lines = [line for line in newest_events(session, run, LOOKED_BACK)[0] if line.kind != Regrouped.KIND]
    pace, seconds = [row.at_ms for row in done[-6:]], [row.event["wall_seconds"] for row in done[-5:]]
    usual_ms = (pace[-1] - pace[0]) / (len(pace) - 1) if len(pace) > 1 else None
    is_paced = usual_ms is not None and not over
    eta_seconds = sum(seconds) / len(seconds) * (iterations - iteration) if is_paced else None
    keep_ms = Recovery.model_validate(run.job.get("recovery") or {}).keep_failed or 0
    of_nodes = sum(charge.micro_usd for of_node in charges.values() for charge in of_node)
    promoted = next((record for record in records if record.is_live and PROMOTED in record.happened), None)
    return RunView(
        name=run.name,
        status=status.status,
        reason=harmless(status.reason),
        iteration=iteration,
        iterations=iterations,
        reward=done[-1].event["reward_mean"] if done else None,
        score=points[-1].smoothed if points else None,
        best_score=peak.smoothed if peak is not None else None,
        metric=metric,
        target=run.target_value,
        spent_micro_usd=of_nodes + judges,
        max_total_micro_usd=run.max_total_micro_usd,
        micro_usd_per_hour=sum(record.micro_usd_per_hour for record in records if record.has_instance),
        nodes=tuple(
            _node_view(record, zones[record.name], groups.get(record.name, ()), now_ms, keep_ms)
            for record in _shown(records)
        ),
        last_event=f"{lines[-1].source}: {lines[-1].kind} {lines[-1].text}".strip() if lines else "",
        eta_seconds=eta_seconds,
        elapsed_ms=until_ms - run.created_ms,
        wall_seconds=run.wall_seconds(status if over else None, now_ms),
        clock_factor=run.clock_factor,
        controlled=is_held(session.get(ControllerLease, run.id)),
        trouble=harmless(trouble_of(session, run)),
        learning=learns_nothing(done[-1].event.get("health", {})) if done and not over else "",
        is_removed=session.get(Removal, run.id) is not None,
        on_demand_micro_usd=judges
        + sum(
            on_demand_micro_usd(charges[node.id], node.on_demand_micro_usd_per_hour) for node in nodes_of(session, run)
        ),
        preemptions=sum(record.reclaimed for record in records),
        iteration_ms=max(0, until_ms - (pace[-1] if pace else run.created_ms)),
        usual_iteration_ms=round(usual_ms) if usual_ms is not None else None,
        deadline_ms=None if run.deadline_ms is None else run.deadline_ms - run.created_ms,
        missed_deadline=_missed_deadline(session, run, until_ms),
        trainer="" if promoted is None else promoted.name,
        trainer_ms=0 if promoted is None else max(0, until_ms - promoted.happened[PROMOTED]),
        billed_micro_usd=billed_micro_usd(session, [run.id]).get(run.id),
        resume_with=resume_with_more(run, status.reason, of_nodes) if status.status == Stage.STOPPED else "",
        point=point_cost(points),
        left_in_buckets=left_in_buckets(session, [run.id]).get(run.id, ()) if over else (),
        prices=price_dates(nodes_of(session, run)),
    )


def _missed_deadline(session: Session, run: Run, until_ms: int) -> bool:
    """Return whether the deadline passed before the engine was done. The release of nodes after that is not late."""
    ends = progress_of(session, run, EngineFinished.KIND)
    done_ms = ends[-1].at_ms if ends and ends[-1].event["reason"] in ("target", "iterations") else until_ms
    return run.deadline_ms is not None and done_ms > run.deadline_ms


def _shown(records: Sequence[NodeRecord]) -> list[NodeRecord]:
    newest: dict[str, int] = {}
    for record in records:
        newest[record.slot] = max(record.generation, newest.get(record.slot, 0))
    return [record for record in records if record.is_live or record.generation == newest[record.slot]]


def _node_view(record: NodeRecord, zone: str, groups: Sequence[Sequence[str]], now_ms: int, keep_ms: int) -> NodeView:
    since_ms = record.happened.get("up", record.requested_ms)
    ended_ms = record.ended_ms
    status = _node_status(record)
    return NodeView(
        name=record.name,
        slot=record.slot,
        role=record.role,
        market=record.market,
        zone=zone,
        status=status,
        age_ms=max(0, (now_ms if ended_ms is None else ended_ms) - since_ms),
        micro_usd_per_hour=record.micro_usd_per_hour,
        groups=tuple(tuple(group) for group in groups) if record.is_live else (),
        goes_in_ms=max(0, record.happened[KEPT] + keep_ms - now_ms) if status == KEPT else None,
    )


def _node_status(record: NodeRecord) -> str:
    if record.reclaimed:
        return "lost"
    steps = (
        "gone",
        "released",
        "denied",
        "no_capacity",
        INSTANCE_ENDED,
        "releasing",
        KEPT,
        "notice",
        "ready",
        "up",
        "requested",
    )
    words = {
        INSTANCE_ENDED: "stopping",
        "releasing": "stopping",
        "notice": "draining",
        "up": "starting",
        "requested": "starting",
    }
    step = next((step for step in steps if step in record.happened), "asked")
    return words.get(step, step)


def status_of(session: Session, run: Run) -> RunStatus:
    status = current_status(session, run)
    if status is None:
        raise LookupError(f"{run.name} has no status in the ledger, so it was not made by `spotrl launch`")
    return status
