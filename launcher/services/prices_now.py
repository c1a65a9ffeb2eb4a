"""The latest prices of a job's clouds, as the user pays them."""

from sqlalchemy.orm import Session

from launcher.decide.current_prices import Price, PriceNow
from launcher.job.schema import Job
from launcher.ledger.prices import latest_prices
from launcher.market.quality import USABLE
from launcher.services.on_offer import on_offer
from launcher.services.own_prices import as_you_pay


def prices_now(session: Session, job: Job, now_ms: int) -> PriceNow:
    """Return the clouds' latest prices, adjusted to the user's overrides and discounts."""
    offers = on_offer((), latest_prices(session, clouds=job.clouds), now_ms)
    return PriceNow(
        {
            (
                offer.cloud,
                offer.region,
                "" if offer.zone == offer.region else offer.zone,
                offer.instance_type,
                offer.market,
            ): Price(micro_usd_per_hour=offer.micro_usd_per_hour, source=offer.source, observed_at=offer.observed_at)
            for offer in as_you_pay(offers, job.price_overrides, job.discounts, now_ms)
            if offer.quality in USABLE
        }
    )
