"""Runs for tests: a job, a plan, a ledger in a temporary folder, and nodes that are fake agents."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session, sessionmaker

from engine.config import EngineConfig
from engine.events import Market
from engine.node_spec import ClockConfig, NodeSpec
from launcher.decide.facts import ENDS
from launcher.decide.node_facts import NodeFact, NodeStatus
from launcher.job.checked import CheckedJob
from launcher.job.schema import Job
from launcher.ledger.accounting import run_costs
from launcher.ledger.billing import interval_micro_usd
from launcher.ledger.models import BillingInterval, NodeEvent, Run
from launcher.ledger.node_history import metered_micro_usd
from launcher.ledger.store import find_run, nodes_of, open_ledger, progress_of
from launcher.placement.options import Option, SiteOptions
from launcher.placement.placement import Placement
from launcher.placement.plan import Plan, Slot, trainer_slot
from launcher.provision.local.preemptions import MANNERS, PreemptionSchedule, ScheduledPreemption
from launcher.provision.local.provisioner import LocalProvisioner, node_folder, nodes_folder
from launcher.runs.runs import create_run, running_processes

FAKE_AGENT = str(Path(__file__).parent.parent / "fake_agent.py")
SPOT_RATE, TRAINER_RATE = 300_000, 1_000_000


class HandClock:
    """A clock that the test moves. With `factor` it also runs that many times faster than the wall clock."""

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


def slots(spot: int, trainers: int = 1) -> tuple[Slot, ...]:
    trainer = (
        Slot(
            name=trainer_slot(number),
            role="ranks" if number else "trainer",
            placement=placement(Market.ON_DEMAND),
            on_demand_micro_usd_per_hour=TRAINER_RATE,
        )
        for number in range(trainers)
    )
    rollout = (
        Slot(name=f"spot-{n}", role="rollout", placement=placement(), on_demand_micro_usd_per_hour=TRAINER_RATE)
        for n in range(spot)
    )
    return (*trainer, *rollout)


class SimulatedCloud:
    """Simulated clouds behind `Provisioner`: the test sets their answers and delays, and moves their clock.

    `answers`: "refuse", "deny", "odd", "dies", "unsent", "untaken" or "late", by `cloud/region/zone` or a prefix of it;
    the longest prefix counts. "trainers" and "rollouts" name all nodes of a role. A node comes up `boot_ms` after its
    request, and its workers call in after another `boot_ms`. A node with the answer "odd" is gone before it was up,
    "dies" as soon as it is up, with `words` as evidence; "unsent" stays unknown, and "login" too, because the user's
    login has expired; "untaken" is denied because SkyPilot does not take its launch.
    `room`: on-demand nodes that fit into a zone, by `cloud/region/zone`; a zone that is not named has room for all. A
    request for any zone takes `-a` before `-b`. `quota`: on-demand nodes that the account may have in `cloud/region`.
    """

    def __init__(self, clock: HandClock, boot_ms: int = 60_000) -> None:
        self.clock, self.boot_ms = clock, boot_ms
        self.answers: dict[str, str] = {}
        self.words = "words that nobody has seen before"
        self.room: dict[str, int] = {}
        self.quota: dict[str, int] = {}
        self.zone_of: dict[str, str] = {}
        self.refused_at_once: dict[str, str] = {}
        self.requested: dict[str, tuple[Placement, NodeSpec, int]] = {}
        self.ended: dict[str, NodeFact] = {}
        self.released: list[str] = []
        self.notices: dict[str, int] = {}
        self.really: dict[str, tuple[str, str]] = {}
        self.up: dict[str, int] = {}
        self.assigned: dict[str, int] = {}
        self.kept: dict[str, tuple[str, int]] = {}
        self.tidies, self.stays_untidy, self.is_down = 0, False, False

    def request(self, want: Placement, spec: NodeSpec) -> None:
        if spec.node in self.ended or spec.node in self.requested:
            return
        if want.market is Market.ON_DEMAND:
            region = f"{want.cloud}/{want.region}"
            zones = [want.zone_name] if want.zone_name else [f"{want.region}-a", f"{want.region}-b"]
            free = [
                zone for zone in zones if self._on_demand_in(f"{region}/{zone}") < self.room.get(f"{region}/{zone}", 99)
            ]
            if self._on_demand_in(region) >= self.quota.get(region, 99):
                self.refused_at_once[spec.node] = "deny"
            elif free:
                self.zone_of[spec.node] = free[0]
            else:
                self.refused_at_once[spec.node] = "refuse"
        self.requested[spec.node] = want, spec, self.clock.now_ms()

    def assign(self, spec: NodeSpec) -> None:
        """Give a running node another role. Its processes call in again `boot_ms` later."""
        want, before, requested_ms = self.requested[spec.node]
        if before.role != spec.role:
            self.requested[spec.node] = want, spec, requested_ms
            self.assigned[spec.node] = self.clock.now_ms()

    def _on_demand_in(self, prefix: str) -> int:
        """Return the number of on-demand nodes in a zone or region that have not ended."""
        places = (
            f"{self.requested[n][0].cloud}/{self.requested[n][0].region}/{zone}"
            for n, zone in self.zone_of.items()
            if n not in self.ended
        )
        return sum(place == prefix or place.startswith(f"{prefix}/") for place in places)

    def observe(self) -> list[NodeFact]:
        if self.is_down:
            return [NodeFact(name=name, status=NodeStatus.UNKNOWN) for name in self.requested]
        return [self._fact(name) for name in self.requested]

    def true_micro_usd(self) -> int:
        """Return the bill of the cloud for the nodes until now; each VM costs a minute at least."""
        total = 0
        for name, up_ms in self.up.items():
            end_ms = self.ended[name].ended_ms if name in self.ended else self.clock.now_ms()
            rate = TRAINER_RATE if "trainer" in name else SPOT_RATE
            total += interval_micro_usd(up_ms, max(end_ms or 0, up_ms + 60_000), rate)
        return total

    def release(self, names: Sequence[str]) -> None:
        for name in names:
            self.released.append(name)
            self.end(name, "released")

    def rearm(self, name: str, money_deadline_ms: int) -> None:
        pass

    def tunnel(self, name: str, port: int) -> tuple[str, int] | None:
        return None

    def tidy(self) -> bool:
        self.tidies += 1
        return not self.stays_untidy

    def close(self) -> None:
        pass

    def preempt(self, name: str, evidence: str = "Server.SpotInstanceTermination: taken back") -> None:
        self.end(name, evidence, reclaimed=True)

    def end(self, name: str, evidence: str, *, reclaimed: bool = False) -> None:
        if name not in self.ended:
            self.ended[name] = NodeFact(
                name=name,
                status=NodeStatus.GONE,
                evidence=evidence,
                reclaimed=reclaimed,
                started_ms=self._up_ms(name),
                ended_ms=self.clock.now_ms(),
            )
            self.requested.setdefault(name, (placement(), None, self.clock.now_ms()))  # type: ignore[arg-type]

    def fail(self, name: str, evidence: str, keep_ms: int) -> None:
        """Let a node's processes fail, and keep its VM for `keep_ms`."""
        self.kept[name] = evidence, self.clock.now_ms() + keep_ms

    def live(self) -> list[str]:
        """Return the nodes that are billed or pending."""
        return [name for name in self.requested if self._fact(name).status in (NodeStatus.UP, NodeStatus.PENDING)]

    def _up_ms(self, name: str) -> int | None:
        if name not in self.requested:
            return None
        at_ms = self.requested[name][2] + self.boot_ms
        if name not in self.up and self.clock.now_ms() >= at_ms and self._answer(name) in ("", "late", "dies"):
            self.up[name] = at_ms
        return self.up.get(name)

    def _answer(self, name: str) -> str:
        if name in self.refused_at_once:
            return self.refused_at_once[name]
        want, spec, _ = self.requested[name]
        if f"{spec.role}s" in self.answers:
            return self.answers[f"{spec.role}s"]
        place = f"{want.cloud}/{want.region}/{want.zone_name}"
        fitting = [prefix for prefix in self.answers if place.startswith(prefix)]
        return self.answers[max(fitting, key=len)] if fitting else ""

    def _fact(self, name: str) -> NodeFact:
        if name in self.ended:
            return self.ended[name]
        want, up_ms, answer = self.requested[name][0], self._up_ms(name), self._answer(name)
        if up_ms is None and answer == "odd":
            ended_ms = self.clock.now_ms()
            self.ended[name] = NodeFact(name=name, status=NodeStatus.GONE, evidence=self.words, ended_ms=ended_ms)
            return self.ended[name]
        if up_ms is not None and answer == "dies":
            self.end(name, self.words)
            return self.ended[name]
        if up_ms is None and answer == "unsent":
            return NodeFact(name=name, status=NodeStatus.UNKNOWN, evidence=self.words)
        if up_ms is None and answer == "login":
            return NodeFact(name=name, status=NodeStatus.UNKNOWN, evidence=self.words, login=self.words)
        if up_ms is None and answer == "untaken":
            evidence, ended_ms = f"SkyPilot does not send the launch: ValueError: {self.words}", self.clock.now_ms()
            self.ended[name] = NodeFact(name=name, status=NodeStatus.DENIED, evidence=evidence, ended_ms=ended_ms)
            return self.ended[name]
        if up_ms is None and answer in ("refuse", "deny"):
            status = NodeStatus.NO_CAPACITY if answer == "refuse" else NodeStatus.DENIED
            words = "there is no capacity" if answer == "refuse" else f"quota GPUS is 0 in {want.cloud} {want.region}"
            if name in self.refused_at_once and answer == "deny":
                words = f"VcpuLimitExceeded in {want.cloud} {want.region}"
            tried = (f"{want.cloud}/{want.region}/{want.zone_name}",) if answer == "refuse" else ()
            ended_ms = self.clock.now_ms()
            self.ended[name] = NodeFact(name=name, status=status, evidence=words, ended_ms=ended_ms, tried=tried)
            return self.ended[name]
        if up_ms is None or answer == "late":
            return NodeFact(name=name, status=NodeStatus.PENDING)
        evidence, kept_until_ms = self.kept.get(name, ("", None))
        if kept_until_ms is not None and self.clock.now_ms() >= kept_until_ms:
            self.end(name, evidence)
            return self.ended[name]
        zone, instance_type = self.really.get(
            name, (self.zone_of.get(name) or want.zone_name or f"{want.region}-a", want.instance_type)
        )
        return NodeFact(
            name=name,
            status=NodeStatus.UP,
            evidence=evidence,
            kept_until_ms=kept_until_ms,
            started_ms=up_ms,
            ready_ms=self._ready_ms(name, up_ms),
            role="" if self.requested[name][1] is None else self.requested[name][1].role,
            notice_deadline_ms=self.notices.get(name),
            zone=zone,
            instance_type=instance_type,
        )

    def _ready_ms(self, name: str, up_ms: int) -> int | None:
        if name not in self.assigned:
            return up_ms
        ready_ms = self.assigned[name] + self.boot_ms
        return ready_ms if self.clock.now_ms() >= ready_ms else None


def cloud_option(cloud: str, region: str, zone: str, market: Market, rate: int) -> Option:
    return Option(
        placement=replace(
            placement(market), cloud=cloud, region=region, zone=zone or f"{region}, any zone", micro_usd_per_hour=rate
        ),
        on_demand_micro_usd_per_hour=TRAINER_RATE,
    )


def cloud_site(cloud: str, region: str, zones: str = "ab") -> SiteOptions:
    steady = cloud_option(cloud, region, "", Market.ON_DEMAND, TRAINER_RATE)
    spot = [cloud_option(cloud, region, f"{region}-{zone}", Market.SPOT, SPOT_RATE) for zone in zones]
    return SiteOptions(cloud=cloud, region=region, trainer=(steady,), rollout=(*spot, steady))


CLOUD_SITES = (cloud_site("gcp", "g1"), cloud_site("gcp", "g2"), cloud_site("aws", "e1"))


def cloud_slots(spot: int, sites: Sequence[SiteOptions] = CLOUD_SITES, trainers: int = 1) -> tuple[Slot, ...]:
    """Return slots planned in the first site, over its zones in turn."""
    home = sites[0]
    rollout = [option for option in home.rollout if option.placement.market is Market.SPOT]
    parts = [(trainer_slot(n), "ranks" if n else "trainer", home.trainer[0]) for n in range(trainers)]
    nodes = [(f"spot-{n}", "rollout", rollout[n % len(rollout)]) for n in range(spot)]
    return tuple(
        Slot(
            name=name,
            role=role,
            placement=option.placement,
            on_demand_micro_usd_per_hour=option.on_demand_micro_usd_per_hour,
        )
        for name, role, option in (*parts, *nodes)
    )


def cloud_run(
    sessions: sessionmaker[Session],
    *,
    name: str = "demo",
    spot: int = 2,
    trainers: int = 1,
    sites: Sequence[SiteOptions] = CLOUD_SITES,
    max_total: int | None = 100_000_000,
    max_hourly: int | None = 5_000_000,
    pace_ms: tuple[int, ...] = (),
    moved_bytes: int = 0,
    **job_fields: Any,
) -> Run:
    """Create a run that may use all `sites`, on the clock of its controller. `pace_ms`, `moved_bytes`: of its plan."""
    if trainers > 1:
        several = {"resources": {"trainer": {"num_nodes": trainers}}, "runtime": {"trainer_ranks": trainers}}
        job_fields = several | job_fields
    store = {"aws": "s3://bucket/spotrl", "gcp": "gs://bucket/spotrl"}
    job = Job(name=name, iterations=1000, infra="gcp,aws", store=store, clock_factor=1.0, **job_fields)
    checked = CheckedJob(
        job=job, origins={}, lines={}, digest="d", text="name: demo\n", path=Path("job.yaml"), workdir=Path.cwd()
    )
    plan = Plan(
        region=sites[0].region,
        slots=cloud_slots(spot, sites, trainers),
        max_total_micro_usd=max_total,
        max_hourly_micro_usd=max_hourly,
        money_basis="metered",
        sites=tuple(sites),
        pace_ms=pace_ms,
        moved_bytes=moved_bytes,
    )
    create_run(sessions, checked, plan, name)
    with sessions() as session:
        return find_run(session, name)


def ledger(tmp_path: Path) -> sessionmaker[Session]:
    return open_ledger(tmp_path / "ledger.sqlite")


def made_run(
    sessions: sessionmaker[Session],
    *,
    name: str = "demo",
    spot: int = 1,
    trainers: int = 1,
    iterations: int = 3,
    factor: float = 60.0,
    max_total: int | None = None,
    max_hourly: int | None = None,
    plan_slots: tuple[Slot, ...] = (),
    **job_fields: Any,
) -> Run:
    """Create a run on this machine. `plan_slots`: instead of a trainer on demand and `spot` rollout nodes."""
    if trainers > 1:
        several = {"resources": {"trainer": {"num_nodes": trainers}}, "runtime": {"trainer_ranks": trainers}}
        job_fields = several | job_fields
    job = Job(name=name, iterations=iterations, clock_factor=factor, preemptions={"trace": "none"}, **job_fields)
    checked = CheckedJob(
        job=job, origins={}, lines={}, digest="d", text="name: demo\n", path=Path("job.yaml"), workdir=Path.cwd()
    )
    plan = Plan(
        region="us-east-2",
        slots=plan_slots or slots(spot, trainers),
        max_total_micro_usd=max_total,
        max_hourly_micro_usd=max_hourly,
    )
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
        clock=ClockConfig(origin_ms=clock.at_ms, factor=1e-15),  # the fake agent's clock is frozen like ours
        engine=EngineConfig(),
    )


def rule(*lifetimes_ms: int, notice_ms: int = 120_000, first: int = 0) -> PreemptionSchedule:
    """Return a preemption schedule that begins with the manner number `first`."""

    class Shifted(PreemptionSchedule):
        def preemption(self, ordinal: int) -> ScheduledPreemption:
            plain = super().preemption(ordinal)
            manner = MANNERS[(ordinal + first) % len(MANNERS)]
            return ScheduledPreemption(lifetime_ms=plain.lifetime_ms, notice_ms=plain.notice_ms, manner=manner)

    return Shifted(trace="made up", lifetimes_ms=lifetimes_ms, notice_ms=notice_ms)


def fact_of(provisioner: LocalProvisioner, name: str) -> NodeFact | None:
    return next((fact for fact in provisioner.observe() if fact.name == name), None)


def wait_until(true: Callable[[], object], seconds: float = 120.0) -> None:
    """Poll until the condition holds, because real processes take real time, and more of it on a busy computer."""
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.02)


def dead_pid() -> int:
    """Return a pid that no process has."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return pid


def assert_consistent(sessions: sessionmaker[Session], run: Run) -> None:
    """Assert the invariants of the ledger of a finished run."""
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
        now_ms = run.clock.now_ms()
        assert total == metered_micro_usd(session, run, now_ms) == run_costs(session, run, now_ms).total
        iterations = [row.event["iteration"] for row in progress_of(session, run, "iteration_done")]
        assert iterations == list(range(len(iterations)))
    folders = {path.name for path in nodes_folder(Path(run.folder)).iterdir()}
    assert folders == {node.name for node in nodes}
