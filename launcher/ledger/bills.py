"""The clouds' own bills in the ledger: lines about our nodes and runs, as `spotrl bill import` kept them.

Amounts are in pico-dollars (10^-12), because clouds bill parts of a micro-dollar and a sum must be exact. A figure for
people is rounded once: the sum of a run to the micro-dollar, its parts by largest remainder.
"""

from collections import defaultdict
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from launcher.ledger.models import BillLine, Node, Run
from launcher.market.side_prices import ADDRESS, DISK
from launcher.money import MICRO

PICO = 10**12
"""Pico-dollars in a dollar."""

Key = TypeVar("Key", bound=Hashable)


class BillKind(StrEnum):
    """What a line of a bill is for. Only the first three are metered, too."""

    INSTANCE = "instance"
    DISK = DISK
    ADDRESS = ADDRESS
    TRAFFIC = "traffic"
    TAX = "tax"
    CREDIT = "credit"
    DISCOUNT = "discount"
    REFUND = "refund"
    """Money back, or a correction of an earlier bill."""
    OTHER = "other"


@dataclass(frozen=True, kw_only=True, slots=True)
class BilledPart:
    """All lines of one node and kind. `node`: None for a resource of the run that is no node's.

    `hours`: the instance-hours that the bill names; None if it names none. `start_ms`, `end_ms`: what the lines cover.
    """

    node: str | None
    kind: BillKind
    resource: str
    micro_usd: int
    hours: float | None
    start_ms: int
    end_ms: int


def rounded_parts(pico_usd: Mapping[Key, int]) -> dict[Key, int]:
    """Round amounts in pico-dollars to micro-dollars, such that they add up to their rounded sum (largest remainder).

    Amounts may be negative. Ties go to the earlier key.
    """
    unit = PICO // MICRO
    parts = {key: amount // unit for key, amount in pico_usd.items()}
    total = (2 * sum(pico_usd.values()) + unit) // (2 * unit)
    missing = total - sum(parts.values())
    for key in sorted(pico_usd, key=lambda key: -(pico_usd[key] % unit))[:missing]:
        parts[key] += 1
    return parts


def billed_parts(session: Session, run: Run) -> list[BilledPart]:
    """Return the lines of the run's bill by node, kind and, for what is no node's, resource. Empty without a bill."""
    resource = func.iif(BillLine.node_id.is_(None), BillLine.resource, "").label("resource")
    rows = session.execute(
        select(
            Node.name,
            BillLine.kind,
            resource,
            func.sum(BillLine.pico_usd * BillLine.copies),
            func.sum(BillLine.hours * BillLine.copies),
            func.min(BillLine.start_ms),
            func.max(BillLine.end_ms),
        )
        .outerjoin(Node, Node.id == BillLine.node_id)
        .where(BillLine.run_id == run.id)
        .group_by(BillLine.node_id, BillLine.kind, resource)
        .order_by(BillLine.node_id, BillLine.kind, resource)
    ).all()
    amounts = rounded_parts({place: int(row[3]) for place, row in enumerate(rows)})
    return [
        BilledPart(
            node=name,
            kind=BillKind(kind),
            resource=thing,
            micro_usd=amounts[place],
            hours=hours,
            start_ms=start_ms,
            end_ms=end_ms,
        )
        for place, (name, kind, thing, _, hours, start_ms, end_ms) in enumerate(rows)
    ]


def billed_micro_usd(session: Session, run_ids: Collection[int]) -> dict[int, int]:
    """Return the billed amount of each run of these that a bill names."""
    sums = select(BillLine.run_id, func.sum(BillLine.pico_usd * BillLine.copies)).group_by(BillLine.run_id)
    found: defaultdict[int, int] = defaultdict(int)
    for run_id, pico_usd in session.execute(sums.where(BillLine.run_id.in_(run_ids))):
        found |= rounded_parts({run_id: int(pico_usd)})
    return dict(found)
