"""The user's real prices: overrides and discounts from the job or the user's config, noted on each changed offer.

Pure.

The promise: a price that differs from the list price is marked in `source`, and therefore on every line of every plan.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime

from launcher.job.sections import Discount, PriceOverride
from launcher.market.offers import Offer
from launcher.money import hourly


def as_you_pay(
    offers: Iterable[Offer], overrides: Sequence[PriceOverride], discounts: Sequence[Discount], now_ms: int
) -> tuple[Offer, ...]:
    """Return the offers at the user's prices.

    An override sets the price and beats every discount; discounts multiply.

    An override is dated now, because the user states a current price. A discount keeps the date of the list price.
    """
    return tuple(_as_you_pay(offer, overrides, discounts, now_ms) for offer in offers)


def _as_you_pay(offer: Offer, overrides: Sequence[PriceOverride], discounts: Sequence[Discount], now_ms: int) -> Offer:
    for number, override in enumerate(overrides):
        if _overrides(override, offer):
            return replace(
                offer,
                micro_usd_per_hour=override.price,
                source=f"price_overrides[{number}]; listed {hourly(offer.micro_usd_per_hour)} by {offer.source}",
                observed_at=datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="seconds"),
            )
    for number, discount in enumerate(discounts):
        if _discounts(discount, offer):
            offer = replace(
                offer,
                micro_usd_per_hour=discounted(offer.micro_usd_per_hour, discount.percent),
                source=f"{offer.source}, less {discount.percent:g} % (discounts[{number}])",
            )
    return offer


def discounted(micro_usd: int, percent: float) -> int:
    """Return the discounted price, rounded up to the micro-dollar: $40 less 12.5 % is $35."""
    hundredths = 10_000 - round(percent * 100)
    return -(-micro_usd * hundredths // 10_000)


def _overrides(override: PriceOverride, offer: Offer) -> bool:
    return (override.cloud, override.instance_type, override.market) == (
        offer.cloud,
        offer.instance_type,
        offer.market,
    ) and override.region in (None, offer.region)


def _discounts(discount: Discount, offer: Offer) -> bool:
    is_same_market = (discount.cloud, discount.market) == (offer.cloud, offer.market)
    return is_same_market and discount.instance_type in (None, offer.instance_type)
