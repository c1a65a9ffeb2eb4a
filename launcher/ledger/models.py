"""Tables of the ledger: facts about runs, nodes, money and progress. Rows are appended; a change is a new row.

Money is integer micro-dollars, time integer milliseconds UTC on the run's clock, so sums are exact.
"""

import time
from pathlib import Path
from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Index, Integer, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from engine.clock import Clock, ScaledClock
from engine.config import ModelConfig
from engine.work_clock import WorkClock
from launcher.market.side_prices import DISK_GIB

LOCAL = "local"
"""`Run.infra` of a run on this machine."""


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


class Base(DeclarativeBase):
    type_annotation_map: ClassVar = {dict[str, Any]: JSON, int: BigInteger().with_variant(Integer, "sqlite")}


class Run(Base):
    """A run, created by one `spotrl launch`. Only `spotrl resume` changes limits. The status is in `run_status`."""

    __tablename__ = "run"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_ms: Mapped[int]
    job_yaml: Mapped[str]
    job: Mapped[dict[str, Any]]
    """The checked job, with every default filled in (launcher/job/schema.py)."""
    plan: Mapped[dict[str, Any]]
    """The nodes to buy, slot by slot (launcher/placement/plan.py). The controller keeps the slots filled."""
    job_digest: Mapped[str]
    code_version: Mapped[str]
    lock_digest: Mapped[str]
    seed: Mapped[int]
    infra: Mapped[str]
    money_basis: Mapped[str]
    """Where the prices of the run's charges come from: assumed (local infra) or metered; simulated in a replay.

    An imported bill (`BillLine`) never changes it: limits and guards rest on what was metered.
    """
    clock_origin_ms: Mapped[int]
    clock_factor: Mapped[float]
    max_total_micro_usd: Mapped[int | None]
    max_hourly_micro_usd: Mapped[int | None]
    max_judges_micro_usd: Mapped[int | None]
    """Budget of the paid judges, raised by `spotrl resume`. None: as in the job."""
    target_metric: Mapped[str | None]
    target_value: Mapped[float | None]
    folder: Mapped[str]
    workdir: Mapped[str | None]
    """Folder of the job file. The user's reward module and prompt file are looked up there."""
    deadline_ms: Mapped[int | None]
    """Time by which the run should be done (run's clock)."""
    ends_ms: Mapped[int | None]
    """Time at which the run must end (run's clock), done or not. None in rows of older versions: at the deadline."""
    coordinator_port: Mapped[int]
    token: Mapped[str]

    @property
    def model(self) -> ModelConfig:
        """Return the model of the run's job, with the whole path of its folder on this machine."""
        return self.with_whole_path(ModelConfig.model_validate(self.job.get("model") or {}))

    def with_whole_path(self, model: ModelConfig) -> ModelConfig:
        """Return a model with whole paths of its folder and its LoRA: relative ones begin at the job file's folder."""
        if self.workdir is None:
            return model
        paths = {"path": model.path, "lora": model.lora}
        return model.model_copy(
            update={field: str(Path(self.workdir) / path) for field, path in paths.items() if path is not None}
        )

    @property
    def clock(self) -> Clock:
        """Return the run's clock. On the local infra it moves with the run's work (engine/work_clock.py)."""
        return self.work_clock or ScaledClock(origin_ms=self.clock_origin_ms, factor=self.clock_factor)

    @property
    def work_clock(self) -> WorkClock | None:
        """Return the clock of a run on the local infra, else None."""
        if self.infra != LOCAL:
            return None
        path = Path(self.folder) / "clock"
        return WorkClock(path=path, origin_ms=self.clock_origin_ms, factor=self.clock_factor)

    def wall_seconds(self, end: "RunStatus | None", now_ms: int) -> float:
        """Return the wall seconds from the launch to the last status, or until now.

        `now_ms`: on the run's clock, for runs on clouds, where it is the wall clock.
        """
        now = wall_ms() if self.infra == LOCAL else now_ms
        return ((now if end is None else self.wall_ms(end)) - self.clock_origin_ms) / 1000

    def wall_ms(self, row: "RunStatus | NodeEvent | StartCommand") -> int:
        """Return the wall time of a row of the run (ms UTC).

        Rows of older versions have none: the clock of their runs ran evenly.
        """
        if self.infra == LOCAL and row.wall_ms is not None:
            return row.wall_ms
        return self.clock_origin_ms + round((row.at_ms - self.clock_origin_ms) / self.clock_factor)


class RunStatus(Base):
    """A status of a run; the newest row counts.

    planned -> running -> finished, or -> stopping (on request) or draining (the budget is used up) -> stopped, or ->
    failed. `spotrl resume` sets a stopped or failed run back to planned.
    """

    __tablename__ = "run_status"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    at_ms: Mapped[int]
    status: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")
    wall_ms: Mapped[int | None] = mapped_column(default=wall_ms)


class StartCommand(Base):
    """A command that started or continued a run, without secrets, and the git commits of the code behind it.

    The first row is the launch, each later row a resume. Without git, a commit is empty.
    """

    __tablename__ = "start_command"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    at_ms: Mapped[int]
    command: Mapped[str]
    code_commit: Mapped[str]
    workdir_commit: Mapped[str]
    wall_ms: Mapped[int | None] = mapped_column(default=wall_ms)


class Removal(Base):
    """Deletion of the run's files from this machine (`spotrl rm`).

    The run's other rows stay, because the money was spent.
    """

    __tablename__ = "removal"
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    at_wall_ms: Mapped[int]


class BucketSize(Base):
    """The size of a run's folder in a bucket, counted after the run's end. Appended; the newest of a folder counts.

    `spotrl rm` counts again. A run may be resumed after a count.
    """

    __tablename__ = "bucket_size"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    at_wall_ms: Mapped[int]
    url: Mapped[str]
    bytes: Mapped[int | None] = mapped_column(CheckConstraint("bytes >= 0"))
    """None: unknown; `problem` says why."""
    is_whole: Mapped[bool]
    """False: the folder held at least `bytes`."""
    region: Mapped[str]
    """Region of the bucket; empty: unknown."""
    problem: Mapped[str]


class ControllerLease(Base):
    """Right of one process to control a run.

    Another process takes the lease over only after expiry (wall time), or if the holder is dead.
    """

    __tablename__ = "controller_lease"
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    holder: Mapped[str]
    pid: Mapped[int]
    epoch: Mapped[int]
    expires_wall_ms: Mapped[int]


class TroubleRow(Base):
    """The errors of the controller's passes from `at_ms` on, in words; the newest row counts.

    An empty text: passes succeed again. A run without rows never was in trouble.
    """

    __tablename__ = "trouble"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    at_ms: Mapped[int]
    text: Mapped[str]
    wall_ms: Mapped[int | None] = mapped_column(default=wall_ms)


class SpentMark(Base):
    """Money that the run had spent by a moment, as the bucket knows and a ledger from a backup does not.

    The part that the nodes in the ledger do not explain is a cost beside them (accounting.py).
    """

    __tablename__ = "spent_mark"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    at_ms: Mapped[int]
    micro_usd: Mapped[int]
    wall_ms: Mapped[int | None] = mapped_column(default=wall_ms)


class KeptView(Base):
    """The view of a run that is over (launcher/runs/views.py), kept because computing it reads all of its events.

    A copy, not a fact. `mark`: what the view was made from. The view is made again when that differs.
    """

    __tablename__ = "kept_view"
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    mark: Mapped[str]
    view: Mapped[dict[str, Any]]


class NoticeRow(Base):
    """A message about a run to its webhook (launcher/notifications). One row per cause.

    Neither sent nor failed: the controller sends it. `failure`: why the webhook refused it for good.
    """

    __tablename__ = "notice"
    __table_args__ = (UniqueConstraint("run_id", "key"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"))
    key: Mapped[str]
    at_ms: Mapped[int]
    text: Mapped[str]
    sent_wall_ms: Mapped[int | None]
    failure: Mapped[str] = mapped_column(default="")


class Node(Base):
    """A requested node, written before the call to the cloud: the intent, and the offer behind the purchase."""

    __tablename__ = "node"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    name: Mapped[str] = mapped_column(unique=True)
    slot: Mapped[str]
    """The node's slot, e.g. `trainer`, `spot-0`; a successor has the same slot and the next generation."""
    generation: Mapped[int]
    role: Mapped[str]
    market: Mapped[str]
    cloud: Mapped[str]
    region: Mapped[str]
    zone: Mapped[str]
    instance_type: Mapped[str]
    accelerator: Mapped[str]
    gpus: Mapped[int]
    micro_usd_per_hour: Mapped[int] = mapped_column(CheckConstraint("micro_usd_per_hour >= 0"))
    on_demand_micro_usd_per_hour: Mapped[int] = mapped_column(CheckConstraint("on_demand_micro_usd_per_hour >= 0"))
    price_source: Mapped[str]
    price_observed_at: Mapped[str]
    requested_ms: Mapped[int]
    reserved_micro_usd: Mapped[int]
    """Worst case reserved in the budget until the node's first billing fact."""
    disk_gib: Mapped[int] = mapped_column(default=DISK_GIB, server_default=str(DISK_GIB))
    """Size of the boot disk on a real cloud."""


STAND_IN = "stand_in"
"""Kind of the event of a node that replaces missing spot. It comes with the intent to buy, and says why."""


MOVE = "move"
"""Kind of the event of a trainer that is bought in another region, which has spot. It says why the run goes there."""


class NodeEvent(Base):
    """An event of a node, with its evidence.

    stand_in (the node replaces missing spot; the evidence says why), move (the run goes to its region; likewise),
    found (the ledger did not know the node: it was restored from a backup), requested (the cloud was called), up
    (billing starts), ready (its workers called in), notice, promoted (it takes the role of the trainer), incomplete
    (the node's trainer never was whole; the evidence says why), releasing (the launcher requested termination),
    instance_ended (the VM has ended, and a disk is left).
    The last event: gone, released, denied or no_capacity. A node whose VM was found alive after that has `up` again,
    and another last event.
    """

    __tablename__ = "node_event"
    id: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[int] = mapped_column(ForeignKey("node.id"), index=True)
    at_ms: Mapped[int]
    kind: Mapped[str]
    evidence: Mapped[str] = mapped_column(default="")
    wall_ms: Mapped[int | None] = mapped_column(default=wall_ms)


class BillingInterval(Base):
    """A closed stretch of paid time of one node. The cost was rounded once."""

    __tablename__ = "billing_interval"
    __table_args__ = (UniqueConstraint("node_id", "start_ms"), CheckConstraint("end_ms >= start_ms"))
    id: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[int] = mapped_column(ForeignKey("node.id"), index=True)
    start_ms: Mapped[int]
    end_ms: Mapped[int]
    micro_usd_per_hour: Mapped[int]
    micro_usd: Mapped[int] = mapped_column(CheckConstraint("micro_usd >= 0"))
    basis: Mapped[str]


class NodePrice(Base):
    """Price of a node from `at_ms` on, if the price differs from the offer in `node`. Appended; the newest counts.

    The first row records the real purchase, if the zone or type differs from the offer. Later rows are changed spot
    prices.
    """

    __tablename__ = "node_price"
    id: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[int] = mapped_column(ForeignKey("node.id"), index=True)
    at_ms: Mapped[int]
    zone: Mapped[str]
    instance_type: Mapped[str]
    micro_usd_per_hour: Mapped[int] = mapped_column(CheckConstraint("micro_usd_per_hour >= 0"))
    price_source: Mapped[str]
    price_observed_at: Mapped[str]


class SideCost(Base):
    """A cost beside a node's instance: a disk, an address, traffic. Written when the cost ended."""

    __tablename__ = "side_cost"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    node_id: Mapped[int | None] = mapped_column(ForeignKey("node.id"))
    kind: Mapped[str]
    amount: Mapped[str]
    start_ms: Mapped[int]
    end_ms: Mapped[int]
    micro_usd: Mapped[int | None] = mapped_column(CheckConstraint("micro_usd >= 0"))
    """None: the cost exists, but its price is unknown."""
    source: Mapped[str]


class Preemption(Base):
    """Preemption of a node by the cloud. The cost of a preemption is computed from the other tables on request."""

    __tablename__ = "preemption"
    id: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[int] = mapped_column(ForeignKey("node.id"), unique=True)
    at_ms: Mapped[int]
    noticed_ms: Mapped[int | None]
    """Time at which the launcher learned of the notice; None: no notice came."""
    signal: Mapped[str | None]
    evidence: Mapped[str]


class ProgressRow(Base):
    """A progress event of the engine. `(run, source, lineage, seq)` is kept once, for any number of reads."""

    __tablename__ = "progress"
    __table_args__ = (
        UniqueConstraint("run_id", "source", "lineage", "seq"),
        Index("ix_progress_run_id_kind", "run_id", "kind"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    source: Mapped[str]
    lineage: Mapped[int]
    seq: Mapped[int]
    at_ms: Mapped[int]
    kind: Mapped[str]
    event: Mapped[dict[str, Any]]


class PriceRow(Base):
    """A price reported by a cloud (launcher/market/prices.py). All times are wall time.

    A query that returns a known price adds no row, but raises `last_seen_ms` of the price's row. No other column ever
    changes. The unique constraint is also the index for reading the price history of a zone.
    """

    __tablename__ = "price_point"
    __table_args__ = (
        UniqueConstraint(
            "zone",
            "region",
            "instance_type",
            "market",
            "source",
            "cloud",
            "effective_ms",
            "micro_usd_per_hour",
            name="one_price",
        ),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    cloud: Mapped[str]
    region: Mapped[str]
    zone: Mapped[str]
    """Empty for a price of the whole region."""
    zone_id: Mapped[str] = mapped_column(index=True)
    instance_type: Mapped[str]
    market: Mapped[str]
    micro_usd_per_hour: Mapped[int] = mapped_column(CheckConstraint("micro_usd_per_hour > 0"))
    currency: Mapped[str]
    source: Mapped[str]
    source_id: Mapped[str]
    effective_ms: Mapped[int]
    """Time from which the price holds, as reported by the cloud."""
    observed_ms: Mapped[int]
    """Time of the first query that returned the price."""
    last_seen_ms: Mapped[int]
    """Time of the last query that returned the price."""


class CapacityAdviceRow(Base):
    """A cloud's estimate of its spot capacity in one zone (launcher/market/prices.py). All times are wall time."""

    __tablename__ = "capacity_advice"
    __table_args__ = (
        UniqueConstraint("zone", "instance_type", "kind", "from_ms", "until_ms", "value", "cloud", name="one_advice"),
    )
    id: Mapped[int] = mapped_column(primary_key=True)
    cloud: Mapped[str]
    region: Mapped[str]
    zone: Mapped[str]
    instance_type: Mapped[str]
    kind: Mapped[str]
    value: Mapped[float]
    from_ms: Mapped[int]
    until_ms: Mapped[int]
    observed_ms: Mapped[int]
    source: Mapped[str]


class BillLine(Base):
    """A line of a cloud's own bill about one of our nodes or runs (launcher/bill). Guards never read it.

    `identity`: the same for the same row of the same bill, whatever file it came in. `cell`: what an AWS row is for;
    it stays when AWS writes a month again, where rows get new identities. Empty on Google Cloud, whose rows stay.
    """

    __tablename__ = "bill_line"
    __table_args__ = (Index("ix_bill_line_month", "cloud", "payer", "month"), CheckConstraint("copies >= 1"))
    id: Mapped[int] = mapped_column(primary_key=True)
    identity: Mapped[str] = mapped_column(unique=True)
    cell: Mapped[str]
    cloud: Mapped[str]
    payer: Mapped[str]
    """Payer account (AWS) or billing account (Google Cloud)."""
    month: Mapped[str]
    """Month of the bill, like 2026-11."""
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    node_id: Mapped[int | None] = mapped_column(ForeignKey("node.id"))
    """None: a resource with the run's label that is no node of the ledger."""
    resource: Mapped[str]
    kind: Mapped[str]
    start_ms: Mapped[int]
    end_ms: Mapped[int]
    pico_usd: Mapped[int]
    """Dollars x 10^12."""
    hours: Mapped[float | None]
    """Hours of the instance, where the bill names them."""
    copies: Mapped[int]
    """Equal rows in one file."""
