"""How clouds bill: by the second with a minimum, at the price of each moment, and for more than the machine.

when a node was paid for + its price events -> stretches of one price each, every one rounded once

Two rules are a cloud's own and need evidence. Whatever comes up is billed a minute at least, on both clouds. AWS does
not bill a spot instance that EC2 itself interrupts in its first hour; without EC2's word for that, it is billed.
What is beside the machine (disk, address) has assumed list prices; what has none is unknown (None), never 0. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from engine.events import Market
from launcher.ledger.models import BillingInterval, Node, NodePrice, Run, SideCost
from launcher.money import HOUR_MS

LOCAL = "local"

MINIMUM_BILLED_MS = 60_000
"""Both clouds bill at least a minute of whatever came up (research notes cost 5.1)."""

FIRST_HOUR_MS = HOUR_MS

EC2_TOOK_IT = "SpotInstanceTermination"
"""In EC2's state reason of an instance that it interrupted itself (Server.SpotInstanceTermination)."""


def minimum_billed_ms(run: Run) -> int:
    """The local infra bills nothing that it did not run."""
    return 0 if run.infra == LOCAL else MINIMUM_BILLED_MS


def interval_micro_usd(start_ms: int, end_ms: int, micro_usd_per_hour: int) -> int:
    """What a stretch of time costs at a rate, rounded once to a micro-dollar; half a micro-dollar rounds up."""
    if end_ms < start_ms:
        raise ValueError(f"an interval cannot end ({end_ms}) before it starts ({start_ms})")
    return (2 * (end_ms - start_ms) * micro_usd_per_hour + HOUR_MS) // (2 * HOUR_MS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """A stretch of time at one price. `micro_usd` of the last one holds what is missing to the minimum."""

    start_ms: int
    end_ms: int
    micro_usd_per_hour: int
    micro_usd: int


def stretches(node: Node, start_ms: int, end_ms: int, prices: Iterable[NodePrice], minimum_ms: int) -> list[Stretch]:
    """What a node costs from `start_ms` to `end_ms`, cut where its price changed."""
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
    """Whether EC2 itself says that it interrupted this spot instance, within its first hour."""
    return (
        node.cloud == "aws"
        and node.market == Market.SPOT
        and end_ms - start_ms < FIRST_HOUR_MS
        and EC2_TOOK_IT in evidence
    )


# --- beside the machine ---------------------------------------------------------------------------------

MONTH_HOURS = 730

DISK_GIB = 100
"""Of every node: what SkyPilot is asked for."""

DISK_MICRO_USD_PER_GIB_MONTH = {"aws": 80_000, "gcp": 100_000}
ADDRESS_MICRO_USD_PER_HOUR = {
    ("aws", Market.SPOT): 5_000,
    ("aws", Market.ON_DEMAND): 5_000,
    ("gcp", Market.SPOT): 2_500,
    ("gcp", Market.ON_DEMAND): 5_000,
}
LISTED = "assumed: list price of 2025 in US regions (gp3, pd-balanced; public IPv4 in use), not re-read"


@dataclass(frozen=True, kw_only=True, slots=True)
class SideRate:
    """What a node costs beside its machine, for as long as it is there."""

    kind: str
    """disk or address."""
    amount: str
    micro_usd_per_hour: int
    source: str


@cache
def side_rates(cloud: str, market: Market) -> tuple[SideRate, ...]:
    disk = -(-DISK_GIB * DISK_MICRO_USD_PER_GIB_MONTH[cloud] // MONTH_HOURS)
    return (
        SideRate(kind="disk", amount=f"{DISK_GIB} GiB", micro_usd_per_hour=disk, source=LISTED),
        SideRate(
            kind="address",
            amount="1 public IPv4",
            micro_usd_per_hour=ADDRESS_MICRO_USD_PER_HOUR[cloud, market],
            source=LISTED,
        ),
    )


@cache
def side_micro_usd_per_hour(cloud: str, market: Market) -> int:
    """All of it: what the brakes add to the price of every node on a real cloud."""
    return sum(rate.micro_usd_per_hour for rate in side_rates(cloud, market))


NOT_PRICED: Sequence[tuple[str, str]] = (("egress", "weights, checkpoints and logs that left a zone or a region"),)
"""Kinds of which nobody knows the amount before the bill, and what they are."""


def bill(
    node: Node, start_ms: int, end_ms: int, prices: Iterable[NodePrice], minimum_ms: int, basis: str, taken: str | None
) -> list[BillingInterval]:
    """The closed bill of a node. `taken`: the cloud's words for taking it back; None when it ended in another way."""
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


def side_costs(run: Run, node: Node, start_ms: int, end_ms: int) -> list[SideCost]:
    """What a node of a real cloud cost beside its machine."""
    if run.infra == LOCAL:
        return []
    return [
        SideCost(
            run_id=run.id,
            node_id=node.id,
            kind=rate.kind,
            amount=rate.amount,
            start_ms=start_ms,
            end_ms=end_ms,
            micro_usd=interval_micro_usd(start_ms, end_ms, rate.micro_usd_per_hour),
            source=rate.source,
        )
        for rate in side_rates(node.cloud, Market(node.market))
    ]
