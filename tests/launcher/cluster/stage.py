"""Runs for tests: a job, a plan, a ledger in a folder of the test's, and nodes that are fake agents."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.config import ClockConfig, EngineConfig, NodeSpec
from engine.events import Market
from launcher.cluster.controller import metered_micro_usd
from launcher.cluster.local import LocalProvisioner, node_folder, nodes_folder
from launcher.cluster.provisioner import NodeFact
from launcher.cluster.reclaims import MANNERS, Reclaim, ReclaimRule
from launcher.cluster.reconcile import ENDS
from launcher.cluster.runs import create_run, run_clock, running_processes
from launcher.job import CheckedJob, Job
from launcher.ledger.accounting import interval_micro_usd, run_costs
from launcher.ledger.models import BillingInterval, NodeEvent, Run
from launcher.ledger.store import find_run, nodes_of, open_ledger, progress_of
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot

FAKE_AGENT = (sys.executable, str(Path(__file__).parent.parent / "fake_agent.py"))
SPOT_RATE, TRAINER_RATE = 300_000, 1_000_000


class HandClock:
    """Moved by hand, or let run: `factor` milliseconds of the run in a millisecond of the wall."""

    def __init__(self, factor: float = 60.0) -> None:
        self.at_ms, self.factor = 1_000_000_000, factor

    def now_ms(self) -> int:
        return self.at_ms

    def wall_seconds(self, duration_ms: int) -> float:
        return duration_ms / 1000 / self.factor

    def pass_ms(self, duration_ms: int) -> None:
        self.at_ms += duration_ms


def placement(market: Market = Market.SPOT) -> Placement:
    return Placement(
        cloud="aws",
        region="us-east-2",
        zone="us-east-2a",
        instance_type="g6.xlarge",
        gpus=1,
        accelerator="L4",
        market=market,
        micro_usd_per_hour=SPOT_RATE if market is Market.SPOT else TRAINER_RATE,
        price_source="catalogs/aws.csv",
        price_observed_at="2026-01-01",
    )


def slots(spot: int) -> tuple[Slot, ...]:
    trainer = Slot(
        name="trainer",
        role="trainer",
        placement=placement(Market.ON_DEMAND),
        on_demand_micro_usd_per_hour=TRAINER_RATE,
    )
    rollout = (
        Slot(name=f"spot-{n}", role="rollout", placement=placement(), on_demand_micro_usd_per_hour=TRAINER_RATE)
        for n in range(spot)
    )
    return (trainer, *rollout)


def ledger(tmp_path: Path) -> sessionmaker[Session]:
    return open_ledger(tmp_path / "ledger.sqlite")


def made_run(
    sessions: sessionmaker[Session],
    *,
    name: str = "demo",
    spot: int = 1,
    iterations: int = 3,
    factor: float = 60.0,
    max_total: int | None = None,
    max_hourly: int | None = None,
    **job_fields: Any,
) -> Run:
    job = Job(name=name, iterations=iterations, clock_factor=factor, reclaims={"trace": "none"}, **job_fields)
    checked = CheckedJob(
        job=job, origins={}, lines={}, digest="d", text="name: demo\n", path=Path("job.yaml"), workdir=Path.cwd()
    )
    plan = Plan(region="us-east-2", slots=slots(spot), max_total_micro_usd=max_total, max_hourly_micro_usd=max_hourly)
    create_run(sessions, checked, plan, name)
    with sessions() as session:
        return find_run(session, name)


def spec(run_folder: Path, clock: HandClock, name: str = "demo-spot-0-g0", role: str = "rollout") -> NodeSpec:
    return NodeSpec(
        run="demo",
        node=name,
        role=role,
        market=Market.SPOT if role == "rollout" else Market.ON_DEMAND,
        folder=str(node_folder(run_folder, name)),
        store=(run_folder / "store").as_uri(),
        coordinator_port=1,
        token="t",
        clock=ClockConfig(origin_ms=clock.at_ms, factor=1e-15),  # the fake agent's clock stands still, like ours
        engine=EngineConfig(),
    )


def rule(*lifetimes_ms: int, notice_ms: int = 120_000, first: int = 0) -> ReclaimRule:
    """A rule whose first node ends in the manner number `first`."""

    class Shifted(ReclaimRule):
        def reclaim(self, ordinal: int) -> Reclaim:
            plain = super().reclaim(ordinal)
            manner = MANNERS[(ordinal + first) % len(MANNERS)]
            return Reclaim(lifetime_ms=plain.lifetime_ms, notice_ms=plain.notice_ms, manner=manner)

    return Shifted(trace="made up", lifetimes_ms=lifetimes_ms, notice_ms=notice_ms)


def fact_of(provisioner: LocalProvisioner, name: str) -> NodeFact | None:
    return next((fact for fact in provisioner.observe() if fact.name == name), None)


def wait_until(true: Callable[[], object], seconds: float = 15.0) -> None:
    """Real processes take real time; how much does not matter to what is tested."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def dead_pid() -> int:
    """A pid that no process has."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def assert_consistent(sessions: sessionmaker[Session], run: Run) -> None:
    """What must hold of a ledger whose run is over, whatever happened on the way."""
    assert running_processes(run) == []
    with sessions() as session:
        nodes = nodes_of(session, run)
        by_slot: dict[str, list[int]] = {}
        for node in nodes:
            by_slot.setdefault(node.slot, []).append(node.generation)
        assert all(generations == list(range(len(generations))) for generations in by_slot.values())
        for node in nodes:
            kinds = [event.kind for event in session.scalars(select(NodeEvent).where(NodeEvent.node_id == node.id))]
            assert len([kind for kind in kinds if kind in ENDS]) == 1, (node.name, kinds)
            assert len(kinds) == len(set(kinds)), (node.name, kinds)
            intervals = session.scalars(select(BillingInterval).where(BillingInterval.node_id == node.id)).all()
            assert len(intervals) == ("up" in kinds)
            for interval in intervals:
                assert interval.micro_usd == interval_micro_usd(
                    interval.start_ms, interval.end_ms, node.micro_usd_per_hour
                )
        total = sum(session.scalars(select(BillingInterval.micro_usd)))
        now_ms = run_clock(run).now_ms()
        assert total == metered_micro_usd(session, run, now_ms) == run_costs(session, run, now_ms).total
        iterations = [row.event["iteration"] for row in progress_of(session, run, "iteration_done")]
        assert iterations == list(range(len(iterations)))
    folders = {path.name for path in nodes_folder(Path(run.folder)).iterdir()}
    assert folders == {node.name for node in nodes}
