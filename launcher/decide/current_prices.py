"""Replace the prices in a plan's options with the latest prices of the clouds."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.events import Market
from launcher.market.prices import time_ms
from launcher.placement.options import Option, SiteOptions


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """A price with its source and its time."""

    micro_usd_per_hour: int
    source: str
    observed_at: str

    def is_newer_than(self, observed_at: str) -> bool:
        """Return whether this price is newer.

        A price without a date ("a snapshot of 2025") is older than any dated price.
        """
        return (time_ms(self.observed_at) or 0) > (time_ms(observed_at) or 0)


class PriceNow:
    """Latest prices from the clouds.

    AWS spot prices are per zone; if a zone has no price, the price of the region (zone "") holds.
    """

    def __init__(self, prices: Mapping[tuple[str, ...], Price] | None = None) -> None:
        self._prices = prices or {}

    def of(self, place: tuple[str, ...]) -> Price | None:
        """Return the latest price for an `Option.place`, or None."""
        cloud, region, _, instance_type, market = place
        return self._prices.get(place) or self._prices.get((cloud, region, "", instance_type, market))


def repriced(site: SiteOptions, prices: PriceNow) -> SiteOptions:
    """Return the site with the latest prices. An option without a newer price keeps the price of the plan."""
    return replace(
        site,
        trainer=tuple(_repriced(option, prices) for option in site.trainer),
        rollout=tuple(_repriced(option, prices) for option in site.rollout),
    )


def _repriced(option: Option, prices: PriceNow) -> Option:
    now = prices.of(option.place)
    if now is None or not now.is_newer_than(option.placement.price_observed_at):
        return option
    return Option(
        placement=replace(
            option.placement,
            micro_usd_per_hour=now.micro_usd_per_hour,
            price_source=now.source,
            price_observed_at=now.observed_at,
        ),
        on_demand_micro_usd_per_hour=max(option.on_demand_micro_usd_per_hour, now.micro_usd_per_hour)
        if option.placement.market is Market.ON_DEMAND
        else option.on_demand_micro_usd_per_hour,
    )
