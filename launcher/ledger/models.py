"""The ledger's tables: facts about runs, nodes, money and progress. Rows are appended; what changes is a new row.

Money is integer micro-dollars, time integer milliseconds UTC on the run's clock, so that sums are exact.
"""

from typing import Any, ClassVar

from sqlalchemy import JSON, BigInteger, CheckConstraint, ForeignKey, Integer, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column


class Base(DeclarativeBase):
    type_annotation_map: ClassVar = {dict[str, Any]: JSON, int: BigInteger().with_variant(Integer, "sqlite")}


class Run(Base):
    """One `spotrl launch`. What it was asked to do never changes; how it goes is in `run_status`."""

    __tablename__ = "run"
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    created_ms: Mapped[int]
    job_yaml: Mapped[str]
    job: Mapped[dict[str, Any]]
    """The checked job, with every default filled in (launcher/job.py)."""
    plan: Mapped[dict[str, Any]]
    """What we decided to buy, slot by slot (launcher/placement/plan.py): what the controller keeps alive."""
    job_digest: Mapped[str]
    code_version: Mapped[str]
    lock_digest: Mapped[str]
    seed: Mapped[int]
    infra: Mapped[str]
    money_basis: Mapped[str]
    """assumed (local infra), metered or billed."""
    clock_origin_ms: Mapped[int]
    clock_factor: Mapped[float]
    max_total_micro_usd: Mapped[int | None]
    max_hourly_micro_usd: Mapped[int | None]
    target_metric: Mapped[str | None]
    target_value: Mapped[float | None]
    folder: Mapped[str]
    workdir: Mapped[str | None]
    """Where the job file was: the user's reward module and prompt file are found there."""
    deadline_ms: Mapped[int | None]
    """When the run must end (run's clock), reward or not."""
    coordinator_port: Mapped[int]
    token: Mapped[str]


class RunStatus(Base):
    """A step of a run's life; the newest row counts.

    planned -> running -> finished, or -> stopping (a person asked) or draining (the budget is used up) -> stopped,
    or -> failed. A run that was stopped or failed is planned again by `spotrl resume`.
    """

    __tablename__ = "run_status"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    at_ms: Mapped[int]
    status: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")


class Removal(Base):
    """The run's files were deleted from this machine (`spotrl rm`). Its other rows stay: the money was spent."""

    __tablename__ = "removal"
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    at_wall_ms: Mapped[int]


class ControllerLease(Base):
    """Who may control a run. One row a run, taken over only when it has expired (wall time) or its holder is dead."""

    __tablename__ = "controller_lease"
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), primary_key=True)
    holder: Mapped[str]
    pid: Mapped[int]
    epoch: Mapped[int]
    expires_wall_ms: Mapped[int]


class Node(Base):
    """One node we asked for, written before the cloud was asked: the intent, and the offer it was bought from."""

    __tablename__ = "node"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    name: Mapped[str] = mapped_column(unique=True)
    slot: Mapped[str]
    """Which place it fills, e.g. `trainer`, `spot-0`; a successor has the same slot, the next generation."""
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
    """Worst case held against the budget until the node's first billing fact."""


class NodeEvent(Base):
    """Something that happened to a node, with the evidence for it.

    requested (the cloud was asked), up (it is paid for from here on), ready (its workers called in), notice,
    releasing (we asked for its end); and its end, once: gone, released, denied or no_capacity.
    """

    __tablename__ = "node_event"
    id: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[int] = mapped_column(ForeignKey("node.id"), index=True)
    at_ms: Mapped[int]
    kind: Mapped[str]
    evidence: Mapped[str] = mapped_column(default="")


class BillingInterval(Base):
    """A stretch of time that one node was paid for, closed. Its cost was rounded once."""

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
    """What a node costs from `at_ms` on, where that differs from the offer in `node`: appended, the newest counts.

    The first row says what was really bought, if that was another zone or type; later rows are changed spot prices.
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
    """Something that was paid for beside a machine: a disk, an address, traffic. Written when it ended."""

    __tablename__ = "side_cost"
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    node_id: Mapped[int | None] = mapped_column(ForeignKey("node.id"))
    kind: Mapped[str]
    amount: Mapped[str]
    start_ms: Mapped[int]
    end_ms: Mapped[int]
    micro_usd: Mapped[int | None] = mapped_column(CheckConstraint("micro_usd >= 0"))
    """None: it is paid for, and nobody knows what."""
    source: Mapped[str]


class Preemption(Base):
    """The cloud took a node back. What it cost is worked out from the other tables when it is asked for."""

    __tablename__ = "preemption"
    id: Mapped[int] = mapped_column(primary_key=True)
    node_id: Mapped[int] = mapped_column(ForeignKey("node.id"), unique=True)
    at_ms: Mapped[int]
    noticed_ms: Mapped[int | None]
    """When the notice was seen; None: it came without one."""
    signal: Mapped[str | None]
    evidence: Mapped[str]


class ProgressRow(Base):
    """One progress event of the engine; `(run, source, lineage, seq)` is kept once, however often it is read."""

    __tablename__ = "progress"
    __table_args__ = (UniqueConstraint("run_id", "source", "lineage", "seq"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run_id: Mapped[int] = mapped_column(ForeignKey("run.id"), index=True)
    source: Mapped[str]
    lineage: Mapped[int]
    seq: Mapped[int]
    at_ms: Mapped[int]
    kind: Mapped[str] = mapped_column(index=True)
    event: Mapped[dict[str, Any]]


class PriceRow(Base):
    """A price that a cloud said (launcher/market/prices.py). Wall time; the same price said again is the same row.

    Only `last_seen_ms` moves, and only forward: that a price still holds is worth knowing, not worth a row a poll. The
    constraint that keeps a row single is also the index by which the history of a zone is read.
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
    """Since when the cloud says it holds."""
    observed_ms: Mapped[int]
    """When we first heard it."""
    last_seen_ms: Mapped[int]
    """When we last heard it."""


class CapacityAdviceRow(Base):
    """What a cloud estimated of its spot capacity in one zone (launcher/market/prices.py). Wall time."""

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
