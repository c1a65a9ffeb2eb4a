"""Judge prices: each offer is compared with the rest of the tables and keeps a verdict. Pure.

A price that looks wrong stays in the table, for a person to see with the reason. Plans take `USABLE` prices only. Each
rule answers an error found in a widely used price list.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum
from statistics import median
from typing import TYPE_CHECKING

from engine.events import Market
from launcher.market.prices import Product
from launcher.money import MICRO

if TYPE_CHECKING:
    from launcher.market.offers import Offer


class Quality(StrEnum):
    """Verdict on a price."""

    OK = "ok"
    UNVERIFIED = "unverified"
    """Published by a third party; spotrl has not asked the cloud."""
    SAME_AS_ON_DEMAND = "same-as-on-demand"
    """Spot without a discount: probably without capacity, too."""
    TENTH_OF_ON_DEMAND = "tenth-of-on-demand"
    """Spot at exactly a tenth: the value that some lists use for a zone without a spot market."""
    OUTLIER = "outlier"
    """On demand, far from the same instance in other regions: another product's price, like a calendar-mode rate."""
    ABOVE_ON_DEMAND = "above-on-demand"
    """Spot dearer than on demand: one of the two is another product's price."""
    PLACEHOLDER = "placeholder"
    """A price too low or too high for any GPU ever sold."""


USABLE = frozenset({Quality.OK, Quality.UNVERIFIED})
"""Verdicts that a plan may buy."""

LEAST_PER_GPU, MOST_PER_GPU = MICRO // 50, 100 * MICRO
"""Limits per GPU in micro-dollars an hour. A simulator answers $0.00001 and a list $700; real GPUs cost $0.1 (T4
spot) to $15 (B200)."""

OUTLIER_PERCENT = 40
"""Distance from the median that marks an outlier, in percent. London is really 30 % dearer than Virginia (H100); a
calendar-mode rate was 57 % cheaper."""

REGIONS_FOR_A_MEDIAN = 3
"""Regions needed for a median. If only two regions disagree, the wrong region is unknown."""


def judge(offers: Iterable["Offer"]) -> tuple["Offer", ...]:
    """Return the same offers, each with its verdict. An offer that breaks no rule keeps `ok` or `unverified`."""
    offers = tuple(offers)
    on_demand: dict[Product, int] = {}
    for offer in offers:
        if offer.market is Market.ON_DEMAND and not is_placeholder(offer):
            on_demand.setdefault((offer.cloud, offer.region, offer.instance_type), offer.micro_usd_per_hour)
    medians = _medians(on_demand)
    return tuple(replace(offer, quality=_verdict(offer, on_demand, medians)) for offer in offers)


def _verdict(offer: "Offer", on_demand: Mapping[Product, int], medians: Mapping[tuple[str, str], float]) -> Quality:
    price = offer.micro_usd_per_hour
    if is_placeholder(offer):
        return Quality.PLACEHOLDER
    if offer.market is Market.SPOT:
        limit = on_demand.get((offer.cloud, offer.region, offer.instance_type))
        if limit is not None and price > limit:
            return Quality.ABOVE_ON_DEMAND
        if price == limit:
            return Quality.SAME_AS_ON_DEMAND
        if limit is not None and is_a_tenth(price, limit):
            return Quality.TENTH_OF_ON_DEMAND
    elif is_outlier(price, medians.get((offer.cloud, offer.instance_type))):
        return Quality.OUTLIER
    # An older verdict says nothing about today's price, and does not prove that the cloud was asked.
    return offer.quality if offer.quality in USABLE else Quality.UNVERIFIED


def is_placeholder(offer: "Offer") -> bool:
    """Return whether the price is below `LEAST_PER_GPU` or above `MOST_PER_GPU`.

    $0.15 for 8 GPUs is $0.01875 each, too low for any cloud.
    """
    price = offer.micro_usd_per_hour
    return not LEAST_PER_GPU * offer.gpus <= price <= MOST_PER_GPU * offer.gpus


def is_a_tenth(spot: int, on_demand: int) -> bool:
    """Return whether |10 spot - on demand| <= 0.1 % of on demand. $7.5955 is a tenth of $75.955."""
    return abs(10 * spot - on_demand) * 1000 <= on_demand


def is_outlier(price: int, middle: float | None) -> bool:
    """Return whether |price - median| > 40 % of the median.

    $33.60 beside two of $78.40 is an outlier, 57 % below.
    """
    return middle is not None and abs(price - middle) * 100 > OUTLIER_PERCENT * middle


def _medians(on_demand: Mapping[Product, int]) -> dict[tuple[str, str], float]:
    """Return the median price of each instance type over its regions.

    An instance type has one number of GPUs, so the comparison equals a comparison of prices per GPU.
    """
    prices = defaultdict(list)
    for (cloud, _, instance_type), price in on_demand.items():
        prices[cloud, instance_type].append(price)
    return {product: median(values) for product, values in prices.items() if len(values) >= REGIONS_FOR_A_MEDIAN}
