"""Prices as clouds say them: what came, and which of it is believed. Pure; the time is passed in.

rows as they came (text) -> believe -> points | refusals, each with its reason

The promise: a number that could mislead a budget never becomes a `PricePoint`, and nothing is dropped in silence. A
refused row takes no other row with it; a feed that is wrong as a whole is refused as a whole: nothing of it is kept.
Each rule is an error that was seen in a real list or simulator (research notes cost 1.3 and 2).
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import ROUND_HALF_EVEN, Decimal, InvalidOperation
from enum import StrEnum
from typing import Protocol

from engine.events import Market
from launcher.exit_codes import ExitCode, Failure
from launcher.money import MICRO, exact_dollars, hourly

CURRENCY = "USD"

EARLIEST_MS = 1_420_070_400_000
"""2015-01-01. Spot instances with these GPUs came later; moto, a simulator of AWS, dates its prices 2006."""

CLOCK_SKEW_MS = 600_000
"""A price may be dated so far ahead of us: clocks differ by seconds, a wrong one by hours."""

PLACEHOLDERS = {
    Decimal("0.00001"): "moto, a simulator of AWS, answers it",
    Decimal("700"): "price lists of TPUs say it",
}
"""Prices that stand for "no price here"."""

LEAST_MICRO_USD_PER_HOUR = MICRO // 100
"""A cent. The cheapest machine with a GPU costs ten times as much (T4, spot)."""

CONSTANT_TYPES = 3
"""So many instance types at one and the same price: a default value, not a market."""

DEAR_ROWS = 3
"""Fewer spot prices above on-demand than this are rows gone wrong, not a feed."""

Product = tuple[str, str, str]
"""Cloud, region, instance type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawPrice:
    """One row as it came. `price`, `currency`, `unit` and `effective` are the cloud's own words, or ours for a gap."""

    cloud: str
    region: str
    zone: str
    zone_id: str
    instance_type: str
    market: Market
    price: str
    currency: str
    unit: str
    """`hour` for the whole instance; anything else is refused."""
    effective: str
    """ISO 8601; without an offset it is UTC."""
    source: str
    source_id: str

    @property
    def name(self) -> str:
        """What a person would call it: `spot p5.48xlarge in us-east-1a`."""
        return f"{self.market.value} {self.instance_type or 'of no type'} in {self.zone or self.region or 'no place'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PricePoint:
    """A price that a cloud said, for the whole instance, without taxes, disks, traffic or discounts."""

    cloud: str
    region: str
    zone: str
    """Name of the zone; empty for a price of the whole region."""
    zone_id: str
    """AWS's id of the zone: names differ between accounts. Empty elsewhere."""
    instance_type: str
    market: Market
    micro_usd_per_hour: int
    source: str
    source_id: str
    effective_ms: int
    """Since when the cloud says it holds."""
    observed_ms: int
    """When we asked; from the ledger, when we last did."""

    @property
    def pool(self) -> tuple[str, ...]:
        """What has one price at a time: a product in a place, as one source tells it."""
        return self.cloud, self.region, self.zone or self.zone_id, self.instance_type, self.market, self.source


class AdviceKind(StrEnum):
    """What a cloud estimates of its spot capacity. None of them is a hazard (research notes cost 1.2)."""

    OBTAINABILITY = "obtainability"
    """0 to 1: how likely a request of this size is met now."""
    UPTIME_HOURS = "uptime_hours"
    """How long most spot VMs of the request are expected to run."""
    PREEMPTION_RATE = "preemption_rate"
    """0 to 1: preempted spot VMs over all that stopped, of one day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityAdvice:
    """One estimate of a cloud for spot machines of one type in one zone, over [`from_ms`, `until_ms`]."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    kind: AdviceKind
    value: float
    from_ms: int
    until_ms: int
    observed_ms: int
    source: str

    @property
    def is_credible(self) -> bool:
        """A chance is 0 to 1, an uptime above 0, a rate above 0 and at most 1; a NaN is neither.

        A rate of 0 is also that of a day on which nothing stopped, and of a field that was never set.
        """
        match self.kind:
            case AdviceKind.UPTIME_HOURS:
                return self.value > 0
            case AdviceKind.PREEMPTION_RATE:
                return 0 < self.value <= 1
            case AdviceKind.OBTAINABILITY:
                return 0 <= self.value <= 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """A row that is not believed: what was found, and what would do."""

    raw: RawPrice
    reason: str

    def __str__(self) -> str:
        return f"{self.raw.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """What one source answered. `failures`: parts of it that did not answer, the rest came all the same."""

    prices: tuple[RawPrice, ...] = ()
    advice: tuple[CapacityAdvice, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    """What was left out on purpose, for people."""


class PriceSource(Protocol):
    """One feed of prices. `AwsSpot` and the others of `launcher/market/sources` ask clouds."""

    @property
    def name(self) -> str:
        """Cloud and call, as a price's `source` says it: `aws ec2 DescribeSpotPriceHistory`."""

    @property
    def cloud(self) -> str:
        """`aws` or `gcp`."""

    @property
    def gives_prices(self) -> bool:
        """Whether an answer without prices is a fault: not for a source that may have nothing but advice."""

    def fetch(self, now_ms: int) -> Fetched:
        """Ask, with bounded retries inside the client. May be repeated at any time.

        Raises `MissingCredentials` or `SourceFailed` when no part of it answered.
        """


class FeedRefused(Failure):
    """A whole feed is not believed; nothing of it is kept."""

    exit_code = ExitCode.STALE_CATALOG


# --- what is believed --------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
    points: tuple[PricePoint, ...] = ()
    """Oldest first."""
    refused: tuple[Refusal, ...] = ()


def believe(
    raws: Sequence[RawPrice], *, source: str, now_ms: int, on_demand: Mapping[Product, int] | None = None
) -> Belief:
    """Split what `source` said into prices and refusals. Raises FeedRefused.

    `on_demand`: known on-demand prices in micro-dollars an hour, to hold spot prices against; those of the feed count
    besides. A price finer than a micro-dollar is rounded to the nearest one (half to even), which changes an hour by
    half a millionth of a dollar at most.
    """
    if not raws:
        raise FeedRefused(f"{source} answered without a single price; ask for regions and GPUs that it sells")
    points, refused = [], []
    for raw in raws:
        try:
            points.append((raw, _point(raw, now_ms)))
        except ValueError as error:
            refused.append(Refusal(raw=raw, reason=str(error)))
    points, contradicting = _without_contradictions(points)
    limits = dict(on_demand or {}) | on_demand_prices(point for _, point in points)
    points, dear = _without_dear_spot(points, limits, source)
    refused += [*contradicting, *dear]
    if not points:
        raise FeedRefused(
            f"{source}: not one of its {len(raws)} prices is believed; the first is {refused[0]}. Nothing was kept"
        )
    _refuse_constant([point for _, point in points], source)
    return Belief(
        points=tuple(sorted((point for _, point in points), key=lambda point: point.effective_ms)),
        refused=tuple(refused),
    )


def on_demand_prices(points: Iterable[PricePoint]) -> dict[Product, int]:
    """The on-demand price of each product of each region, the newest of several."""
    newest = sorted((p for p in points if p.market is Market.ON_DEMAND), key=lambda p: p.effective_ms)
    return {(p.cloud, p.region, p.instance_type): p.micro_usd_per_hour for p in newest}


# --- one row -----------------------------------------------------------------------------------------


def _point(raw: RawPrice, now_ms: int) -> PricePoint:
    """Raises ValueError with the reason."""
    for what in ("region", "instance_type", "source"):
        if not getattr(raw, what).strip():
            raise ValueError(f"its {what.replace('_', ' ')} is empty; nobody could buy it")
    if raw.currency != CURRENCY:
        raise ValueError(f"its currency is {raw.currency or 'not said'}; only {CURRENCY} is understood")
    if raw.unit != "hour":
        raise ValueError(f"it is a price per {raw.unit or 'unit that is not said'}; only instance-hours are understood")
    return PricePoint(
        cloud=raw.cloud,
        region=raw.region,
        zone=raw.zone,
        zone_id=raw.zone_id,
        instance_type=raw.instance_type,
        market=raw.market,
        micro_usd_per_hour=micro_usd(raw.price),
        source=raw.source,
        source_id=raw.source_id,
        effective_ms=_effective_ms(raw.effective, now_ms),
        observed_ms=now_ms,
    )


def micro_usd(price: str) -> int:
    """Micro-dollars an hour of a price in dollars. Raises ValueError with the reason."""
    if not price.strip():
        raise ValueError("its price is empty; an offer without a price is no offer")
    try:
        usd = Decimal(price.strip())
    except InvalidOperation:
        raise ValueError(f"its price is {_short(price)!r}, which is no number") from None
    if not usd.is_finite():
        raise ValueError(f"its price is {price.strip()}; a price is a finite number")
    if usd in PLACEHOLDERS:
        raise ValueError(f"its price is {price.strip()}, which stands for no price at all ({PLACEHOLDERS[usd]})")
    if usd <= 0:
        raise ValueError(f"its price is {price.strip()}; a price is above zero")
    whole = int((usd * MICRO).to_integral_value(ROUND_HALF_EVEN))
    if whole < LEAST_MICRO_USD_PER_HOUR:
        raise ValueError(
            f"its price is {price.strip()}; no machine with a GPU costs less than {hourly(LEAST_MICRO_USD_PER_HOUR)}"
        )
    return whole


def _effective_ms(text: str, now_ms: int) -> int:
    at_ms = time_ms(text)
    if at_ms is None:
        raise ValueError(f"its time is {_short(text)!r}, which is no ISO 8601 time")
    if at_ms < EARLIEST_MS:
        raise ValueError(f"it is dated {text}; nobody sold these GPUs before 2015, so this is no price of today")
    if at_ms > now_ms + CLOCK_SKEW_MS:
        raise ValueError(f"it is dated {text}, which is in the future; if it is not, this machine's clock is behind")
    return at_ms


def time_ms(text: str) -> int | None:
    """Milliseconds UTC of an ISO 8601 time; None if it is none. A date alone is its first moment."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def iso(at_ms: int) -> str:
    """Milliseconds UTC as ISO 8601, to the second."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"


# --- rows beside one another -------------------------------------------------------------------------

Row = tuple[RawPrice, PricePoint]


def _without_contradictions(rows: Iterable[Row]) -> tuple[list[Row], list[Refusal]]:
    """Two prices of one thing since one moment: nobody can say which holds, so neither is kept. Said twice is once."""
    said: defaultdict[object, dict[int, Row]] = defaultdict(dict)
    for raw, point in rows:
        said[point.pool, point.effective_ms].setdefault(point.micro_usd_per_hour, (raw, point))
    kept: list[Row] = []
    refused = []
    for prices in said.values():
        if len(prices) == 1:
            kept += prices.values()
            continue
        both = " and ".join(exact_dollars(price) for price in sorted(prices))
        since = next(iter(prices.values()))[0].effective
        reason = f"the feed says both {both} since {since}; one price can hold at a time"
        refused += [Refusal(raw=raw, reason=reason) for raw, _ in prices.values()]
    return kept, refused


def _without_dear_spot(
    rows: Sequence[Row], limits: Mapping[Product, int], source: str
) -> tuple[list[Row], list[Refusal]]:
    """Spot above the on-demand price of the same machine and region is another product's price.

    Of a feed where that is so for most rows that can be compared (`DEAR_ROWS` at least), none is believed. A price of
    the past is held against today's on-demand price too: where that fell, an older, dearer spot price is refused.
    """
    kept, refused, compared = [], [], 0
    for raw, point in rows:
        limit = limits.get((point.cloud, point.region, point.instance_type))
        is_compared = point.market is Market.SPOT and limit is not None
        compared += is_compared
        if is_compared and limit is not None and point.micro_usd_per_hour > limit:
            reason = (
                f"it costs {hourly(point.micro_usd_per_hour)}, more than {hourly(limit)} on demand; "
                "one of the two is another product's price"
            )
            refused.append(Refusal(raw=raw, reason=reason))
        else:
            kept.append((raw, point))
    if len(refused) >= DEAR_ROWS and 2 * len(refused) > compared:
        raise FeedRefused(
            f"{source}: {len(refused)} of {compared} spot prices are above the on-demand price of the same machine, "
            f"for one {refused[0]}. Nothing of it was kept"
        )
    return kept, refused


def _refuse_constant(points: Sequence[PricePoint], source: str) -> None:
    for market in Market:
        rows = [point for point in points if point.market is market]
        types = {point.instance_type for point in rows}
        prices = {point.micro_usd_per_hour for point in rows}
        if len(types) >= CONSTANT_TYPES and len(prices) == 1:
            raise FeedRefused(
                f"{source}: {len(types)} instance types cost {hourly(prices.pop())} each ({market.value}); "
                "a market has more than one price. Nothing of it was kept"
            )
