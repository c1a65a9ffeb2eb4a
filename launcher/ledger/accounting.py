"""Compute the cost of a run from the facts in the ledger, split by role, market, node and phase.

billing intervals (+ the open interval of a running node) -> charges -> phases of each charge -> sums

The promise: integers only. A charge is rounded once and shared by largest remainder, so every split adds up to the same
total to the micro-dollar. `RunCosts` raises ArithmeticError otherwise.

The engine's `node_usage` events report the work of a node. Usage windows may overlap (a step redone under a newer
lineage) or claim more time than the charge has. Neither changes a sum, because the charge is the amount that is shared
out.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from engine.events import Judged, NodeSeen, NodeUsage, Phase
from engine.reward_config import RewardConfig
from launcher.decide.facts import INSTANCE_ENDED, INSTANCE_ENDS, PROMOTED, promotion_of
from launcher.ledger.billing import interval_micro_usd, minimum_billed_ms, side_costs, stretches
from launcher.ledger.models import (
    LOCAL,
    BillingInterval,
    Node,
    NodeEvent,
    NodePrice,
    ProgressRow,
    Run,
    SideCost,
    SpentMark,
)
from launcher.ledger.store import NODE_IDS_OF_RUN, nodes_of
from launcher.market.side_prices import ADDRESS

# --- pure arithmetic ----------------------------------------------------------------------------------


def share_out(total: int, weights: Mapping[str, int], otherwise: str = Phase.IDLE.value) -> dict[str, int]:
    """Divide `total` in proportion to `weights`, in whole units that sum to `total` exactly (largest remainder).

    Ties go to the key that sorts first. When every weight is 0, all of `total` goes to the key `otherwise`.
    """
    if total < 0 or any(weight < 0 for weight in weights.values()):
        raise ValueError(f"cannot share out {total} by {dict(weights)}: amounts and weights are 0 or more")
    whole = sum(weights.values())
    if whole == 0:
        return {**dict.fromkeys(weights, 0), otherwise: total}
    shares = {key: total * weight // whole for key, weight in weights.items()}
    left = total - sum(shares.values())
    for key in sorted(weights, key=lambda key: (-(total * weights[key] % whole), key))[:left]:
        shares[key] += 1
    return shares


def phases_of(interval_ms: int, usage: Mapping[str, int]) -> dict[str, int]:
    """Split `interval_ms` of a node into the reported phases and idle. The phases sum to the interval exactly.

    A report of more time than the interval is scaled down in proportion. Time reported as idle is idle.
    """
    reported = {phase: ms for phase, ms in usage.items() if ms > 0}
    idle = reported.pop(Phase.IDLE.value, 0)
    busy = sum(reported.values())
    if busy + idle > interval_ms:
        return share_out(interval_ms, reported | {Phase.IDLE.value: idle})
    return reported | {Phase.IDLE.value: interval_ms - busy}


# --- values -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """A paid stretch of a node's time. `closed` is False while the node still runs."""

    start_ms: int
    end_ms: int
    micro_usd_per_hour: int
    micro_usd: int
    closed: bool

    @property
    def ms(self) -> int:
        return self.end_ms - self.start_ms

    def until(self, at_ms: int) -> int:
        """Return the micro-dollars of this charge spent by a moment. Never falls as time goes on."""
        if at_ms >= self.end_ms:
            return self.micro_usd
        return 0 if at_ms <= self.start_ms else self.micro_usd * (at_ms - self.start_ms) // self.ms


@dataclass(frozen=True, kw_only=True, slots=True)
class UnpaidLife:
    """A time in which a node's VM ran, before its bill is written. `ended`: the VM has ended."""

    start_ms: int
    end_ms: int
    ended: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Usage:
    """A usage window reported by the engine: node-milliseconds by phase between two moments."""

    lineage: int
    from_ms: int
    to_ms: int
    phase_ms: Mapping[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenRole:
    """The role of the trainer, taken by a node at `at_ms`. `ready_ms`: its new processes called in; None: not yet."""

    slot: str
    generation: int
    at_ms: int
    ready_ms: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """Cost of one node, and its time by phase. `seen_ms`: the first call of a worker, which ends the cold start.

    `slot`, `generation` and `role`: as it was bought. `taken`: the role that it took later.
    """

    node: str
    slot: str
    generation: int
    role: str
    market: str
    zone: str
    instance_type: str
    micro_usd_per_hour: int
    """The last price paid."""
    on_demand_micro_usd_per_hour: int
    cloud: str
    region: str
    charges: tuple[Charge, ...]
    seen_ms: int | None
    phase_ms: Mapping[str, int]
    phase_micro_usd: Mapping[str, int]
    taken: TakenRole | None = None

    @property
    def by_role(self) -> dict[str, int]:
        """Return the cost by role. The role changes at the moment of a promotion."""
        if self.taken is None:
            return {self.role: self.micro_usd}
        before = sum(charge.until(self.taken.at_ms) for charge in self.charges)
        return {self.role: before, "trainer": self.micro_usd - before}

    @property
    def micro_usd(self) -> int:
        return sum(charge.micro_usd for charge in self.charges)

    @property
    def ms(self) -> int:
        return sum(charge.ms for charge in self.charges)

    @property
    def start_ms(self) -> int | None:
        return min((charge.start_ms for charge in self.charges), default=None)

    @property
    def end_ms(self) -> int | None:
        """Return the end of the last charge. None while the node runs, or if the node never ran."""
        if not self.charges or not all(charge.closed for charge in self.charges):
            return None
        return max(charge.end_ms for charge in self.charges)

    @property
    def on_demand_micro_usd(self) -> int:
        """Return the cost of the same node-milliseconds at the on-demand price of the same offer."""
        return on_demand_micro_usd(self.charges, self.on_demand_micro_usd_per_hour)


@dataclass(frozen=True, kw_only=True)
class RunCosts:
    """Cost of a run. Every split adds up to `total`. Raises ArithmeticError if a split does not."""

    nodes: tuple[NodeCost, ...]

    def __post_init__(self) -> None:
        splits = {
            "role": self.by_role,
            "market": self.by_market,
            "place": self.by_place,
            "node": self.by_node,
            "phase": self.by_phase,
        }
        wrong = {name: sum(split.values()) for name, split in splits.items() if sum(split.values()) != self.total}
        if wrong:
            raise ArithmeticError(f"the run cost {self.total} micro-dollars, but its splits add up to {wrong}")

    @cached_property
    def total(self) -> int:
        return sum(node.micro_usd for node in self.nodes)

    @cached_property
    def by_role(self) -> dict[str, int]:
        return _summed(item for node in self.nodes for item in node.by_role.items())

    @cached_property
    def by_market(self) -> dict[str, int]:
        return _summed((node.market, node.micro_usd) for node in self.nodes)

    @cached_property
    def by_place(self) -> dict[str, int]:
        """Cost by cloud and region. A run that failed over has several entries."""
        return _summed((f"{node.cloud} {node.region}", node.micro_usd) for node in self.nodes)

    @cached_property
    def by_node(self) -> dict[str, int]:
        return _summed((node.node, node.micro_usd) for node in self.nodes)

    @cached_property
    def by_phase(self) -> dict[str, int]:
        return _summed(item for node in self.nodes for item in node.phase_micro_usd.items())

    @cached_property
    def phase_ms(self) -> dict[str, int]:
        """Node-milliseconds by phase."""
        return _summed(item for node in self.nodes for item in node.phase_ms.items())

    def until(self, at_ms: int) -> int:
        """Return the micro-dollars spent up to a moment."""
        return sum(charge.until(at_ms) for node in self.nodes for charge in node.charges)


def _summed(items: Iterable[tuple[str, int]]) -> dict[str, int]:
    sums: defaultdict[str, int] = defaultdict(int)
    for key, amount in items:
        sums[key] += amount
    return dict(sums)


# --- phases of a node ---------------------------------------------------------------------------------


def phases_of_charge(charge: Charge, seen_ms: int | None, usages: Sequence[Usage]) -> dict[str, int]:
    """Split the time of one charge into phases; the phases sum to the charge's milliseconds exactly.

    The cold start lasts from the start of billing until the node is first seen, or to the end if the node was never
    seen. After the cold start, the usage windows of the engine count. A window carries the time of the *report*. Work
    is reported when done, so the work may have begun before the window, and the last window of a node ends after the
    node did. The bounds of the windows therefore decide only which report counts at a moment: the report of the newest
    lineage, and within a lineage the report whose window ends last. The length of the charge limits the sum of all
    phases. Time covered by no window is idle.
    """
    work_from = min(charge.end_ms, max(charge.start_ms, charge.end_ms if seen_ms is None else seen_ms))
    reported_ms: defaultdict[str, int] = defaultdict(int)
    free = [(work_from, charge.end_ms)]
    for usage in sorted(usages, key=lambda usage: (usage.lineage, usage.to_ms, usage.from_ms), reverse=True):
        start, end = max(work_from, usage.from_ms), min(charge.end_ms, usage.to_ms)
        claimed = sum(max(0, min(until, end) - max(since, start)) for since, until in free)
        if claimed == 0:
            continue
        for phase, ms in usage.phase_ms.items():
            reported_ms[phase] += ms * claimed // (end - start)
        free = [
            piece
            for since, until in free
            for piece in ((since, min(until, start)), (max(since, end), until))
            if piece[0] < piece[1]
        ]
    split = phases_of(charge.end_ms - work_from, reported_ms)
    split[Phase.COLD_START.value] = split.get(Phase.COLD_START.value, 0) + work_from - charge.start_ms
    return {phase: ms for phase, ms in split.items() if ms}


def _cost_of(
    node: Node,
    charges: tuple[Charge, ...],
    seen_ms: int | None,
    usages: Sequence[Usage],
    prices: Sequence[NodePrice],
    taken: TakenRole | None,
) -> NodeCost:
    now = max(prices, key=lambda price: (price.at_ms, price.id), default=node)
    phase_ms: defaultdict[str, int] = defaultdict(int)
    phase_micro_usd: defaultdict[str, int] = defaultdict(int)
    for charge in charges:
        split = phases_of_charge(charge, seen_ms, usages)
        for phase, ms in split.items():
            phase_ms[phase] += ms
        # A charge without length (only the minimum was billed) paid for a start without work.
        for phase, amount in share_out(charge.micro_usd, split, otherwise=Phase.COLD_START.value).items():
            phase_micro_usd[phase] += amount
    return NodeCost(
        node=node.name,
        slot=node.slot,
        generation=node.generation,
        role=node.role,
        market=node.market,
        zone=now.zone,
        instance_type=now.instance_type,
        micro_usd_per_hour=now.micro_usd_per_hour,
        on_demand_micro_usd_per_hour=node.on_demand_micro_usd_per_hour,
        cloud=node.cloud,
        region=node.region,
        charges=charges,
        seen_ms=seen_ms,
        phase_ms=dict(phase_ms),
        phase_micro_usd=dict(phase_micro_usd),
        taken=taken,
    )


# --- ledger queries -----------------------------------------------------------------------------------


def charges_of(
    node: Node,
    intervals: Sequence[BillingInterval],
    events: Sequence[NodeEvent],
    now_ms: int,
    prices: Sequence[NodePrice] = (),
    minimum_ms: int = 0,
) -> tuple[Charge, ...]:
    """Return the charges of a node: its closed intervals, plus the time from its last `up` to now if still open.

    A VM that has ended and has no billing interval yet is charged up to its end, not to now. `events`: in the order in
    which they were recorded.
    """
    closed = [
        Charge(
            start_ms=row.start_ms,
            end_ms=row.end_ms,
            micro_usd_per_hour=row.micro_usd_per_hour,
            micro_usd=row.micro_usd,
            closed=True,
        )
        for row in sorted(intervals, key=lambda row: row.start_ms)
    ]
    running = (
        Charge(
            start_ms=stretch.start_ms,
            end_ms=stretch.end_ms,
            micro_usd_per_hour=stretch.micro_usd_per_hour,
            micro_usd=stretch.micro_usd,
            closed=life.ended or stretch.end_ms < life.end_ms,
        )
        for life in unpaid_lives(intervals, events, now_ms)
        for stretch in stretches(node, life.start_ms, life.end_ms, prices, minimum_ms)
    )
    return (*closed, *running)


def unpaid_lives(intervals: Sequence[BillingInterval], events: Sequence[NodeEvent], now_ms: int) -> list[UnpaidLife]:
    """Return the times in which a node's VM ran and that no interval pays for yet, up to `now_ms`.

    A node has a second life if its VM was found alive after the node's end.
    """
    paid_until_ms = max((interval.end_ms for interval in intervals), default=-1)
    lives: list[UnpaidLife] = []
    start_ms: int | None = None
    for event in events:
        if start_ms is None and event.kind == "up" and event.at_ms > paid_until_ms:
            start_ms = event.at_ms
        elif start_ms is not None and event.kind in INSTANCE_ENDS:
            end_ms = max(start_ms, min(event.at_ms, now_ms))
            lives.append(UnpaidLife(start_ms=start_ms, end_ms=end_ms, ended=event.at_ms <= now_ms))
            start_ms = None
    if start_ms is not None:
        lives.append(UnpaidLife(start_ms=start_ms, end_ms=max(start_ms, now_ms), ended=False))
    return lives


def on_demand_micro_usd(charges: Iterable[Charge], micro_usd_per_hour: int) -> int:
    """Return the cost of the same time at this on-demand price."""
    return sum(interval_micro_usd(charge.start_ms, charge.end_ms, micro_usd_per_hour) for charge in charges)


_INTERVALS = select(BillingInterval).where(BillingInterval.node_id.in_(NODE_IDS_OF_RUN))
_EVENTS = select(NodeEvent).where(NodeEvent.node_id.in_(NODE_IDS_OF_RUN)).order_by(NodeEvent.id)
_STEPS = _EVENTS.where(NodeEvent.kind.in_({"up", *INSTANCE_ENDS}))
_PRICES = select(NodePrice).where(NodePrice.node_id.in_(NODE_IDS_OF_RUN)).order_by(NodePrice.at_ms, NodePrice.id)
_SIDE_COSTS = select(SideCost).where(SideCost.run_id == bindparam("run_id")).order_by(SideCost.id)
_MARKS = select(SpentMark).where(SpentMark.run_id == bindparam("run_id"))


def charges_of_run(session: Session, run: Run, now_ms: int) -> dict[int, tuple[Charge, ...]]:
    """Return the charges of each node of a run up to `now_ms`, by the node's id."""
    intervals: defaultdict[int, list[BillingInterval]] = defaultdict(list)
    for interval in session.scalars(_INTERVALS, {"run_id": run.id}):
        intervals[interval.node_id].append(interval)
    events: defaultdict[int, list[NodeEvent]] = defaultdict(list)
    for event in session.scalars(_EVENTS, {"run_id": run.id}):
        events[event.node_id].append(event)
    prices, minimum_ms = prices_of_run(session, run), minimum_billed_ms(run)
    return {
        node.id: charges_of(node, intervals[node.id], events[node.id], now_ms, prices.get(node.id, ()), minimum_ms)
        for node in nodes_of(session, run)
    }


def spent_micro_usd(session: Session, run: Run, now_ms: int) -> int:
    """Return the cost of the run until now: nodes, disks and addresses with a known price."""
    charges = charges_of_run(session, run, now_ms)
    machines = sum(charge.micro_usd for of_node in charges.values() for charge in of_node)
    return machines + sum(cost.micro_usd or 0 for cost in _side_costs(session, run, charges, now_ms))


def side_costs_of_run(session: Session, run: Run, now_ms: int) -> list[SideCost]:
    """Return the costs beside the nodes by `now_ms`: recorded costs of ended nodes, and running costs up to now."""
    return _side_costs(session, run, charges_of_run(session, run, now_ms), now_ms)


def _side_costs(session: Session, run: Run, charges: Mapping[int, tuple[Charge, ...]], now_ms: int) -> list[SideCost]:
    """Return the result of `side_costs_of_run`. `charges`: the charges of each node of the run, by the node's id.

    The disk of a node whose VM has ended costs money until the end of the node is on record.
    """
    if run.infra == LOCAL:
        return []
    written = list(session.scalars(_SIDE_COSTS, {"run_id": run.id}))
    paid_until_ms: defaultdict[int | None, int] = defaultdict(lambda: -1)
    for cost in written:
        if cost.kind == ADDRESS:  # the address ends with the VM
            paid_until_ms[cost.node_id] = max(cost.end_ms, paid_until_ms[cost.node_id])
    newest = {event.node_id: event.kind for event in session.scalars(_STEPS, {"run_id": run.id})}
    running: list[SideCost] = []
    for node in nodes_of(session, run):
        unpaid = [charge for charge in charges[node.id] if charge.start_ms > paid_until_ms[node.id]]
        if unpaid:
            disks_ms = now_ms if newest.get(node.id) == INSTANCE_ENDED else None
            running += side_costs(run, node, unpaid[0].start_ms, unpaid[-1].end_ms, disks_ms)
    beside = written + running
    return beside + _forgotten(session, run, charges, beside)


FORGOTTEN_MICRO_USD = 1_000
"""Least amount that counts as forgotten. Parts of a charge are rounded, so smaller differences mean nothing."""


def _forgotten(
    session: Session, run: Run, charges: Mapping[int, tuple[Charge, ...]], beside: Sequence[SideCost]
) -> list[SideCost]:
    """Return the cost of nodes that a ledger from a backup forgot and nothing else remembers; empty if there is none.

    The bucket knows the money spent by a moment. Nodes that are found again explain a part of it.
    """
    found: list[tuple[int, SpentMark]] = []
    for mark in session.scalars(_MARKS, {"run_id": run.id}):
        explained = sum(charge.until(mark.at_ms) for of_node in charges.values() for charge in of_node)
        for cost in beside:
            ms, paid_ms = cost.end_ms - cost.start_ms, min(cost.end_ms, mark.at_ms) - cost.start_ms
            explained += (cost.micro_usd or 0) * max(0, paid_ms) // ms if ms > 0 else 0
        found.append((mark.micro_usd - explained, mark))
    if not found:
        return []
    missing, newest = max(found, key=lambda one: one[0])
    if missing < FORGOTTEN_MICRO_USD:
        return []
    return [
        SideCost(
            run_id=run.id,
            kind="forgotten",
            amount="nodes that ended while a later ledger knew them",
            start_ms=run.created_ms,
            end_ms=newest.at_ms,
            micro_usd=missing,
            source="the run's bucket: this ledger was restored from a backup",
        )
    ]


def judge_calls(session: Session, run: Run) -> list[Judged]:
    """Return the paid calls of the run's judges. Calls of every lineage count, because they were paid."""
    rows = session.scalars(
        select(ProgressRow)
        .where(ProgressRow.run_id == run.id, ProgressRow.kind == Judged.KIND)
        .order_by(ProgressRow.id)
    )
    return [Judged(**row.event) for row in rows]


def judge_budget(run: Run) -> int:
    """Return the budget of the run's paid judges in micro-dollars: as `spotrl resume` raised it, or as in the job."""
    if run.max_judges_micro_usd is not None:
        return run.max_judges_micro_usd
    return RewardConfig.model_validate(run.job.get("reward", {})).judge_micro_usd


def judge_micro_usd(session: Session, run: Run) -> int:
    """Return the cost of the run's paid judges until now, in micro-dollars."""
    return sum(event.micro_usd for event in judge_calls(session, run))


def side_micro_usd(session: Session, run: Run, now_ms: int) -> int:
    """Return the sum of the side costs with a known price, in micro-dollars."""
    return sum(cost.micro_usd or 0 for cost in side_costs_of_run(session, run, now_ms))


def prices_of_run(session: Session, run: Run) -> dict[int, list[NodePrice]]:
    """Return the price events of a run's nodes, by the node's id, oldest first. Most nodes have none."""
    prices: defaultdict[int, list[NodePrice]] = defaultdict(list)
    for price in session.scalars(_PRICES, {"run_id": run.id}):
        prices[price.node_id].append(price)
    return dict(prices)


def run_costs(session: Session, run: Run, now_ms: int) -> RunCosts:
    """Compute the cost of `run` from its start until `now_ms` (run's clock), from the ledger alone.

    Raises ArithmeticError if a split does not add up to the total.
    """
    nodes = session.scalars(select(Node).where(Node.run_id == run.id).order_by(Node.id)).all()
    charges, prices = charges_of_run(session, run, now_ms), prices_of_run(session, run)
    seen, usages = _reported_by_engine(session, run)
    taken = _taken_roles(session, run)
    return RunCosts(
        nodes=tuple(
            _cost_of(
                node,
                charges[node.id],
                seen.get(node.name),
                usages[node.name],
                prices.get(node.id, []),
                taken.get(node.id),
            )
            for node in nodes
        )
    )


def _taken_roles(session: Session, run: Run) -> dict[int, TakenRole]:
    """Return the promotions of the run, by the node's id."""
    taken: dict[int, TakenRole] = {}
    kinds = (PROMOTED, "ready")
    events = select(NodeEvent).join(Node).where(Node.run_id == run.id, NodeEvent.kind.in_(kinds))
    for event in session.scalars(events.order_by(NodeEvent.id)):
        known = taken.get(event.node_id)
        if event.kind == PROMOTED:
            slot, generation = promotion_of(event.evidence)
            taken[event.node_id] = TakenRole(slot=slot, generation=generation, at_ms=event.at_ms, ready_ms=None)
        elif known is not None and known.ready_ms is None:
            taken[event.node_id] = replace(known, ready_ms=event.at_ms)
    return taken


def cost_until(session: Session, run: Run, at_ms: int) -> int:
    """Return the micro-dollars that `run` had spent by a moment.

    Each call reads the ledger. For many moments, use `run_costs(...).until`, which reads the ledger once.
    """
    return run_costs(session, run, at_ms).until(at_ms)


def _reported_by_engine(session: Session, run: Run) -> tuple[dict[str, int], defaultdict[str, list[Usage]]]:
    """Return the time each node was first seen, and the usage windows of each node.

    Every lineage counts, because the time of every lineage was paid.
    """
    seen: dict[str, int] = {}
    usages: defaultdict[str, list[Usage]] = defaultdict(list)
    # Columns, because a long run has tens of thousands of windows, and an object for each takes most of the time.
    columns = (ProgressRow.kind, ProgressRow.lineage, ProgressRow.at_ms, ProgressRow.event)
    wanted = select(*columns).where(ProgressRow.run_id == run.id, ProgressRow.kind.in_([NodeSeen.KIND, NodeUsage.KIND]))
    for row in session.execute(wanted):
        node = row.event["node"]
        if row.kind == NodeSeen.KIND:
            seen[node] = min(row.at_ms, seen.get(node, row.at_ms))
        else:
            usages[node].append(
                Usage(
                    lineage=row.lineage,
                    from_ms=row.event["from_ms"],
                    to_ms=row.event["to_ms"],
                    phase_ms=row.event["phase_ms"],
                )
            )
    return seen, usages
