"""Prices in the ledger: each price that a cloud reported is kept once, and read back by place and time.

The promise: the same price reported twice is one row, from any source process and at any rate of polling. Every query
is answered from an index, so a million rows stay quick (tests/launcher/test_price_history.py).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.orm import Session

from engine.events import Market
from launcher.ledger.models import CapacityAdviceRow, PriceRow
from launcher.market.prices import CURRENCY, AdviceKind, CapacityAdvice, PricePoint

POOL = (PriceRow.zone, PriceRow.region, PriceRow.instance_type, PriceRow.market, PriceRow.source, PriceRow.cloud)
"""Columns of a price series, which has one price at a time. The order is the order of the index; otherwise a query
over all pools would sort a million rows."""

COLUMNS = (
    PriceRow.cloud,
    PriceRow.region,
    PriceRow.zone,
    PriceRow.zone_id,
    PriceRow.instance_type,
    PriceRow.market,
    PriceRow.micro_usd_per_hour,
    PriceRow.source,
    PriceRow.source_id,
    PriceRow.effective_ms,
    PriceRow.last_seen_ms,
)


def record_prices(session: Session, points: Iterable[PricePoint]) -> int:
    """Store the new prices of `points`, and update the last-seen time of known prices.

    Return the number of new prices.

    The caller must hold the write lock from the start (`store.writing`), because the count compares the newest row
    before and after.
    """
    rows = [
        {
            "cloud": point.cloud,
            "region": point.region,
            "zone": point.zone,
            "zone_id": point.zone_id,
            "instance_type": point.instance_type,
            "market": point.market.value,
            "micro_usd_per_hour": point.micro_usd_per_hour,
            "currency": CURRENCY,
            "source": point.source,
            "source_id": point.source_id,
            "effective_ms": point.effective_ms,
            "observed_ms": point.observed_ms,
            "last_seen_ms": point.observed_ms,
        }
        for point in points
    ]
    if not rows:
        return 0
    keep = insert(PriceRow)
    latest_ms = func.max(PriceRow.last_seen_ms, keep.excluded.last_seen_ms)
    key = [column.key for column in POOL] + ["effective_ms", "micro_usd_per_hour"]
    before = _newest_id(session)
    keep_once = keep.on_conflict_do_update(index_elements=key, set_={"last_seen_ms": latest_ms})
    session.connection().execute(keep_once, rows)
    return _newest_id(session) - before


def _newest_id(session: Session) -> int:
    return session.scalar(select(func.max(PriceRow.id))) or 0


def latest_prices(
    session: Session,
    *,
    clouds: Collection[str] = (),
    regions: Collection[str] = (),
    instance_types: Collection[str] = (),
    market: Market | None = None,
) -> list[PricePoint]:
    """Return the current price of each pool, one per source. An empty collection selects everything.

    `observed_ms` is the time of the last query that returned the price, for the age of the price.
    """
    newest = select(*POOL, func.max(PriceRow.effective_ms).label("newest_ms")).group_by(*POOL)
    newest = newest.where(*_among(clouds, regions, instance_types, market))
    return _one_per_pool(_at_newest(session, newest))


def price_history(
    session: Session,
    place: str,
    *,
    since_ms: int,
    until_ms: int,
    instance_types: Collection[str] = (),
    market: Market | None = None,
) -> list[PricePoint]:
    """Return every price of a place between two moments, oldest first, with the prices held at the first.

    `place` is the name of a zone, an AWS zone id, or a region for prices of a whole region.
    """
    here = (
        or_(PriceRow.zone == place, PriceRow.zone_id == place, and_(PriceRow.zone == "", PriceRow.region == place)),
        *_among((), (), instance_types, market),
    )
    held = select(*POOL, func.max(PriceRow.effective_ms).label("newest_ms")).group_by(*POOL)
    held = held.where(*here, PriceRow.effective_ms <= since_ms)
    changes = (
        select(*COLUMNS)
        .where(*here, PriceRow.effective_ms > since_ms, PriceRow.effective_ms <= until_ms)
        .order_by(PriceRow.effective_ms, PriceRow.id)
    )
    opening = _one_per_pool(_at_newest(session, held))
    return sorted(opening, key=lambda point: point.effective_ms) + [_point(row) for row in session.execute(changes)]


def places(session: Session) -> list[str]:
    """Return every zone with a known price, and every region with prices of its own."""
    named = select(PriceRow.zone, PriceRow.region).group_by(PriceRow.zone, PriceRow.region)
    return sorted({zone or region for zone, region in session.execute(named)})


def _among(
    clouds: Collection[str], regions: Collection[str], instance_types: Collection[str], market: Market | None
) -> list[ColumnElement[bool]]:
    wanted = ((PriceRow.cloud, clouds), (PriceRow.region, regions), (PriceRow.instance_type, instance_types))
    found: list[ColumnElement[bool]] = [column.in_(values) for column, values in wanted if values]
    return found if market is None else [*found, PriceRow.market == market.value]


def _at_newest(session: Session, newest: Any) -> Sequence[Any]:
    """Return the newest price rows of some pools.

    `newest`: a query for the columns of each pool and the newest time, `newest_ms`, of a price in the pool.
    """
    which = newest.subquery()
    same = [column == which.c[column.key] for column in POOL]
    return session.execute(
        select(*COLUMNS)
        .join(which, and_(*same, PriceRow.effective_ms == which.c.newest_ms))
        .order_by(*POOL, PriceRow.last_seen_ms, PriceRow.id)
    ).all()


def _one_per_pool(rows: Iterable[Any]) -> list[PricePoint]:
    """Return one price per pool. A corrected price comes last in `rows` and wins."""
    return list({point.pool: point for point in map(_point, rows)}.values())


def _point(row: Any) -> PricePoint:
    return PricePoint(
        cloud=row.cloud,
        region=row.region,
        zone=row.zone,
        zone_id=row.zone_id,
        instance_type=row.instance_type,
        market=Market(row.market),
        micro_usd_per_hour=row.micro_usd_per_hour,
        source=row.source,
        source_id=row.source_id,
        effective_ms=row.effective_ms,
        observed_ms=row.last_seen_ms,
    )


# --- capacity advice ---------------------------------------------------------------------------------


def record_advice(session: Session, advice: Iterable[CapacityAdvice]) -> None:
    """Store the new estimates."""
    rows = [
        {
            "cloud": one.cloud,
            "region": one.region,
            "zone": one.zone,
            "instance_type": one.instance_type,
            "kind": one.kind.value,
            "value": one.value,
            "from_ms": one.from_ms,
            "until_ms": one.until_ms,
            "observed_ms": one.observed_ms,
            "source": one.source,
        }
        for one in advice
    ]
    if rows:
        session.connection().execute(insert(CapacityAdviceRow).on_conflict_do_nothing(), rows)


def capacity_advice(session: Session, *, since_ms: int = 0, zone: str | None = None) -> list[CapacityAdvice]:
    """Return the clouds' estimates for moments after `since_ms`, oldest first."""
    wanted = select(CapacityAdviceRow).where(CapacityAdviceRow.until_ms >= since_ms)
    if zone is not None:
        wanted = wanted.where(CapacityAdviceRow.zone == zone)
    rows = session.scalars(wanted.order_by(CapacityAdviceRow.until_ms, CapacityAdviceRow.id))
    return [
        CapacityAdvice(
            cloud=row.cloud,
            region=row.region,
            zone=row.zone,
            instance_type=row.instance_type,
            kind=AdviceKind(row.kind),
            value=row.value,
            from_ms=row.from_ms,
            until_ms=row.until_ms,
            observed_ms=row.observed_ms,
            source=row.source,
        )
        for row in rows
    ]
