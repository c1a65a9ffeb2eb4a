"""Offers for a plan: the price tables, updated by newer prices of the clouds."""

from dataclasses import replace

from engine.events import Market
from launcher.market.offers import Offer
from launcher.market.prices import PricePoint, time_ms
from launcher.money import HOUR_MS
from launcher.services.on_offer import on_offer

NOW_MS = time_ms("2026-11-22T12:00:00+00:00") or 0

LISTED = Offer(
    cloud="aws",
    region="us-east-1",
    zone="use1-az5",
    zone_id="use1-az5",
    instance_type="p5.48xlarge",
    accelerator="H100",
    gpus=8,
    market=Market.SPOT,
    micro_usd_per_hour=14_250_000,
    source="a list",
    observed_at="2026-11-22T11:00:00+00:00",
)

CLOUD_PRICE = PricePoint(
    cloud="aws",
    region="us-east-1",
    zone="us-east-1c",
    zone_id="use1-az5",
    instance_type="p5.48xlarge",
    market=Market.SPOT,
    micro_usd_per_hour=19_000_000,
    source="aws ec2 DescribeSpotPriceHistory",
    source_id="p5.48xlarge@use1-az5",
    effective_ms=NOW_MS - 9 * HOUR_MS,
    observed_ms=NOW_MS,
)


def prices(offers):
    return [(offer.zone, offer.instance_type, offer.micro_usd_per_hour / 1e6) for offer in offers]


def test_a_clouds_price_replaces_an_older_listed_one_with_our_zone_name():
    (offer,) = on_offer([LISTED], [CLOUD_PRICE], NOW_MS)
    assert prices([offer]) == [("us-east-1c", "p5.48xlarge", 19)]
    assert offer.observed_at == "2026-11-22T12:00:00+00:00", "the time of the last observation, not of the change"


def test_a_listed_price_observed_later_stays():
    observed_long_ago = replace(CLOUD_PRICE, observed_ms=NOW_MS - 2 * HOUR_MS)
    assert prices(on_offer([LISTED], [observed_long_ago], NOW_MS)) == [("us-east-1c", "p5.48xlarge", 14.25)]


def test_a_zone_name_applies_to_all_offers_of_the_zone():
    other = replace(LISTED, instance_type="p5.4xlarge", gpus=1, micro_usd_per_hour=2_470_000)
    assert prices(on_offer([LISTED, other], [CLOUD_PRICE], NOW_MS)) == [
        ("us-east-1c", "p5.48xlarge", 19),
        ("us-east-1c", "p5.4xlarge", 2.47),
    ]


def test_the_account_that_queried_last_names_the_zone():
    another = replace(CLOUD_PRICE, zone="us-east-1a", observed_ms=NOW_MS - HOUR_MS)
    for cloud_prices in ([CLOUD_PRICE, another], [another, CLOUD_PRICE]):
        assert prices(on_offer([LISTED], cloud_prices, NOW_MS)) == [("us-east-1c", "p5.48xlarge", 19)]


def test_a_price_too_old_to_buy_at_gives_way_to_current_ones():
    old = replace(LISTED, zone="use1-az1", zone_id="use1-az1", observed_at="2026-11-20T12:00:00+00:00")
    assert prices(on_offer([old], [CLOUD_PRICE], NOW_MS)) == [("us-east-1c", "p5.48xlarge", 19)]
    assert prices(on_offer([old], [], NOW_MS)) == [("use1-az1", "p5.48xlarge", 14.25)], "a plan that cannot be bought"


def test_an_unknown_instance_type_is_not_on_offer():
    assert on_offer([], [replace(CLOUD_PRICE, instance_type="p9.48xlarge")], NOW_MS) == ()


def test_a_gpu_that_torch_cannot_use_is_not_on_offer_from_any_source():
    old = replace(LISTED, instance_type="p3.2xlarge", accelerator="V100", gpus=1, micro_usd_per_hour=1_000_000)
    cloud_prices = replace(CLOUD_PRICE, instance_type="p3.8xlarge", micro_usd_per_hour=4_000_000)
    assert prices(on_offer([LISTED, old], [cloud_prices], NOW_MS)) == [("us-east-1c", "p5.48xlarge", 14.25)]
