"""Bill nodes as the clouds do: by the second with a minimum, at the price of each moment, plus disk and address.

paid time of a node + its price events -> stretches of one price each, each rounded once

Two rules follow the clouds' own billing. Both clouds bill every instance that comes up for a minute at least. AWS does
not bill a spot instance that EC2 itself preempts in its first hour; without evidence from EC2, the instance is billed.
Costs beside the instance (disk, address) have assumed list prices. A cost without a known price is None, never 0. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.events import Market
from launcher.ledger.models import LOCAL, BillingInterval, Node, NodePrice, Run, SideCost
from launcher.market.side_prices import DISK, MINIMUM_BILLED_MS, side_rates
from launcher.money import HOUR_MS

FIRST_HOUR_MS = HOUR_MS

EC2_PREEMPTED = "SpotInstanceTermination"
"""Text in EC2's state reason of an instance that EC2 itself preempted (Server.SpotInstanceTermination)."""


def minimum_billed_ms(run: Run) -> int:
    """Return the minimum billed time. The local infra has no minimum."""
    return 0 if run.infra == LOCAL else MINIMUM_BILLED_MS


def interval_micro_usd(start_ms: int, end_ms: int, micro_usd_per_hour: int) -> int:
    """Return the cost of a stretch of time at a rate, rounded once to a micro-dollar; a half rounds up."""
    if end_ms < start_ms:
        raise ValueError(f"an interval cannot end ({end_ms}) before it starts ({start_ms})")
    return (2 * (end_ms - start_ms) * micro_usd_per_hour + HOUR_MS) // (2 * HOUR_MS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A stretch of time at one price. `micro_usd` of the last stretch includes the missing part of the minimum."""

    start_ms: int
    end_ms: int
    micro_usd_per_hour: int
    micro_usd: int


def stretches(node: Node, start_ms: int, end_ms: int, prices: Iterable[NodePrice], minimum_ms: int) -> list[Stretch]:
    """Return the cost of a node from `start_ms` to `end_ms`, cut at each change of the price."""
    changes = sorted(prices, key=lambda price: (price.at_ms, price.id))
    rate = node.micro_usd_per_hour
    cuts: list[tuple[int, int]] = []
    for change in changes:
        if change.at_ms <= start_ms:
            rate = change.micro_usd_per_hour
        elif change.at_ms < end_ms:
            cuts.append((change.at_ms, change.micro_usd_per_hour))
    pieces: list[Stretch] = []
    since_ms = start_ms
    for at_ms, next_rate in [*cuts, (end_ms, 0)]:
        if at_ms > since_ms or at_ms == end_ms:
            is_last = at_ms == end_ms
            paid_to_ms = max(at_ms, start_ms + minimum_ms) if is_last else at_ms
            micro_usd = interval_micro_usd(since_ms, paid_to_ms, rate)
            pieces.append(Stretch(start_ms=since_ms, end_ms=at_ms, micro_usd_per_hour=rate, micro_usd=micro_usd))
        since_ms, rate = at_ms, next_rate
    return pieces


def first_hour_is_free(node: Node, start_ms: int, end_ms: int, evidence: str) -> bool:
    """Return whether EC2 itself reports that EC2 preempted this spot instance within its first hour."""
    return (
        node.cloud == "aws"
        and node.market == Market.SPOT
        and end_ms - start_ms < FIRST_HOUR_MS
        and EC2_PREEMPTED in evidence
    )


NOT_PRICED: Sequence[tuple[str, str]] = (("egress", "weights, checkpoints and logs that left a zone or a region"),)
"""Kinds of cost with an unknown amount until the bill, each with a description."""


def bill(
    node: Node, start_ms: int, end_ms: int, prices: Iterable[NodePrice], minimum_ms: int, basis: str, taken: str | None
) -> list[BillingInterval]:
    """Return the bill of an ended node, an interval for each price.

    `basis`: `money_basis` of the run (models.py). `taken`: the cloud's text about a preemption; None for any other end.
    """
    is_free = taken is not None and first_hour_is_free(node, start_ms, end_ms, taken)
    return [
        BillingInterval(
            node_id=node.id,
            start_ms=stretch.start_ms,
            end_ms=stretch.end_ms,
            micro_usd_per_hour=stretch.micro_usd_per_hour,
            micro_usd=0 if is_free else stretch.micro_usd,
            basis=f"{basis}; not billed: AWS interrupted it in its first hour ({taken})" if is_free else basis,
        )
        for stretch in stretches(node, start_ms, end_ms, prices, minimum_ms)
    ]


def side_costs(run: Run, node: Node, start_ms: int, end_ms: int, disks_ms: int | None = None) -> list[SideCost]:
    """Return the costs beside a node's instance, on a real cloud; empty on the local infra.

    `disks_ms`: end of the disk, if the disk has outlived the instance. None: the disk ended with the instance.
    """
    if run.infra == LOCAL:
        return []
    ends_ms = {DISK: max(end_ms, disks_ms or end_ms)}
    return [
        SideCost(
            run_id=run.id,
            node_id=node.id,
            kind=rate.kind,
            amount=rate.amount,
            start_ms=start_ms,
            end_ms=ends_ms.get(rate.kind, end_ms),
            micro_usd=interval_micro_usd(start_ms, ends_ms.get(rate.kind, end_ms), rate.micro_usd_per_hour),
            source=rate.source,
        )
        for rate in side_rates(node.cloud, Market(node.market), node.disk_gib)
    ]
