"""What the clouds billed for a run, beside what spotrl metered, with a line for each difference.

    metered (charges, disks, addresses) and billed (ledger/bills.py) of each node -> differences by reason

The promise: the differences of a node, and so those of the run, add up to billed minus metered to the micro-dollar.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sqlalchemy import select
from sqlalchemy.orm import Session

from engine.events import Market
from launcher.ledger.accounting import NodeCost, RunCosts, side_costs_of_run
from launcher.ledger.billing import FIRST_HOUR_MS, interval_micro_usd
from launcher.ledger.bills import BilledPart, BillKind, billed_parts
from launcher.ledger.models import LOCAL, Node, Preemption, Run, SideCost
from launcher.ledger.store import nodes_of
from launcher.money import HOUR_MS

NEAR_MS = 60_000
"""A bill covers a node if it ends at most this long before the node does: the two have other clocks."""

WHY = {
    "not_in_bill": "metered, and on no imported bill",
    "free_first_hour": "first hour of a node that AWS preempted: free on the bill, or counted as free and billed",
    "minimum": "part of the shortest billed time",
    "time": "other seconds of the instance",
    "price": "another price of an hour",
    "disk": "disk: metered at an assumed price",
    "address": "address: metered at an assumed price",
    "traffic": "traffic, which is not metered",
    "tax": "tax",
    "discount": "discounts, commitments and savings plans",
    "credit": "credits",
    "refund": "refunds, and corrections of earlier bills",
    "unknown": "resources with the run's label that are no node of this ledger",
    "other": "the rest",
}
"""Reasons of differences, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BillDifference:
    """A part of billed minus metered. `node`: None for what is no node's. `kind`: a key of `WHY`."""

    kind: str
    node: str | None
    micro_usd: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class BilledNode:
    """One node that cost money. `basis`: `billed` if the bill covers its whole life, else `metered`.

    `metered_micro_usd`: instance, disk and address. `billed_micro_usd`: all lines about the node; None without any.
    """

    node: str
    basis: str
    metered_micro_usd: int
    billed_micro_usd: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Bill:
    """The clouds' bill of a run beside the metered costs of nodes, disks and addresses.

    `billed_micro_usd` = `metered_micro_usd` + the sum of `differences`. Paid judges are in neither.
    """

    basis: str
    """`billed` if the bill covers every node, else `metered`."""
    metered_micro_usd: int
    billed_micro_usd: int
    nodes: tuple[BilledNode, ...]
    differences: tuple[BillDifference, ...]


def bill_of(session: Session, run: Run, costs: RunCosts, now_ms: int) -> Bill | None:
    """Return the bill of the run; None if no imported bill names it."""
    parts = [] if run.infra == LOCAL else billed_parts(session, run)
    if not parts:
        return None
    taken = set(
        session.scalars(select(Node.name).join(Preemption, Preemption.node_id == Node.id).where(Node.run_id == run.id))
    )
    names = {node.id: node.name for node in nodes_of(session, run)}
    sides: defaultdict[str | None, list[SideCost]] = defaultdict(list)
    for side in side_costs_of_run(session, run, now_ms):
        if side.micro_usd is not None:
            sides[None if side.node_id is None else names[side.node_id]].append(side)
    of_node: defaultdict[str | None, list[BilledPart]] = defaultdict(list)
    for part in parts:
        of_node[part.node].append(part)
    nodes, differences = [], []
    for cost in costs.nodes:
        billed, beside = of_node[cost.node], sides[cost.node]
        if not billed and not cost.charges and not beside:
            continue
        explained = [one for one in _differences(cost, beside, billed, cost.node in taken) if one.micro_usd]
        metered = cost.micro_usd + sum(side.micro_usd or 0 for side in beside)
        on_bill = sum(part.micro_usd for part in billed)
        _check(cost.node, on_bill - metered, explained)
        is_whole = cost.end_ms is not None and all(one.kind != "not_in_bill" for one in explained)
        nodes.append(
            BilledNode(
                node=cost.node,
                basis="billed" if is_whole else "metered",
                metered_micro_usd=metered,
                billed_micro_usd=on_bill if billed else None,
            )
        )
        differences += explained
    # A ledger from a backup may know of money, but not of the nodes that it was for (accounting.py).
    differences += [_difference("not_in_bill", None, -(side.micro_usd or 0)) for side in sides[None]]
    differences += [
        BillDifference(kind="unknown", node=None, micro_usd=part.micro_usd, why=f"{WHY['unknown']}: {part.resource}")
        for part in of_node[None]
        if part.micro_usd
    ]
    metered = costs.total + sum(side.micro_usd or 0 for beside in sides.values() for side in beside)
    billed_total = sum(part.micro_usd for part in parts)
    _check(run.name, billed_total - metered, differences)
    return Bill(
        basis="billed" if all(node.basis == "billed" for node in nodes) else "metered",
        metered_micro_usd=metered,
        billed_micro_usd=billed_total,
        nodes=tuple(nodes),
        differences=tuple(sorted(differences, key=lambda one: list(WHY).index(one.kind))),
    )


def by_kind(differences: Iterable[BillDifference]) -> dict[str, int]:
    """Return the sum of the differences of each kind, in the order of `WHY`."""
    sums: defaultdict[str, int] = defaultdict(int)
    for one in differences:
        sums[one.kind] += one.micro_usd
    return {kind: sums[kind] for kind in WHY if kind in sums}


METERED_KINDS = (BillKind.DISK, BillKind.ADDRESS)
"""Kinds beside the instance that are metered, too."""


def _differences(
    cost: NodeCost, beside: Sequence[SideCost], billed: Sequence[BilledPart], was_taken: bool
) -> Iterator[BillDifference]:
    """Yield the differences of one node. Some may be 0."""
    parts = {part.kind: part for part in billed}
    amounts = {kind: part.micro_usd for kind, part in parts.items()}
    instance = parts.get(BillKind.INSTANCE)
    covered = _Covered.by([instance] if instance else [parts[kind] for kind in METERED_KINDS if kind in parts], cost)
    is_first_hour = (
        was_taken
        and (cost.cloud, cost.market) == ("aws", Market.SPOT)
        and cost.end_ms is not None
        and cost.ms < FIRST_HOUR_MS
    )
    metered = cost.micro_usd if instance is None and is_first_hour else 0
    if instance is not None:
        metered = sum(covered.part_of(charge.start_ms, charge.end_ms, charge.micro_usd) for charge in cost.charges)
    metered_beside = {
        kind: sum(
            covered.part_of(side.start_ms, side.end_ms, side.micro_usd or 0) for side in beside if side.kind == kind
        )
        for kind in METERED_KINDS
    }
    whole = cost.micro_usd + sum(side.micro_usd or 0 for side in beside)
    yield _difference("not_in_bill", cost.node, metered + sum(metered_beside.values()) - whole)
    difference = amounts.pop(BillKind.INSTANCE, 0) - metered
    if is_first_hour and 0 in (metered, metered + difference):
        yield _difference("free_first_hour", cost.node, difference)
    else:
        yield from _of_instance(cost, covered, metered, difference, None if instance is None else instance.hours)
    for kind in METERED_KINDS:
        yield _difference(kind.value, cost.node, amounts.pop(kind, 0) - metered_beside[kind])
    for kind, micro_usd in amounts.items():
        yield _difference(kind.value, cost.node, micro_usd)


def _of_instance(
    cost: NodeCost, covered: "_Covered", metered: int, difference: int, hours: float | None
) -> Iterator[BillDifference]:
    """Split the difference of an instance. `metered`: for the covered time. `hours`: on the bill, if it names them."""
    minimum, hours_paid = 0, 0.0
    for charge in cost.charges:
        ms = covered.part_of(charge.start_ms, charge.end_ms, charge.ms)
        missing = charge.micro_usd - interval_micro_usd(charge.start_ms, charge.end_ms, charge.micro_usd_per_hour)
        hours_paid += ms / HOUR_MS
        if missing > 0:  # the last charge has what was missing of the shortest billed time
            minimum += missing
            hours_paid += missing / charge.micro_usd_per_hour
    name = "minimum" if minimum else "time"
    if hours is None or not metered:
        part = max(difference, -minimum) if difference < 0 else 0
        yield _difference(name, cost.node, part)
        yield _difference("other", cost.node, difference - part)
        return
    part = round((hours - hours_paid) * metered / hours_paid)
    yield _difference(name, cost.node, part)
    yield _difference("price", cost.node, difference - part)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Covered:
    """The time of a node that its bill covers; empty without a line about the node."""

    start_ms: int
    end_ms: int

    @classmethod
    def by(cls, parts: Sequence[BilledPart], cost: NodeCost) -> "_Covered":
        """Return the time that these lines cover. Within `NEAR_MS` of the node's own times it is all of that side."""
        if not parts:
            return cls(start_ms=0, end_ms=0)
        start_ms, end_ms = min(part.start_ms for part in parts), max(part.end_ms for part in parts)
        if cost.start_ms is not None and start_ms <= cost.start_ms + NEAR_MS:
            start_ms = 0
        if cost.end_ms is not None and end_ms >= cost.end_ms - NEAR_MS:
            end_ms = FOREVER_MS
        return cls(start_ms=start_ms, end_ms=end_ms)

    def part_of(self, start_ms: int, end_ms: int, amount: int) -> int:
        """Return the part of an amount, spread evenly over a time, that is covered. Rounded down, but for all of it."""
        if self.start_ms <= start_ms and end_ms <= self.end_ms and self.end_ms > 0:
            return amount
        ms = max(0, min(end_ms, self.end_ms) - max(start_ms, self.start_ms))
        return amount * ms // (end_ms - start_ms) if ms else 0


FOREVER_MS = 2**62


def _difference(kind: str, node: str | None, micro_usd: int) -> BillDifference:
    return BillDifference(kind=kind, node=node, micro_usd=micro_usd, why=WHY[kind])


def _check(name: str, difference: int, explained: Sequence[BillDifference]) -> None:
    total = sum(one.micro_usd for one in explained)
    if total != difference:
        raise ArithmeticError(f"{name}: the bill differs by {difference} micro-dollars, and {total} are explained")
