"""Prices and hazards by zone: what the clouds asked last, and what happened to nodes that were bought there."""

from dataclasses import dataclass

from sqlalchemy.orm import Session

from engine.events import Market
from launcher.ledger.exposure import pool_histories
from launcher.ledger.prices import latest_prices
from launcher.market.hazard import POOLED, HazardPrior, PoolHistory, Survival, around, prior_of
from launcher.market.instance_types import instance_type_of
from launcher.market.pools import Pool
from launcher.market.prices import PricePoint
from launcher.money import HOUR_MS

POOLS_SHOWN = 300
"""Most pools on the page. `spotrl prices show` prints all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRow:
    """One instance type in one zone. Prices: micro-dollars an hour; None if no cloud reported one.

    `hazard`: preemptions per node-hour in the first hour of a node: mean, 5 % end, 95 % end.
    """

    cloud: str
    zone: str
    instance_type: str
    spot_micro_usd: int | None
    on_demand_micro_usd: int | None
    seen_ms: int | None
    hazard: tuple[float, float, float]
    preempted: int
    watched_hours: float
    launches: int
    refusals: int
    basis: str


def pool_rows(session: Session, now_ms: int) -> tuple[list[PoolRow], int]:
    """Return the pools with a spot price or a spot node, and their number before the list was bounded.

    Pools that were watched longest come first, then the cheapest.
    """
    points = latest_prices(session)
    spot = {_pool(point): point for point in points if point.market is Market.SPOT}
    steady = {_pool(point): point for point in points if point.market is not Market.SPOT}
    histories = {pool: history for pool, history in pool_histories(session, now_ms).items() if pool.zone}
    watched = [(pool, histories.get(pool, PoolHistory(pool=pool))) for pool in {**histories, **spot}]
    rows = [
        _row(
            history,
            history.survival(_prior_of(pool), now_ms, around(pool, histories.values())),
            spot.get(pool),
            steady.get(pool, steady.get(_of_region(pool))),
        )
        for pool, history in watched
    ]
    rows.sort(key=lambda row: (-row.watched_hours, row.spot_micro_usd or 0, row.zone, row.instance_type))
    return rows[:POOLS_SHOWN], len(rows)


def _prior_of(pool: Pool) -> HazardPrior:
    kind = instance_type_of(pool.cloud, pool.instance_type)
    return POOLED if kind is None else prior_of(kind.accelerator, kind.gpus)


def _row(history: PoolHistory, survival: Survival, spot: PricePoint | None, steady: PricePoint | None) -> PoolRow:
    pool, odds = history.pool, history.odds()
    first_hour = [curve.expected_preemptions(1.0) for curve in (survival.mean, survival.low, survival.high)]
    return PoolRow(
        cloud=pool.cloud,
        zone=pool.zone or pool.region,
        instance_type=pool.instance_type,
        spot_micro_usd=spot.micro_usd_per_hour if spot is not None else None,
        on_demand_micro_usd=steady.micro_usd_per_hour if steady is not None else None,
        seen_ms=spot.observed_ms if spot is not None else None,
        hazard=(first_hour[0], first_hour[1], first_hour[2]),
        preempted=sum(survival.evidence.reclaims),
        watched_hours=sum(survival.evidence.ms) / HOUR_MS,
        launches=odds.successes,
        refusals=odds.failures,
        basis=survival.basis.value,
    )


def _pool(point: PricePoint) -> Pool:
    return Pool(cloud=point.cloud, region=point.region, zone=point.zone, instance_type=point.instance_type)


def _of_region(pool: Pool) -> Pool:
    """Return the pool of the whole region: on-demand prices have no zone."""
    return Pool(cloud=pool.cloud, region=pool.region, zone="", instance_type=pool.instance_type)
