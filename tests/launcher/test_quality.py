"""Verdicts on prices: each rule covers an error seen in a public price list."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.events import Market
from launcher.market.offers import Offer
from launcher.market.quality import Quality, judge


def offer(usd: float, region: str = "east", zone: str = "", gpus: int = 8, quality: Quality = Quality.OK) -> Offer:
    """Return an offer: spot if a zone is given, else on demand."""
    return Offer(
        cloud="gcp",
        region=region,
        zone=zone,
        instance_type=f"a3-{gpus}g",
        accelerator="H100",
        gpus=gpus,
        market=Market.SPOT if zone else Market.ON_DEMAND,
        micro_usd_per_hour=round(usd * 1_000_000),
        source="s",
        observed_at="2026-11-22",
        quality=quality,
    )


def verdicts(*offers: Offer) -> list[Quality]:
    return [each.quality for each in judge(offers)]


@pytest.mark.parametrize(
    ("spot", "verdict"),
    [
        (19.19, Quality.OK),
        (87.83, Quality.SAME_AS_ON_DEMAND),
        (87.84, Quality.ABOVE_ON_DEMAND),
        (8.783, Quality.TENTH_OF_ON_DEMAND),
        (8.791, Quality.TENTH_OF_ON_DEMAND),  # .08 of 87.83 is within .1 %
        (8.792, Quality.OK),  # .09 is not
        (8.774, Quality.OK),
        (0.00001, Quality.PLACEHOLDER),  # the price of moto
        (0.15, Quality.PLACEHOLDER),  # under 2 cents a GPU
    ],
)
def test_spot_is_compared_with_on_demand(spot, verdict):
    assert verdicts(offer(87.83), offer(spot, zone="z")) == [Quality.OK, verdict]


def test_jakarta_p5_is_a_tenth_within_the_rounding_of_the_list():
    assert verdicts(offer(75.9552), offer(7.5955, zone="apse3-az1"))[1] is Quality.TENTH_OF_ON_DEMAND


def test_spot_of_a_region_is_not_compared_with_another_region():
    assert verdicts(offer(10, "east"), offer(20, "west", zone="w")) == [Quality.OK, Quality.OK]


def test_a_calendar_mode_rate_is_an_outlier_among_regions():
    """$4.20 a GPU in one region, $9.80 in three others: 57 % below."""
    regions = [offer(78.4, "a"), offer(78.4, "b"), offer(78.4, "c"), offer(33.6, "d")]
    assert verdicts(*regions) == [Quality.OK] * 3 + [Quality.OUTLIER]


def test_forty_percent_off_is_no_outlier_yet():
    assert verdicts(offer(100, "a"), offer(100, "b"), offer(60, "c")) == [Quality.OK] * 3
    assert verdicts(offer(100, "a"), offer(100, "b"), offer(59.99, "c"))[2] is Quality.OUTLIER
    assert verdicts(offer(100, "a"), offer(100, "b"), offer(140.01, "c"))[2] is Quality.OUTLIER


def test_two_different_regions_alone_give_no_outlier():
    assert verdicts(offer(78.4, "a"), offer(33.6, "b")) == [Quality.OK] * 2


def test_spot_may_be_cheap_in_one_region():
    spot = [offer(20, "a", zone="a"), offer(20, "b", zone="b"), offer(20, "c", zone="c"), offer(5, "d", zone="d")]
    assert verdicts(*spot) == [Quality.OK] * 4


def test_a_placeholder_on_demand_judges_no_spot():
    assert verdicts(offer(8000), offer(20, zone="z")) == [Quality.PLACEHOLDER, Quality.OK]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Quality.OK, Quality.OK),
        (Quality.UNVERIFIED, Quality.UNVERIFIED),
        (Quality.OUTLIER, Quality.UNVERIFIED),
    ],
)
def test_without_an_objection_a_price_has_the_quality_of_its_source(before, after):
    assert verdicts(offer(10, quality=before)) == [after]


prices = st.integers(min_value=1, max_value=10**9)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from(["", "z"]), prices), max_size=12))
def test_judging_changes_only_the_verdict_and_is_idempotent(rows):
    offers = [replace(offer(1, region, zone), micro_usd_per_hour=price) for region, zone, price in rows]
    judged = judge(offers)
    assert [replace(each, quality=Quality.OK) for each in judged] == offers
    assert judge(judged) == judged
