"""The user's own prices: overrides and discounts, shown where they change a price."""

from dataclasses import replace

import pytest

from engine.events import Market
from launcher.job.sections import Discount, PriceOverride
from launcher.market.offers import Age, Offer, age_of
from launcher.services.own_prices import as_you_pay, discounted

NOW_MS = 1_795_348_800_000

P5 = Offer(
    cloud="aws",
    region="us-east-2",
    zone="",
    instance_type="p5.48xlarge",
    accelerator="H100",
    gpus=8,
    market=Market.ON_DEMAND,
    micro_usd_per_hour=55_040_000,
    source="a list",
    observed_at="2026-11-01",
)
SPOT = replace(P5, zone="use2-az1", market=Market.SPOT, micro_usd_per_hour=17_000_000)
P4 = replace(P5, instance_type="p4d.24xlarge", micro_usd_per_hour=21_960_000)


def override(**fields) -> PriceOverride:
    return PriceOverride(**{"cloud": "aws", "instance_type": "p5.48xlarge", "price": "$40/h"} | fields)


def test_without_overrides_no_price_changes():
    assert as_you_pay([P5, SPOT], (), (), NOW_MS) == (P5, SPOT)


def test_an_override_is_the_price_and_shows_the_list_price():
    offer, spot, other = as_you_pay([P5, SPOT, P4], [override()], (), NOW_MS)
    assert offer.micro_usd_per_hour == 40_000_000
    assert offer.source == "price_overrides[0]; listed $55.04/h by a list"
    assert age_of(offer.observed_at, offer.market, NOW_MS) is Age.FRESH, "you say so now"
    assert (spot, other) == (SPOT, P4), "of another market, and another instance"


@pytest.mark.parametrize(
    ("region", "price"), [("us-east-2", 40_000_000), ("us-west-2", 55_040_000), (None, 40_000_000)]
)
def test_an_override_may_cover_one_region(region, price):
    assert as_you_pay([P5], [override(region=region)], (), NOW_MS)[0].micro_usd_per_hour == price


def test_a_discount_reduces_the_list_price_and_keeps_its_date():
    offer, spot, other = as_you_pay([P5, SPOT, P4], (), [Discount(cloud="aws", percent=12.5)], NOW_MS)
    assert (offer.micro_usd_per_hour, offer.observed_at) == (48_160_000, "2026-11-01")
    assert offer.source == "a list, less 12.5 % (discounts[0])"
    assert spot == SPOT
    assert other.micro_usd_per_hour == 19_215_000


def test_discounts_multiply_and_an_override_beats_them():
    half = [Discount(cloud="aws", percent=50, instance_type="p5.48xlarge")] * 2
    assert as_you_pay([P5], (), half, NOW_MS)[0].micro_usd_per_hour == 13_760_000
    assert as_you_pay([P5], [override()], half, NOW_MS)[0].micro_usd_per_hour == 40_000_000


@pytest.mark.parametrize(
    ("price", "percent", "less"), [(40, 12.5, 35), (3, 33.33, 3), (100, 99.99, 1), (10_000, 0.01, 9_999)]
)
def test_a_discount_is_rounded_up_to_the_micro_dollar(price, percent, less):
    assert discounted(price, percent) == less
