"""Prices in the ledger: stored once, read by place and time, and fast among a million."""

from dataclasses import replace

import pytest
from sqlalchemy.exc import IntegrityError

from engine.events import Market
from launcher.ledger.prices import (
    capacity_advice,
    latest_prices,
    places,
    price_history,
    record_advice,
    record_prices,
)
from launcher.ledger.store import open_ledger, writing
from launcher.market.prices import AdviceKind, CapacityAdvice, PricePoint
from tests.cpu_seconds import takes_less_than

NOW_MS = 1_763_726_400_000
HOUR_MS = 3_600_000


@pytest.fixture
def sessions(tmp_path):
    return open_ledger(tmp_path / "ledger.sqlite")


def point(hours_ago=0, dollars=14.25, **changes) -> PricePoint:
    one = PricePoint(
        cloud="aws",
        region="us-east-1",
        zone="us-east-1a",
        zone_id="use1-az1",
        instance_type="p5.48xlarge",
        market=Market.SPOT,
        micro_usd_per_hour=round(dollars * 1_000_000),
        source="aws ec2 DescribeSpotPriceHistory",
        source_id="",
        effective_ms=NOW_MS - hours_ago * HOUR_MS,
        observed_ms=NOW_MS,
    )
    return replace(one, **changes)


def on_demand(dollars=55.04):
    return point(720, dollars, zone="", zone_id="", market=Market.ON_DEMAND, source="aws pricing GetProducts")


def record(sessions, *points) -> int:
    with writing(sessions) as session:
        return record_prices(session, points)


def history(sessions, place, **options):
    with sessions() as session:
        options = {"since_ms": NOW_MS - 24 * HOUR_MS, "until_ms": NOW_MS} | options
        return price_history(session, place, **options)


def prices(points):
    return [point.micro_usd_per_hour / 1_000_000 for point in points]


def test_a_repeated_price_updates_the_time_of_its_row(sessions):
    assert record(sessions, point(), point(1, 15)) == 2
    assert record(sessions, point(observed_ms=NOW_MS + HOUR_MS), point(1, 15)) == 0
    with sessions() as session:
        (latest,) = latest_prices(session)
    assert (latest.micro_usd_per_hour, latest.observed_ms) == (14_250_000, NOW_MS + HOUR_MS)
    assert record(sessions, point(observed_ms=NOW_MS - HOUR_MS)) == 0  # a late observation does not make a price older
    with sessions() as session:
        assert latest_prices(session)[0].observed_ms == NOW_MS + HOUR_MS


def test_the_latest_price_of_each_pool_is_current(sessions):
    record(sessions, point(5, 20), point(2, 14.25), point(3, 9, zone="us-east-1b"), on_demand())
    with sessions() as session:
        assert sorted(prices(latest_prices(session))) == [9, 14.25, 55.04]
        assert prices(latest_prices(session, market=Market.ON_DEMAND)) == [55.04]
        assert prices(latest_prices(session, clouds=["gcp"])) == []
        assert len(latest_prices(session, regions=["us-east-1"], instance_types=["p5.48xlarge"])) == 3


def test_a_corrected_price_replaces_the_one_of_the_same_time(sessions):
    record(sessions, point(1, 14.25))
    record(sessions, point(1, 14.50, observed_ms=NOW_MS + 1))
    with sessions() as session:
        assert prices(latest_prices(session)) == [14.50]


def test_prices_of_two_sources_of_one_pool_are_both_listed(sessions):
    record(sessions, point(), point(dollars=14, source="another"))
    with sessions() as session:
        assert sorted(prices(latest_prices(session))) == [14, 14.25]


def test_the_history_begins_with_the_price_current_at_its_start(sessions):
    record(sessions, point(100, 1), point(50, 2), point(10, 3), point(5, 4))
    assert prices(history(sessions, "us-east-1a")) == [2, 3, 4]
    assert prices(history(sessions, "us-east-1a", until_ms=NOW_MS - 7 * HOUR_MS)) == [2, 3]
    assert prices(history(sessions, "us-east-1a", since_ms=0)) == [1, 2, 3, 4]


def test_a_place_is_a_zone_a_zone_id_or_a_region_with_own_prices(sessions):
    record(sessions, point(), on_demand(), point(dollars=9, zone="us-east-1b", zone_id="use1-az2"))
    assert prices(history(sessions, "us-east-1a")) == [14.25]
    assert prices(history(sessions, "use1-az2")) == [9]
    assert prices(history(sessions, "us-east-1")) == [55.04]
    assert history(sessions, "us-east-1c") == []
    with sessions() as session:
        assert places(session) == ["us-east-1", "us-east-1a", "us-east-1b"]


def test_a_history_can_be_limited_to_instance_types_and_a_market(sessions):
    record(sessions, point(), point(dollars=3, instance_type="p5.4xlarge"), point(dollars=60, market=Market.ON_DEMAND))
    assert prices(history(sessions, "us-east-1a", instance_types=["p5.4xlarge"])) == [3]
    assert prices(history(sessions, "us-east-1a", market=Market.ON_DEMAND)) == [60]


def test_the_ledger_refuses_a_price_of_0(sessions):
    with pytest.raises(IntegrityError, match="CHECK constraint failed: micro_usd_per_hour > 0"):
        record(sessions, point(dollars=0))


def test_a_capacity_estimate_is_stored_once(sessions):
    rate = CapacityAdvice(
        cloud="gcp",
        region="us-central1",
        zone="us-central1-a",
        instance_type="a3-highgpu-8g",
        kind=AdviceKind.PREEMPTION_RATE,
        value=0.25,
        from_ms=NOW_MS - 24 * HOUR_MS,
        until_ms=NOW_MS,
        observed_ms=NOW_MS,
        source="gcp compute advice.capacityHistory",
    )
    for _ in range(2):
        with writing(sessions) as session:
            record_advice(session, [rate, replace(rate, zone="us-central1-b", value=0.5)])
    with sessions() as session:
        assert [one.value for one in capacity_advice(session)] == [0.25, 0.5]
        assert capacity_advice(session, zone="us-central1-a") == [rate]
        assert capacity_advice(session, since_ms=NOW_MS + 1) == []


# --- a million ---------------------------------------------------------------------------------------

ZONES, TYPES, CHANGES = 100, 10, 1000
"""A hundred zones in ten regions, ten instance types in each, a thousand hourly prices of each: six weeks."""


@pytest.fixture(scope="module")
def million(tmp_path_factory):
    sessions = open_ledger(tmp_path_factory.mktemp("million") / "ledger.sqlite")
    columns = (
        "cloud, region, zone, zone_id, instance_type, market, micro_usd_per_hour, currency, source, source_id, "
        "effective_ms, observed_ms, last_seen_ms"
    )
    rows = (
        (
            *("aws", f"region-{zone // 10}", f"zone-{zone:02}", f"id-{zone:02}", f"type-{kind}", "spot"),
            1_000_000 + (zone * 7 + kind * 3 + change) % 500_000,
            *("USD", "a feed", ""),
            *(NOW_MS - change * HOUR_MS, NOW_MS, NOW_MS),
        )
        for zone in range(ZONES)
        for kind in range(TYPES)
        for change in reversed(range(CHANGES))  # in the order of the index, which is twice as fast
    )
    raw = sessions.kw["bind"].raw_connection()
    raw.driver_connection.execute("PRAGMA synchronous=OFF")
    raw.driver_connection.execute("BEGIN")
    raw.driver_connection.executemany(f"INSERT INTO price_point ({columns}) VALUES ({', '.join('?' * 13)})", rows)
    raw.driver_connection.execute("COMMIT")
    raw.close()
    return sessions


@pytest.mark.slow
def test_reading_a_zones_history_from_a_million_prices_is_fast(million):
    week = {"since_ms": NOW_MS - 168 * HOUR_MS}
    assert len(history(million, "zone-42", **week)) == TYPES * (1 + 168)
    of_a_type = {"since_ms": 0, "instance_types": ["type-3"]}
    assert history(million, "id-42", **week)
    assert history(million, "zone-42", **of_a_type)
    assert takes_less_than(0.2, lambda: history(million, "zone-42", **week))
    assert takes_less_than(0.2, lambda: history(million, "id-42", **week))
    assert takes_less_than(0.2, lambda: history(million, "zone-42", **of_a_type))


def test_a_refresh_among_a_million_prices_is_fast(million):
    fresh = [point(-1, 2 + kind, zone=f"zone-{zone:02}", zone_id="") for zone in range(100) for kind in range(5)]
    fresh = [replace(one, instance_type=f"fresh-{number}") for number, one in enumerate(fresh)]
    recorded = []
    assert takes_less_than(0.5, lambda: recorded.append(record(million, *fresh)), times=1)
    assert recorded == [len(fresh)]


def test_reading_current_prices_from_a_million_takes_under_a_second(million):
    def newest():
        with million() as session:
            return latest_prices(session, regions=["region-4"])

    assert len(newest()) == 10 * TYPES
    assert takes_less_than(1.0, newest)
