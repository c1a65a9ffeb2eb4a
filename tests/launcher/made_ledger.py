"""Ledgers made by hand: a run with nodes, bills, preemptions and evaluations whose sums can be checked by hand."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from engine.events import (
    EngineStarted,
    Evaluated,
    IterationDone,
    NodeMissed,
    NodeSeen,
    NodeUsage,
    ProgressEvent,
    Ranked,
    Regrouped,
)
from launcher.ledger.accounting import interval_micro_usd
from launcher.ledger.models import (
    Base,
    BillingInterval,
    Node,
    NodeEvent,
    Preemption,
    ProgressRow,
    Run,
    RunStatus,
    StartCommand,
)

START_MS = 1_736_928_000_000
"""2025-01-15 08:00 UTC."""
HOUR_MS = 3_600_000
MINUTE_MS = 60_000


@dataclass
class MadeLedger:
    """Adds facts to one run; times are milliseconds since the run was created."""

    session: Session
    run: Run
    seq: int = 0
    nodes: dict[str, Node] = field(default_factory=dict)

    def node(
        self,
        slot: str,
        generation: int = 1,
        *,
        market: str = "spot",
        rate: int = 3_600_000,
        on_demand: int = 9_000_000,
        up: int | None = None,
        end: int | None = None,
        seen: int | None = None,
        zone: str = "us-east-1a",
        price_source: str = "catalogs/aws.csv",
    ) -> Node:
        """Add a node; one with `up` and without `end` is still running."""
        node = Node(
            run_id=self.run.id,
            name=f"{self.run.name}-{slot}-g{generation}",
            slot=slot,
            generation=generation,
            role="trainer" if slot == "trainer" else "rollout",
            market=market,
            cloud="aws",
            region=zone[:-1],
            zone=zone,
            instance_type="g6.xlarge",
            accelerator="L4",
            gpus=1,
            micro_usd_per_hour=rate,
            on_demand_micro_usd_per_hour=on_demand,
            price_source=price_source,
            price_observed_at="2025-01-10T00:00:00+00:00",
            requested_ms=START_MS,
            reserved_micro_usd=0,
        )
        self.session.add(node)
        self.session.flush()
        self.nodes[node.name] = node
        if up is not None:
            self.session.add(NodeEvent(node_id=node.id, at_ms=START_MS + up, kind="up"))
        if up is not None and end is not None:
            self.bill(node, up, end)
        if seen is not None:
            self.record(NodeSeen(node=node.name, worker="0"), seen)
        return node

    def bill(self, node: Node, start: int, end: int) -> None:
        rate = node.micro_usd_per_hour
        self.session.add(
            BillingInterval(
                node_id=node.id,
                start_ms=START_MS + start,
                end_ms=START_MS + end,
                micro_usd_per_hour=rate,
                micro_usd=interval_micro_usd(start, end, rate),
                basis="assumed",
            )
        )

    def record(self, event: ProgressEvent, at: int, lineage: int = 0) -> None:
        self.seq += 1
        self.session.add(
            ProgressRow(
                run_id=self.run.id,
                source="trainer",
                lineage=lineage,
                seq=self.seq,
                at_ms=START_MS + at,
                kind=event.KIND,
                event=asdict(event),
            )
        )

    def started(self, at: int = 0, iteration: int = 0, lineage: int = 0) -> None:
        event = EngineStarted(iteration=iteration, config_digest="c" * 8, devices="2 CPU cores", versions={})
        self.record(event, at, lineage)

    def evaluated(
        self,
        iteration: int,
        score: float,
        at: int,
        lineage: int = 0,
        pictures: str | None = None,
        more: Mapping[str, float] | None = None,
    ) -> None:
        metrics = {"exact_match": score, **(more or {})}
        event = Evaluated(iteration=iteration, metrics=metrics, prompts=96, pictures=pictures)
        self.record(event, at, lineage)

    def trained(self, iteration: int, at: int, lineage: int = 0, explored: int = 0) -> None:
        event = IterationDone(
            iteration=iteration,
            reward_mean=0.5,
            reward_std=0.1,
            group_std_mean=0.1,
            explored=explored,
            manifest_digest="m",
            phase_ms={},
            wall_seconds=1.0,
            health={},
        )
        self.record(event, at, lineage)

    def ranked(self, iteration: int, at: int, *, explores_on: bool = True, corrected: bool = True) -> None:
        event = Ranked(
            iteration=iteration,
            profile="full",
            control=12,
            explores_on=explores_on,
            spearman=0.9,
            kendall=0.8,
            low=0.86,
            high=0.93,
            corrected=corrected,
            batches=iteration,
            prompts=12,
            left_out=0,
            pairs=60,
            selection_gain=2.4,
            predicted_gain=1.94,
            realised_gain=2.04,
            refused_stale=0,
            refused_sampler=0,
        )
        self.record(event, at)

    def used(self, node: Node, start: int, end: int, lineage: int = 0, **phase_ms: int) -> None:
        event = NodeUsage(node=node.name, from_ms=START_MS + start, to_ms=START_MS + end, phase_ms=phase_ms)
        self.record(event, end, lineage)

    def worked(self, node: Node, worker: str, *spans: tuple[str, int, int]) -> None:
        """Add the phases of a worker."""
        whole = tuple((worker, phase, START_MS + start, START_MS + end) for phase, start, end in spans)
        first, last = spans[0][1], spans[-1][2]
        event = NodeUsage(node=node.name, from_ms=START_MS + first, to_ms=START_MS + last, phase_ms={}, spans=whole)
        self.record(event, last)

    def regrouped(
        self, node: Node, *groups: Sequence[int], at: int, reason: str = "a worker came", lineage: int = 0
    ) -> None:
        """Record that the node's workers share images in these groups from now on. `groups`: places of the workers."""
        named = tuple(tuple(f"{node.name}/{place}" for place in group) for group in groups)
        self.record(Regrouped(node=node.name, groups=named, reason=reason), at, lineage)

    def preempted(
        self, node: Node, at: int, *, signal: str | None = "SIGKILL", noticed: int | None = None, lost_steps: int = 0
    ) -> None:
        noticed_ms = None if noticed is None else START_MS + noticed
        self.session.add(
            Preemption(node_id=node.id, at_ms=START_MS + at, noticed_ms=noticed_ms, signal=signal, evidence="reclaimed")
        )
        if lost_steps:
            missed = NodeMissed(node=node.name, reason="reclaimed", lost_steps=lost_steps, fenced_requests=1)
            self.record(missed, at)

    def at_wall(self, row: RunStatus | StartCommand) -> RunStatus | StartCommand:
        """Set the row's wall time: the run's clock ran evenly."""
        row.wall_ms = START_MS + round((row.at_ms - START_MS) / self.run.clock_factor)
        return row

    def status(self, status: str, at: int, reason: str = "") -> None:
        self.session.add(self.at_wall(RunStatus(run_id=self.run.id, at_ms=START_MS + at, status=status, reason=reason)))


def a_session(path: Path | None = None) -> Session:
    """Open an empty ledger, in memory unless a path is given."""
    engine = create_engine(f"sqlite:///{path}" if path else "sqlite://")
    Base.metadata.create_all(engine)
    return Session(engine)


JOB = {
    "algorithm": {"prompts_per_batch": 2, "images_per_prompt": 5},
    "sampler": {"steps": 10},
    "target": {"metric": "exact_match", "value": 0.8, "evaluations": 3},
}


def a_run(
    session: Session,
    name: str = "demo",
    *,
    target: float | None = 0.8,
    job: Mapping[str, Any] = JOB,
    folder: str = "nowhere",
    factor: float = 60.0,
) -> MadeLedger:
    run = Run(
        name=name,
        created_ms=START_MS,
        job_yaml="",
        job=dict(job),
        plan={},
        job_digest="sha256:" + "0f" * 32,
        code_version="0.1.0+gabcdef0",
        lock_digest="sha256:" + "1e" * 32,
        seed=7,
        infra="local",
        money_basis="assumed",
        clock_origin_ms=START_MS,
        clock_factor=factor,
        max_total_micro_usd=None,
        max_hourly_micro_usd=None,
        target_metric="exact_match",
        target_value=target,
        folder=folder,
        coordinator_port=0,
        token="secret-token",
    )
    session.add(run)
    session.flush()
    return MadeLedger(session=session, run=run)


def a_long_run(
    session: Session, name: str = "digits-ocr", folder: str = "nowhere", pictures: Sequence[str] = ()
) -> Run:
    """Create a run of four hours with a trainer, two spot slots and three preemptions, one during a cold start."""
    made = a_run(session, name, folder=folder)
    made.status("running", 0)
    made.started(2 * MINUTE_MS)
    minutes = {  # billed from, billed to, first seen, $/h x 10^6
        ("trainer", 1): (0, 240, 4, 804_800, "us-east-1a"),
        ("spot-0", 1): (2, 71, 9, 292_300, "us-east-1a"),
        ("spot-0", 2): (76, 240, 83, 310_400, "us-east-1b"),
        ("spot-1", 1): (2, 118, 8, 268_000, "us-central1-a"),
        ("spot-1", 2): (124, 129, None, 268_000, "us-central1-a"),
        ("spot-1", 3): (140, 240, 147, 281_500, "us-central1-b"),
    }
    nodes = {}
    for (slot, generation), (up, end, seen, rate, zone) in minutes.items():
        node = nodes[slot, generation] = made.node(
            slot,
            generation,
            market="on_demand" if slot == "trainer" else "spot",
            rate=rate,
            on_demand=804_800,
            up=up * MINUTE_MS,
            end=end * MINUTE_MS,
            seen=None if seen is None else seen * MINUTE_MS,
            zone=zone,
            price_source="catalogs/gcp.csv" if "central" in zone else "catalogs/aws.csv",
        )
        for minute in range(seen or end, end - 1, 2):
            window = (minute * MINUTE_MS, (minute + 2) * MINUTE_MS)
            if slot == "trainer":
                made.used(node, *window, training=74_000, rollout=16_000, evaluation=9_000, checkpoint=4_000)
            else:
                made.used(node, *window, rollout=70_000, exploration=34_000, sync=5_000)
    made.preempted(nodes["spot-0", 1], 71 * MINUTE_MS, noticed=69 * MINUTE_MS)
    made.preempted(nodes["spot-1", 1], 118 * MINUTE_MS, signal="SIGSTOP", lost_steps=412)
    made.preempted(nodes["spot-1", 2], 129 * MINUTE_MS)
    scores = [0.470, 0.500, 0.531, 0.594, 0.583, 0.656, 0.688, 0.719, 0.708, 0.771, 0.812, 0.792, 0.823, 0.844, 0.833]
    for number, score in enumerate(scores):
        image_file = {0: pictures[0], 14: pictures[-1]}.get(number) if pictures else None
        made.evaluated(3 * number, score, (6 + 16 * number) * MINUTE_MS, pictures=image_file)
    for iteration in range(42):
        made.trained(iteration, (11 + round(5.3 * iteration)) * MINUTE_MS, explored=40)
    made.status("finished", 240 * MINUTE_MS, "target reached")
    session.flush()
    return made.run
