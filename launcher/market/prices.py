"""Validate the prices that clouds report. Pure; the time is passed in.

rows as received (text) -> believe -> price points | refusals, each with its reason

The promise: a number that could mislead a budget never becomes a `PricePoint`, and no row is dropped silently. A
refused row does not affect other rows. A feed that is wrong as a whole is refused as a whole, and none of its rows is
kept. Every rule answers an error seen in a real price list or simulator.
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
"""2015-01-01 in milliseconds UTC. Spot instances with these GPUs came later; moto, a simulator of AWS, dates its
prices 2006."""

CLOCK_SKEW_MS = 600_000
"""Limit for prices dated in the future, in milliseconds. Clocks differ by seconds; a wrong clock differs by hours."""

PLACEHOLDERS = {
    Decimal("0.00001"): "moto, a simulator of AWS, answers it",
    Decimal("700"): "price lists of TPUs say it",
}
"""Prices that stand for "no price here"."""

LEAST_MICRO_USD_PER_HOUR = MICRO // 100
"""A cent. The cheapest instance with a GPU costs ten times as much (T4, spot)."""

CONSTANT_TYPES = 3
"""Number of instance types at the same price that marks a default value instead of a market."""

OVERPRICED_ROWS = 3
"""Number of spot prices above on-demand from which the whole feed is suspect. Fewer are single wrong rows."""

Product = tuple[str, str, str]
"""Cloud, region, instance type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RawPrice:
    """A price row as received.

    `price`, `currency`, `unit` and `effective` are the cloud's own text, or text of our own for a missing field.
    """

    cloud: str
    region: str
    zone: str
    zone_id: str
    instance_type: str
    market: Market
    price: str
    currency: str
    unit: str
    """`hour` for the whole instance; every other unit is refused."""
    effective: str
    """ISO 8601; without an offset the time is UTC."""
    source: str
    source_id: str

    @property
    def name(self) -> str:
        """Return a name for people: `spot p5.48xlarge in us-east-1a`."""
        return f"{self.market.value} {self.instance_type or 'of no type'} in {self.zone or self.region or 'no place'}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PricePoint:
    """A validated price of a whole instance, without taxes, disks, traffic or discounts."""

    cloud: str
    region: str
    zone: str
    """Name of the zone; empty for a price of the whole region."""
    zone_id: str
    """AWS's id of the zone, because zone names differ between accounts. Empty on other clouds."""
    instance_type: str
    market: Market
    micro_usd_per_hour: int
    source: str
    source_id: str
    effective_ms: int
    """Time from which the price holds, as reported by the cloud."""
    observed_ms: int
    """Time of the query. For a price read from the ledger: time of the last query that returned the price."""

    @property
    def pool(self) -> tuple[str, ...]:
        """Return the key of a price series: a product in a place, from a single source.

        A series has a single price at a time.
        """
        return self.cloud, self.region, self.zone or self.zone_id, self.instance_type, self.market, self.source


class AdviceKind(StrEnum):
    """Kinds of a cloud's estimates of its spot capacity. No kind is a hazard."""

    OBTAINABILITY = "obtainability"
    """0 to 1: the probability that the request is met now."""
    UPTIME_HOURS = "uptime_hours"
    """Hours that most spot VMs of the request are expected to run."""
    PREEMPTION_RATE = "preemption_rate"
    """0 to 1: preempted spot VMs over all spot VMs that stopped, in one day."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityAdvice:
    """A cloud's estimate for spot instances of one type in one zone, over [`from_ms`, `until_ms`]."""

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
        """Return whether the value is possible: a chance in [0, 1], an uptime above 0, a rate above 0 and at most 1.

        NaN is never possible. A rate of 0 is refused, because a day without stopped VMs and an unset field also read 0.
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
    """A refused row: the value found and the allowed values."""

    raw: RawPrice
    reason: str

    def __str__(self) -> str:
        return f"{self.raw.name}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fetched:
    """Answer of one source. `failures`: parts of the source that did not answer; the remaining parts are kept."""

    prices: tuple[RawPrice, ...] = ()
    advice: tuple[CapacityAdvice, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    """Rows left out on purpose, explained for people."""


class PriceSource(Protocol):
    """A feed of prices. `AwsSpot` and the rest of `launcher/market/sources` query the clouds."""

    @property
    def name(self) -> str:
        """Cloud and call, as in the `source` of a price: `aws ec2 DescribeSpotPriceHistory`."""

    @property
    def cloud(self) -> str:
        """`aws` or `gcp`."""

    @property
    def gives_prices(self) -> bool:
        """Return whether an answer without prices is an error. False for a source that may have advice only."""

    def fetch(self, now_ms: int) -> Fetched:
        """Query the source, with bounded retries inside the client. May be repeated at any time.

        Raises `MissingCredentials` or `SourceFailed` if no part of the source answered.
        """


class FeedRefused(Failure):
    """A whole feed is refused; none of its rows is kept."""

    exit_code = ExitCode.STALE_CATALOG


# --- validation of a feed ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Belief:
    points: tuple[PricePoint, ...] = ()
    """Oldest first."""
    refused: tuple[Refusal, ...] = ()


def believe(
    raws: Sequence[RawPrice], *, source: str, now_ms: int, on_demand: Mapping[Product, int] | None = None
) -> Belief:
    """Split the rows of `source` into prices and refusals. Raises FeedRefused.

    `on_demand`: known on-demand prices in micro-dollars an hour, the upper limits of spot prices. On-demand prices of
    the feed count too. A price finer than a micro-dollar is rounded to the nearest micro-dollar (half to even), which
    changes an hour by half a millionth of a dollar at most.
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
    points, overpriced = _without_overpriced_spot(points, limits, source)
    refused += [*contradicting, *overpriced]
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
    """Return the on-demand price of each product of each region, the newest of several."""
    newest = sorted((p for p in points if p.market is Market.ON_DEMAND), key=lambda p: p.effective_ms)
    return {(p.cloud, p.region, p.instance_type): p.micro_usd_per_hour for p in newest}


# --- validation of a row -----------------------------------------------------------------------------


def _point(raw: RawPrice, now_ms: int) -> PricePoint:
    """Return the price point of a row. Raises ValueError with the reason of a refusal."""
    for column in ("region", "instance_type", "source"):
        if not getattr(raw, column).strip():
            raise ValueError(f"its {column.replace('_', ' ')} is empty; nobody could buy it")
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
    """Convert a price in dollars to micro-dollars an hour. Raises ValueError with the reason."""
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
    """Return an ISO 8601 time as milliseconds UTC, or None for any other text. A date alone is its first moment."""
    try:
        at = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def iso(at_ms: int) -> str:
    """Format milliseconds UTC as ISO 8601, to the second."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:60] + "…"


# --- comparison of rows ------------------------------------------------------------------------------

Row = tuple[RawPrice, PricePoint]


def _without_contradictions(rows: Iterable[Row]) -> tuple[list[Row], list[Refusal]]:
    """Refuse all rows that give one product several prices from the same moment.

    No rule could decide which of the prices holds. The same price reported twice counts once.
    """
    by_moment: defaultdict[object, dict[int, Row]] = defaultdict(dict)
    for raw, point in rows:
        by_moment[point.pool, point.effective_ms].setdefault(point.micro_usd_per_hour, (raw, point))
    kept: list[Row] = []
    refused = []
    for prices in by_moment.values():
        if len(prices) == 1:
            kept += prices.values()
            continue
        amounts = " and ".join(exact_dollars(price) for price in sorted(prices))
        since = next(iter(prices.values()))[0].effective
        reason = f"the feed says both {amounts} since {since}; one price can hold at a time"
        refused += [Refusal(raw=raw, reason=reason) for raw, _ in prices.values()]
    return kept, refused


def _without_overpriced_spot(
    rows: Sequence[Row], limits: Mapping[Product, int], source: str
) -> tuple[list[Row], list[Refusal]]:
    """Split the rows into kept rows and refusals: refuse a spot price above the on-demand price.

    The compared prices have the same cloud, region and instance type. A spot price above the on-demand price is taken
    for the price of another product. Rows without a known on-demand price are kept. A past spot price is compared with
    today's on-demand price, and may be refused after a fall of the on-demand price. Raises FeedRefused if at least
    `OVERPRICED_ROWS` spot prices, and more than half of the compared prices, are refused.
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
    if len(refused) >= OVERPRICED_ROWS and 2 * len(refused) > compared:
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
